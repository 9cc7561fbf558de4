"""What one card and its links really do: measured ceilings where they exist, else fractions of the datasheet."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mfubench.ceilings import Ceilings
from mfubench.ceilings.schema import AttentionRate, MatmulRate
from mfubench.config import ConfigError, RunConfig, Strict, parse
from mfubench.hardware import HardwareRow, find_gpu, peak_for
from mfubench.presets import CONFIG_DIR
from mfubench.yaml_files import load_yaml

# Rows and columns of output tiles, and the rate of each kind over the largest's.
TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.80), (64, 64, 0.60))
SPLIT_SHARE, LONG_INNER = 0.90, 8192


class TermPrior(Strict):
    """The correction factor of a term before anything was measured."""

    mean: float = Field(gt=0)
    deviation: float = Field(gt=0)


class Beliefs(Strict):
    """config/prediction.yaml: its comments say what each number is and where it comes from."""

    matmul_fraction: float = Field(gt=0)
    matmul_size: int = Field(ge=1)
    bandwidth_fraction: float = Field(gt=0)
    link_fraction: float = Field(gt=0)
    pcie_link_fraction: float = Field(gt=0)
    network_gb_s: float = Field(gt=0)
    memory_fraction: float = Field(gt=0, le=1)
    collective_latency_us: float = Field(ge=0)
    contention: dict[Literal["collective", "exchange"], Annotated[float, Field(ge=0)]]
    card_deviation: float = Field(ge=0)
    attention_fraction: dict[str, dict[str, float]]
    attention_half_length: float = Field(ge=0)
    attention_softmax_dims: float = Field(ge=0)
    kernel_gap_us: float = Field(ge=0)
    launch_us: dict[str, float]
    terms: dict[str, TermPrior]
    model_deviation: float = Field(gt=0)
    transfer_deviation: float = Field(ge=0)
    unseen_deviation: float = Field(ge=0)


@functools.cache
def read_beliefs(path: Path) -> Beliefs:
    return parse(Beliefs, load_yaml(path), path.name)


def load_beliefs() -> Beliefs:
    return read_beliefs(CONFIG_DIR / "prediction.yaml")


@dataclass(frozen=True)
class Rates:
    """Rates of one card in the arithmetic of one run, and of the links to its neighbours."""

    gpu: str
    peak_tflops: float  # dense datasheet peak of the arithmetic: what MFU divides by
    matmul_tflops: float  # what large matmuls approach, their operands' traffic counted apart
    attention: dict[str, float]  # backend -> TFLOP/s, causal, forward and backward, head size 128, 2,048 tokens
    bandwidth_gb_s: float  # of copies and elementwise work
    operand_gb_s: float  # at which matmuls read and write their operands
    link_gb_s: float  # bus bandwidth of large collectives inside a node
    network_gb_s: float  # between nodes, a card
    multiprocessors: int | None
    memory_gib: float  # that a process can have
    power_limit_w: float
    attention_half_length: float
    attention_softmax_dims: float
    kernel_gap_us: float
    launch_us: dict[str, float]
    collective_latency_us: float
    contention: dict[Literal["collective", "exchange"], float]  # by how gradients are reduced
    card_deviation: float
    measured: tuple[str, ...] = ()  # which of these come from measured ceilings of this kind of card
    related: str | None = None  # card with the same chip whose ceilings scale these

    def attention_tflops(self, backend: str) -> float:
        """`auto` is the fastest there is. Raises ConfigError for a kernel that does not run on the card."""
        if backend == "auto":
            return max(self.attention.values())
        if backend not in self.attention:
            raise ConfigError(
                f"attention: {backend} does not run on {self.gpu}; there is {', '.join(self.attention)}, or auto"
            )
        return self.attention[backend]

    def attention_slowdown(self, seq_len: int, head_dim: int) -> float:
        """Time a FLOP of attention takes, over that at 2,048 tokens and head size 128."""
        by_head = (1 + self.attention_softmax_dims / head_dim) / (1 + self.attention_softmax_dims / 128)
        return by_head * (1 + self.attention_half_length / seq_len) / (1 + self.attention_half_length / 2048)


def tile_share(rows: int, inner: int, columns: int, multiprocessors: int | None) -> float:
    """Share of the large-matmul rate that whole waves of output tiles over the multiprocessors allow.

    Tiles are those of cuBLAS's larger kernels; a long inner dimension can be split over idle multiprocessors instead.
    """
    if multiprocessors is None:
        return 1.0
    best = SPLIT_SHARE if inner >= LONG_INNER else 0.0
    for tile_rows, tile_columns, rate in TILES:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        waves = -(-tiles // multiprocessors)
        whole_tiles = rows * columns / (tile_rows * tile_columns)
        best = max(best, rate * whole_tiles / (waves * multiprocessors))
    return best


def generation(row: HardwareRow) -> str:
    """The family whose attention kernels a card runs, by what its tensor cores do a clock."""
    if (row.flops_per_clock or 0) >= 8192:
        return "blackwell"
    return "hopper" if (row.flops_per_clock or 0) >= 4096 else "other"


def datasheet_rates(gpu: str, config: RunConfig, network_gb_s: float | None = None) -> Rates:
    """Rates of a card nobody measured: fractions of its datasheet (config/prediction.yaml).

    Raises ConfigError for a card without a row and for arithmetic it does not have.
    """
    beliefs = load_beliefs()
    row = find_gpu(gpu)
    peak = peak_for(gpu, config.dtype, config.tf32, config.fp8)
    # float8 is for the blocks' matmuls alone
    attention_peak = peak_for(gpu, config.dtype, config.tf32, fp8=False).tflops
    if config.world_size > 1 and row.link_gb_s == 0:
        raise ConfigError(
            f"{gpu}: has no link to other devices ({row.scope}), so {config.world_size} cannot be predicted"
        )
    if network_gb_s is not None and not 0 < network_gb_s < math.inf:
        raise ConfigError(f"network_gb_s: found {network_gb_s}; must be a positive number of GB/s a card")
    return Rates(
        gpu=row.names[0],
        peak_tflops=peak.tflops,
        matmul_tflops=arithmetic_tflops(row, peak.tflops, beliefs, 4 if config.dtype == "float32" else 2),
        attention={name: share * attention_peak for name, share in beliefs.attention_fraction[generation(row)].items()},
        bandwidth_gb_s=beliefs.bandwidth_fraction * row.bandwidth_gb_s,
        operand_gb_s=beliefs.bandwidth_fraction * row.bandwidth_gb_s,
        link_gb_s=(beliefs.pcie_link_fraction if row.is_pcie else beliefs.link_fraction) * row.link_gb_s / 2,
        network_gb_s=network_gb_s or beliefs.network_gb_s,
        multiprocessors=row.multiprocessors,
        memory_gib=beliefs.memory_fraction * row.memory_gib,
        power_limit_w=row.power_limit_w,
        attention_half_length=beliefs.attention_half_length,
        attention_softmax_dims=beliefs.attention_softmax_dims,
        kernel_gap_us=beliefs.kernel_gap_us,
        launch_us=beliefs.launch_us,
        collective_latency_us=beliefs.collective_latency_us,
        contention=beliefs.contention,
        card_deviation=beliefs.card_deviation,
    )


def arithmetic_tflops(row: HardwareRow, peak_tflops: float, beliefs: Beliefs, element_bytes: int) -> float:
    """The rate that matmuls approach when their operands cost nothing, from the best published one (all in TFLOP/s).

    A square matmul takes FLOPs / (rate x share of whole tiles) + operands / bandwidth, as `step_model` counts it; what
    it was published to reach gives the rate. Other arithmetic than bf16 is taken to reach the same share of its peak.
    """
    fraction: float = beliefs.matmul_fraction
    if row.published_matmul_tflops is not None and row.dense_tflops.bf16:
        fraction = row.published_matmul_tflops / row.dense_tflops.bf16
    size = beliefs.matmul_size
    flops = 2.0 * size**3
    seconds = flops / (fraction * peak_tflops * 1e12)
    operands = element_bytes * 3 * size**2 / (beliefs.bandwidth_fraction * row.bandwidth_gb_s * 1e9)
    share = tile_share(size, size, size, row.multiprocessors)
    return flops / (seconds - operands) / share / 1e12


# --- measured ceilings -----------------------------------------------------------------------------------------------


def card_rates(
    gpu: str, config: RunConfig, ceilings: Sequence[Ceilings] = (), network_gb_s: float | None = None
) -> Rates:
    """Rates of a card: the datasheet's fractions, replaced by what was measured on a card of this kind.

    Where none of this kind was measured, but one with the same chip (`same_chip`), the fractions are that one's; of
    several, the one's whose memory is nearest in bandwidth.
    """
    rates, row = datasheet_rates(gpu, config, network_gb_s), find_gpu(gpu)
    measured = [(one, find_gpu(one.device_name)) for one in ceilings if one.device == "cuda"]
    here = [one for one, other in measured if other.key == row.key]
    for one in here:
        rates = measured_rates(rates, one, config)
    if here:
        return rates
    alike = [(one, other) for one, other in measured if same_chip(row, other)]
    if not alike:
        return rates
    nearest = min((other for _, other in alike), key=lambda other: abs(other.bandwidth_gb_s - row.bandwidth_gb_s))
    return related_rates(rates, [one for one, other in alike if other.key == nearest.key], config)


def same_chip(row: HardwareRow, other: HardwareRow) -> bool:
    """Whether two cards compute alike, beside whatever memory: H100 and H200 SXM. Power bounds long matmuls."""
    return (row.multiprocessors, row.dense_tflops, row.power_limit_w) == (
        other.multiprocessors,
        other.dense_tflops,
        other.power_limit_w,
    )


def related_rates(rates: Rates, ceilings: Sequence[Ceilings], config: RunConfig) -> Rates:
    """`rates` times what the ceilings of one related kind of card are over the rates of its datasheet; links aside."""
    alone = config.model_copy(update={"world_size": 1, "nnodes": 1})
    expected = found = datasheet_rates(ceilings[0].device_name, alone)
    for one in ceilings:
        found = measured_rates(found, one, alone)
    return replace(
        rates,
        matmul_tflops=rates.matmul_tflops * found.matmul_tflops / expected.matmul_tflops,
        operand_gb_s=rates.operand_gb_s * found.operand_gb_s / expected.operand_gb_s,
        bandwidth_gb_s=rates.bandwidth_gb_s * found.bandwidth_gb_s / expected.bandwidth_gb_s,
        attention={
            name: tflops * found.attention[name] / expected.attention[name] for name, tflops in rates.attention.items()
        },
        related=found.gpu if found.measured else rates.related,
    )


def measured_rates(rates: Rates, ceilings: Ceilings, config: RunConfig) -> Rates:
    """`rates` with everything that `ceilings` hold for this run's arithmetic."""
    peak = peak_for(rates.gpu, config.dtype, config.tf32, config.fp8)
    matmuls = [rate for rate in ceilings.matmuls if rate.arithmetic == peak.dtype]
    changes: dict[str, object] = {}
    if len({(rate.m, rate.k, rate.n) for rate in matmuls}) >= 3:
        element = {"fp8": 1, "bf16": 2, "fp16": 2}.get(peak.dtype, 4)
        changes["matmul_tflops"], changes["operand_gb_s"] = fit_matmuls(matmuls, element, rates)
    if ceilings.copy_rate is not None:
        changes["bandwidth_gb_s"] = ceilings.copy_rate.gb_s
    attention: dict[str, float] = {}
    for backend in {rate.backend for rate in ceilings.attention}:
        tflops = reference_attention(ceilings.attention, backend, config.dtype, rates)
        if tflops is not None:
            attention[backend] = tflops
    if attention:
        changes["attention"] = {**rates.attention, **attention}
    local = config.world_size // config.nnodes
    collectives = [rate for rate in ceilings.collectives if rate.backend == "nccl" and rate.operation != "exchange"]
    same = [rate for rate in collectives if rate.world_size == local] or collectives
    if same and local > 1:
        changes["link_gb_s"] = max(same, key=lambda rate: rate.bytes).bus_gb_s
    return replace(rates, **changes, measured=tuple(sorted({*rates.measured, *changes})))  # type: ignore[arg-type]


def fit_matmuls(matmuls: Sequence[MatmulRate], element_bytes: int, rates: Rates) -> tuple[float, float]:
    """One rate (TFLOP/s) and one operand bandwidth (GB/s) for all measured shapes, by least squares of relative time.

    seconds = FLOPs / (rate x share of whole tiles) + bytes of the operands / bandwidth, as `step_model` adds them up.
    Where the shapes do not tell the two apart (a negative answer), the bandwidth stays and the rate alone is fitted.
    """
    seconds = np.array([one.flops / (one.tflops * 1e12) for one in matmuls])
    arithmetic = np.array(
        [one.flops / tile_share(one.m, one.k, one.n, rates.multiprocessors) / 1e12 for one in matmuls]
    )
    moved = np.array([element_bytes * (one.m * one.k + one.k * one.n + one.m * one.n) / 1e9 for one in matmuls])
    design = np.stack([arithmetic / seconds, moved / seconds], axis=1)
    (per_tflop, per_gb), *_ = np.linalg.lstsq(design, np.ones(len(matmuls)), rcond=None)
    if per_tflop > 0 and per_gb > 0:
        return float(1 / per_tflop), float(1 / per_gb)
    left = 1 - moved / rates.operand_gb_s / seconds
    column = design[:, 0]
    return float(column @ column / (column @ left)), rates.operand_gb_s


def reference_attention(measured: Sequence[AttentionRate], backend: str, dtype: str, rates: Rates) -> float | None:
    """A backend's rate at 2,048 tokens and head size 128, from whatever shapes were measured; the mean of them."""
    found = [
        one.forward_backward_tflops * rates.attention_slowdown(one.seq_len, one.head_dim)
        for one in measured
        if one.backend == backend and one.dtype == dtype and one.forward_backward_tflops is not None
    ]
    return float(np.mean(found)) if found else None
