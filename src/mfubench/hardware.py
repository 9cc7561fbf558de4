"""What a GPU can do: the rows of config/hardware.yaml, found by the name that the driver reports. No torch.

A peak follows the arithmetic that really ran: bf16, fp16, TF32 or plain float32, fp8. A card without a row is an
error that says which row to add. A CPU has no row: its peak is a matmul rate measured on the same threads.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mfubench.config import ConfigError, Strict, parse
from mfubench.presets import CONFIG_DIR, read_table
from mfubench.run_log import Choice, RunLog

if TYPE_CHECKING:
    from mfubench.ceilings import Ceilings

ARITHMETIC = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

ROW_TEMPLATE = """\
  my-card:
    names: [{name}]
    dense_tflops: {{bf16: ..., fp16: ..., tf32: ..., fp32: ..., fp8: ...}}  # dense, never sparse; null: not in hardware
    clock_mhz: ...
    memory_gib: ...
    bandwidth_gb_s: ...
    power_limit_w: ...
    link: ...  # NVLink 4, Infinity Fabric, ...; without such links PCIe 4
    link_gb_s: ...
    source: ..."""


class NoPeak(ConfigError):
    """There is no peak for what ran; the rows are as they should be."""


Rate = Annotated[float, Field(gt=0)]


class DenseTflops(Strict):
    """Dense TFLOP/s of one card by arithmetic; None where the card has none in hardware."""

    bf16: Rate | None
    fp16: Rate | None
    tf32: Rate | None
    fp32: Rate
    fp8: Rate | None


class HardwareRow(Strict):
    """One card; the keys are explained at the head of config/hardware.yaml."""

    key: str
    names: tuple[str, ...] = Field(min_length=1, strict=False)
    dense_tflops: DenseTflops
    clock_mhz: Rate | None = None
    multiprocessors: int | None = Field(None, ge=1)
    flops_per_clock: int | None = Field(None, ge=1)
    memory_gib: Rate
    bandwidth_gb_s: Rate
    power_limit_w: Rate
    link: str
    link_gb_s: float = Field(ge=0)  # 0: a part of a card, which has none
    published_matmul_tflops: Rate | None = None
    mig_multiprocessors: dict[str, int] = {}
    scope: str = "one card"
    source: str
    note: str | None = None

    @property
    def is_pcie(self) -> bool:
        """Whether cards talk to each other over PCIe."""
        return self.link.lower().startswith("pcie")

    @property
    def joins_all(self) -> bool:
        """Whether links join all cards of a box: a bridge joins two or four, where it is fitted."""
        return not self.is_pcie and "bridge" not in self.link


@dataclass(frozen=True)
class Peak:
    """The number that achieved FLOP/s are divided by."""

    tflops: float  # of one device, dense
    dtype: str  # bf16 | fp16 | tf32 | fp32 | fp8
    source: str
    measured: bool  # a matmul rate of this very machine, not a datasheet's


@functools.cache
def read_hardware(path: Path) -> tuple[HardwareRow, ...]:
    rows = read_table(path, "must map card keys to rows")
    parsed = tuple(parse(HardwareRow, {"key": key, **row}, f"{path.name}: {key}") for key, row in rows.items())
    owners: dict[str, str] = {}
    for row in parsed:
        for name in {normalise(name) for name in row.names}:
            if name in owners:
                raise ConfigError(f"{path.name}: {owners[name]} and {row.key} both claim the name {name!r}")
            owners[name] = row.key
    return parsed


def load_hardware() -> list[HardwareRow]:
    """All rows of config/hardware.yaml. Raises ConfigError where the file or a row is not valid."""
    return list(read_hardware(CONFIG_DIR / "hardware.yaml"))


def normalise(driver_name: str) -> str:
    """A name without what drivers vary: case, the maker's prefix, punctuation, runs of blanks."""
    name = re.sub(r"\((r|tm|c)\)|[®™]", " ", driver_name.lower())
    name = " ".join(re.sub(r"[-_/]", " ", name).split())
    return re.sub(r"^(nvidia |amd |tesla )+", "", name)


def find_gpu(driver_name: str) -> HardwareRow:
    """The row of a card, by the exact name that its driver reports; a MIG slice gets the card's row scaled down.

    Raises NoPeak with the row to add and the nearest names. There is no fallback: a wrong peak is worse than none.
    """
    card_name, separator, slice_name = driver_name.partition(" MIG ")
    wanted = normalise(card_name)
    for row in load_hardware():
        if wanted in {normalise(name) for name in row.names}:
            return mig_slice(row, slice_name.strip(), driver_name) if separator else row
    known = {normalise(name): name for row in load_hardware() for name in row.names}
    words = set(wanted.split())
    near = [name for short, name in known.items() if words and words <= set(short.split())]
    near += [known[short] for short in difflib.get_close_matches(wanted, known, n=3) if known[short] not in near]
    hint = f" The nearest known names are {', '.join(repr(name) for name in near[:6])}." if near else ""
    raise NoPeak(
        f"no row for the card {driver_name!r} in {CONFIG_DIR / 'hardware.yaml'}.{hint}\n"
        "If it is one of them, add this name to its `names`; otherwise add a row from the maker's datasheet:\n"
        + ROW_TEMPLATE.format(name=card_name)
    )


def mig_slice(row: HardwareRow, slice_name: str, driver_name: str) -> HardwareRow:
    """The row of a MIG slice: peaks times its share of the multiprocessors, bandwidth by its memory.

    `slice_name` is what follows "MIG" in the device's name: "3g.40gb", "1g.10gb+me" (media engines, same arithmetic)
    or "1c.3g.40gb" (a compute instance of 1 of the 3 slices).
    """
    match = re.fullmatch(r"(?:(\d)c\.)?((\d)g\.(\d+)gb)(?:[+-].*)?", slice_name.lower())
    if not match or match[2] not in row.mig_multiprocessors or row.multiprocessors is None:
        profiles = ", ".join(row.mig_multiprocessors) or "none"
        raise NoPeak(
            f"{driver_name!r}: the row {row.key} in {CONFIG_DIR / 'hardware.yaml'} knows no MIG profile "
            f"{slice_name!r} (it knows: {profiles}). Add it to the row's mig_multiprocessors, with the number in the "
            "column SM of `nvidia-smi mig -lgip`, or measure on the whole card with MIG off."
        )
    multiprocessors = row.mig_multiprocessors[match[2]]
    if match[1]:  # a part of the slice's compute, all of its memory
        multiprocessors = multiprocessors * int(match[1]) // int(match[3])
    share = multiprocessors / row.multiprocessors
    memory_gib = float(match[4])
    rates = {dtype: rate and rate * share for dtype, rate in row.dense_tflops.model_dump().items()}
    return row.model_copy(
        update={
            "key": f"{row.key}-mig-{slice_name}",
            "names": (driver_name,),
            "dense_tflops": DenseTflops(**rates),
            "multiprocessors": multiprocessors,
            "memory_gib": memory_gib,
            "bandwidth_gb_s": row.bandwidth_gb_s * min(1.0, memory_gib / row.memory_gib),
            "link": "none",
            "link_gb_s": 0.0,
            "published_matmul_tflops": None,
            "mig_multiprocessors": {},
            "scope": f"a MIG slice with {multiprocessors} of {row.multiprocessors} multiprocessors",
            "note": f"the card's peak times {multiprocessors}/{row.multiprocessors}; the slices share the power limit",
        }
    )


def arithmetic_of(dtype: str, tf32: bool, fp8: bool) -> str:
    """What matmuls compute in, as the rows name it: bf16 | fp16 | tf32 | fp32 | fp8.

    An unknown dtype stands for itself: no rate has its name.
    """
    if fp8:
        return "fp8"
    arithmetic = ARITHMETIC.get(dtype, dtype)
    return "tf32" if arithmetic == "fp32" and tf32 else arithmetic


def arithmetic_of_run(log: RunLog) -> str:
    """What a run's matmuls computed in: by what was used, not what was asked for."""
    return arithmetic_of(log.used["dtype"].used, is_on(log.used["tf32"]), is_on(log.used["fp8"]))


def rank_share(log: RunLog, ceilings: Ceilings) -> float:
    """A rank's part of the measured arithmetic: of several on a CPU each has some of the threads measured with."""
    return log.environment.cpu_threads / ceilings.threads if ceilings.device == "cpu" else 1.0


def peak_for(name: str, dtype: str, tf32: bool, fp8: bool) -> Peak:
    """The datasheet peak of one card (driver name) for what it computed in.

    dtype: bfloat16 | float16 | float32; tf32 matters for float32 only. Raises NoPeak for an unknown card and for
    arithmetic that the card does not have.
    """
    row = find_gpu(name)
    rates = row.dense_tflops.model_dump()
    tf32 = tf32 and rates["tf32"] is not None  # the switch does nothing on a card without TF32
    arithmetic = arithmetic_of(dtype, tf32, fp8)
    if arithmetic not in rates:
        raise NoPeak(f"no peak for dtype {dtype!r}: use one of {', '.join(ARITHMETIC)}")
    tflops = rates[arithmetic]
    if tflops is None:
        has = ", ".join(key for key, rate in rates.items() if rate is not None)
        raise NoPeak(
            f"{name} ({row.key}) has no {arithmetic} matmul units, only {has}: software emulates it at an unstated "
            "rate, so there is no peak to divide by. Train in another dtype."
        )
    return Peak(tflops=tflops, dtype=arithmetic, source=f"{row.key}: {row.source}", measured=False)


def used_of(log: RunLog, setting: str) -> str | None:
    """What a run used of a setting; None of a run that does not say."""
    return log.used[setting].used if setting in log.used else None


def is_on(choice: Choice) -> bool:
    """Whether a switch was used; switches are recorded as "true" and "false"."""
    return choice.used.lower() in ("true", "on")


def peak_for_run(log: RunLog, ceilings: Ceilings | None) -> Peak:
    """The peak per device of a run, following what really ran (`used`, not what was asked for).

    On several kinds of card the mean, since MFU is the whole run's FLOP/s over the sum of its cards' peaks. On a CPU
    the matmul rate that `ceilings` measured. Raises NoPeak where there is none.
    """
    dtype, tf32, fp8 = log.used["dtype"].used, is_on(log.used["tf32"]), is_on(log.used["fp8"])
    if log.environment.device == "cpu":
        return measured_cpu_peak(dtype, log.environment.cpu_threads, ceilings, log.name)
    if not log.environment.gpus:
        raise NoPeak(f"{log.name}: ran on cuda but its log names no card (environment.gpus)")
    peaks = [peak_for(gpu.name, dtype, tf32, fp8) for gpu in log.environment.gpus]
    if len({peak.source for peak in peaks}) == 1:
        return peaks[0]
    kinds = {peak.dtype for peak in peaks}
    return Peak(
        tflops=sum(peak.tflops for peak in peaks) / len(peaks),
        dtype=peaks[0].dtype if len(kinds) == 1 else "mixed",
        source="mean over unlike cards: " + "; ".join(sorted({peak.source for peak in peaks})),
        measured=False,
    )


def measured_cpu_peak(dtype: str, threads: int, ceilings: Ceilings | None, name: str) -> Peak:
    """A CPU's peak for one rank: its fastest measured matmul, of whatever shape (a large one leaves the cache)."""
    arithmetic = arithmetic_of(dtype, tf32=False, fp8=False)
    if ceilings is None:
        raise NoPeak(
            f"{name}: ran on a CPU, which has no datasheet row; its peak is measured. "
            "Measure the machine's ceilings first and pass them."
        )
    rate = ceilings.fastest_matmul_tflops(arithmetic)
    if rate is None or ceilings.device != "cpu":
        raise NoPeak(
            f"{name}: the ceilings hold no {arithmetic} matmul of a CPU (measured: {ceilings.measured_dtypes()} "
            f"on {ceilings.device}); measure them again for this dtype"
        )
    source = f"fastest matmul measured on {ceilings.host}, {ceilings.threads} threads"
    if threads != ceilings.threads:
        rate *= threads / ceilings.threads
        source += f", scaled to the {threads} of a rank"
    return Peak(tflops=rate, dtype=arithmetic, source=source, measured=True)
