"""ceilings.json: what the machine at hand can do, measured hot. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mfubench.run_log import read_artifact
from mfubench.telemetry_record import Telemetry

Product = Literal["forward", "input_gradient", "weight_gradient"]
Arithmetic = Literal["bf16", "fp16", "tf32", "fp32"]
Operation = Literal["all_reduce", "reduce_scatter", "exchange"]
ElementType = Literal["bf16", "fp16", "fp32"]


Rate = Annotated[float, Field(gt=0)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class MatmulRate(Record):
    """One product [m, k] @ [k, n], repeated for seconds after a preheat; inputs are random normal numbers."""

    model: str | None  # None: the large square matmul
    name: str  # qkv, attention_output, mlp_up, mlp_down, lm_head, or large
    product: Product
    arithmetic: Arithmetic
    m: int
    k: int
    n: int
    calls_per_step: int  # of this product in one micro-step of the model; 1 for the large one
    tflops: Rate  # sustained: all FLOPs over all time; on a CPU the faster quarter of the timed chunks
    tflops_quartiles: tuple[float, float, float]  # over the timed chunks
    seconds: float

    @property
    def flops(self) -> float:
        """FLOPs of one call."""
        return 2.0 * self.m * self.k * self.n


class AttentionRate(Record):
    """Causal attention of one model by one backend; FLOPs are the causal half, backward 2.5 times forward."""

    model: str
    backend: str
    dtype: str
    batch_size: int
    seq_len: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    forward_tflops: float | None = None
    forward_backward_tflops: float | None = None
    reason: str | None = None  # why there is no rate


class CopyRate(Record):
    """Copy within the device's memory: bytes read plus bytes written over time."""

    bytes: int
    gb_s: float


class CardRate(Record):
    """The large matmul on one of several cards: cards of one kind differ by some percent."""

    index: int
    name: str
    uuid: str | None
    arithmetic: Arithmetic
    tflops: float


class CollectiveRate(Record):
    """Bus bandwidth as nccl-tests defines it: comparable with the link, whatever the number of ranks.

    An exchange moves as many bytes as an all-reduce, by copy engines.
    """

    operation: Operation
    backend: Literal["nccl", "gloo"]
    world_size: int
    dtype: ElementType  # of the numbers that are summed
    bytes: int  # of the whole buffer of one rank
    time_s: float  # of one call, median, the slowest rank's
    bus_gb_s: float


class Ceilings(Record):
    """The measured limits of one machine, with what they were measured under."""

    schema_version: Literal[1] = 1
    measured_at: str  # ISO 8601, UTC
    total_s: float
    host: str
    device: Literal["cuda", "cpu"]
    device_name: str  # as the driver reports it; of a CPU its model name
    device_uuid: str | None = None
    threads: int = Field(ge=1)  # torch intra-op threads; what a CPU's rates belong to
    environment: dict[str, str | None]  # torch, cuda, cudnn, driver, python
    variables: dict[str, str] = {}  # environment variables that change speed
    seconds: float  # of hot time per kernel, as asked
    matmuls: list[MatmulRate]
    attention: list[AttentionRate] = []
    copy_rate: CopyRate | None = None
    cards: list[CardRate] = []  # where the machine has several
    collectives: list[CollectiveRate] = []
    collectives_skipped: dict[str, str] = {}  # "exchange over 2" and the like -> why it could not be measured
    topology: str | None = None  # `nvidia-smi topo -m`
    telemetry: Telemetry | None = None  # clocks, power, temperature and throttling while measuring

    def measured_dtypes(self) -> list[str]:
        """Arithmetics with a large matmul: bf16, fp16, tf32, fp32."""
        return sorted({rate.arithmetic for rate in self.matmuls if rate.model is None})

    def large_matmul_tflops(self, arithmetic: str) -> float | None:
        """Sustained rate of the large square matmul: the denominator of MAMFU."""
        rates = [rate.tflops for rate in self.matmuls if rate.model is None and rate.arithmetic == arithmetic]
        return max(rates, default=None)

    def fastest_matmul_tflops(self, arithmetic: str) -> float | None:
        """The best sustained rate of any shape and product: a CPU's peak, and what no training can beat."""
        return max((rate.tflops for rate in self.matmuls if rate.arithmetic == arithmetic), default=None)

    def model_matmul_tflops(self, model: str, arithmetic: str) -> float | None:
        """All matmuls of a model's micro-step, forward and backward: FLOPs of all over time of all."""
        rates = [rate for rate in self.matmuls if rate.model == model and rate.arithmetic == arithmetic]
        if not rates:
            return None
        flops = sum(rate.flops * rate.calls_per_step for rate in rates)
        seconds = sum(rate.flops * rate.calls_per_step / rate.tflops for rate in rates)
        return flops / seconds


def read_ceilings(path: Path | str) -> Ceilings:
    """Read and validate ceilings.json. Raises ConfigError naming the file and what is wrong with it."""
    return read_artifact(Ceilings, path, "holds no ceilings of this version")
