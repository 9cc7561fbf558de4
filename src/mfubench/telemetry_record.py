"""What a run JSON and ceilings.json hold of the samples that were taken meanwhile: the summary's form. No torch.

Dictionaries, so that a summary is read back as it was written: a key that is missing was not sampled.
"""

from __future__ import annotations

from typing import Annotated, Required

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict  # pydantic brings it, and asks for it below Python 3.12

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Size = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Spread(TypedDict, total=False):
    """Of one quantity while steps ran."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    median: Required[float]
    q1: float
    q3: float
    max: float


class Amount(TypedDict, total=False):
    """The same of a quantity that is never below zero."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    median: Required[Size]
    q1: Size
    q3: Size
    max: Size


class CardTelemetry(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    card: int | str  # NVML's index or UUID
    name: str | None
    uuid: str | None
    power_limit_w: Size | None
    max_sm_clock_mhz: Size | None
    power_w: Amount | None
    sm_clock_mhz: Amount | None
    memory_clock_mhz: Amount | None
    temperature_c: Spread | None
    utilization_percent: Amount | None


class HostTelemetry(TypedDict, total=False):
    """The node of rank 0. Rates in MB/s, 1e6 bytes: of counters, which fall where a network interface goes."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    cpu_percent: Amount | None  # of all cores
    run_cores: Amount | None  # that the run's processes used
    busiest_process_cores: Amount | None
    disk_read_mb_s: Spread | None
    disk_write_mb_s: Spread | None
    network_sent_mb_s: Spread | None
    network_received_mb_s: Spread | None


class Throttling(TypedDict, total=False):
    """Of one reason."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    steps: Required[Count]
    share: Required[Size]  # of the steps that were sampled
    positions: list[Count]  # of the first of them


class Telemetry(TypedDict, total=False):
    """As `telemetry.summary.summarize_samples` makes it."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    interval_s: float | None
    samples: Count
    problem: str
    sampler_cpu_share: float | None
    nvml_problem: str | None
    gpus: list[CardTelemetry]
    throttled: dict[str, Throttling]
    steps_sampled: Count
    steps: Count
    host: HostTelemetry
    host_limited: bool | None
    host_limited_reason: str
