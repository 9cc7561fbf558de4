"""The `machine` section of a study: which cards, how many nodes, what a SLURM cluster is asked for. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from mfubench.config import Strict

# What goes into the command line of sbatch: names, and options without anything that a shell would act on.
SLURM_NAME = r"^[\w.,-]+$"
SLURM_OPTIONS = r"^[\w=,:.@/%+ -]*$"
# Variables that choose and tune a network. Values hold no path: some name libraries that would be loaded.
NETWORK_VARIABLE = re.compile(r"(NCCL|TORCH_NCCL|GLOO|UCX|FI)_[A-Z0-9_]+")
NETWORK_VALUE = re.compile(r"[\w.,:^=+ -]*")
# Minutes that a job may take, by stage; `preparation` and `analysis` are the jobs on CPU nodes
RUNTIMES = {
    "smoke": 20,
    "baseline": 60,
    "scaling": 60,
    "tiers": 60,
    "ablations": 60,
    "memory": 120,
    "training": 1440,
    "preparation": 720,
    "analysis": 60,
}


class SlurmConfig(Strict):
    """What the jobs of a study ask a SLURM cluster for. A measured job takes whole nodes, exclusively."""

    partition_gpu: str = Field(pattern=SLURM_NAME, description="where measured jobs run")
    partition_cpu: str = Field(pattern=SLURM_NAME, description="where preparation and analysis run")
    account: str | None = Field(None, pattern=SLURM_NAME)
    cpus_per_gpu: int | None = Field(None, ge=1, description="null: all that the node has")
    mem_mb_per_gpu: int = Field(32_000, ge=1, description="memory to ask for, in MB a GPU of the node")
    cpus: int = Field(8, ge=1, description="CPUs of a preparation job")
    mem_mb: int = Field(16_000, ge=1, description="memory of a preparation or analysis job")
    runtime_min: dict[str, int] = Field(
        RUNTIMES, description=f"minutes a job may take, by {', '.join(RUNTIMES)}; what is not named keeps its default"
    )
    stop_before_end_s: int = Field(
        300, ge=0, description="SIGTERM so long before the time limit: time to write a checkpoint; 0: none"
    )
    training_restarts: int = Field(
        0, ge=0, description="times that a training which met its time limit goes on by itself, from its checkpoint"
    )
    extra: str = Field("", pattern=SLURM_OPTIONS, description="further sbatch options of measured jobs")

    @field_validator("runtime_min")
    @classmethod
    def check_runtimes(cls, given: dict[str, int]) -> dict[str, int]:
        unknown = [name for name in given if name not in RUNTIMES]
        if unknown or any(minutes < 1 for minutes in given.values()):
            raise ValueError(f"found {given}; allowed are minutes, 1 or more, by {', '.join(RUNTIMES)}")
        return RUNTIMES | given


class MachineConfig(Strict):
    """The machine that measures."""

    gpus: int | Literal["auto"] = Field("auto", description="GPUs of one node; auto: as found where Snakemake runs")
    devices: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, strict=False, min_length=1, description="indices of the cards that may be used"
    )
    max_nodes: int = Field(1, ge=1, description="nodes that one run may span")
    when_too_small: Literal["stop", "skip"] = Field(
        "stop", description="runs that need more GPUs than there are: refuse to start, or leave them out and say so"
    )
    when_busy: Literal["wait", "move", "stop"] = Field(
        "stop", description="a card is in use by a process that is not ours: wait, take free cards, or stop"
    )
    wait_s: float = Field(3600.0, ge=0, description="how long to wait for free cards")
    generation: int = Field(1, ge=1, description="raise it after a change of machine to mark every run stale")
    network: dict[str, str] = Field(
        {}, description="environment variables of the network, such as NCCL_SOCKET_IFNAME: ib0; recorded, not compared"
    )
    slurm: SlurmConfig | None = Field(None, description="what jobs ask a SLURM cluster for (profiles/slurm)")

    @field_validator("gpus")
    @classmethod
    def check_count(cls, gpus: int | Literal["auto"]) -> int | Literal["auto"]:
        if gpus != "auto" and gpus < 1:
            raise ValueError(f"found {gpus}; give 1 or more, or auto, which is what a machine without GPUs takes, too")
        return gpus

    @field_validator("network")
    @classmethod
    def check_network(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if not NETWORK_VARIABLE.fullmatch(name) or not NETWORK_VALUE.fullmatch(value):
                raise ValueError(
                    f"found {name}: {value!r}; allowed are NCCL_*, TORCH_NCCL_*, GLOO_*, UCX_* and FI_* with values "
                    "that hold no path; set anything else in your shell, from where it reaches the jobs too"
                )
        return variables

    @field_validator("devices")
    @classmethod
    def check_devices(cls, devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if devices is not None and len(set(devices)) < len(devices):
            raise ValueError(f"found {list(devices)}; a card is named twice")
        return devices

    @model_validator(mode="after")
    def check_gpus(self) -> MachineConfig:
        if self.slurm is not None and self.gpus == "auto":
            raise ValueError("slurm needs `gpus`: state the GPUs of one node, since a login node has none to count")
        return self
