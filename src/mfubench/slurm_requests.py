"""What jobs ask a SLURM cluster for, by the study's machine section: resources as the executor plugin names them."""

from __future__ import annotations

from typing import Any

from mfubench.machine_config import MachineConfig


def whole_nodes(machine: MachineConfig, gpus: int, nodes: int) -> int:
    """GPUs to ask for: on a cluster all of each node, since a job that measures has its nodes to itself."""
    if machine.slurm is None:
        return gpus
    assert isinstance(machine.gpus, int)  # MachineConfig has seen to it
    return nodes * machine.gpus


def slurm_node(machine: MachineConfig, stage: str) -> dict[str, Any]:
    """What a job asks for that has its nodes to itself; nothing where there is no cluster."""
    asked = machine.slurm
    if asked is None:
        return {}
    assert isinstance(machine.gpus, int)
    signal = f"--signal=TERM@{asked.stop_before_end_s}" if asked.stop_before_end_s else ""
    return slurm_job(machine, asked.partition_gpu, stage) | {
        "mem_mb": asked.mem_mb_per_gpu * machine.gpus,
        "cpus_per_task": asked.cpus_per_gpu * machine.gpus if asked.cpus_per_gpu else -1,
        "slurm_extra": f"--exclusive {signal} {asked.extra}".strip(),
    }


def slurm_cpu(machine: MachineConfig, kind: str) -> dict[str, Any]:
    """What a job on a CPU node asks for (`kind`: preparation or analysis); nothing where there is no cluster."""
    asked = machine.slurm
    if asked is None:
        return {}
    return slurm_job(machine, asked.partition_cpu, kind) | {
        "mem_mb": asked.mem_mb,
        "cpus_per_task": asked.cpus if kind == "preparation" else 1,
        "nodes": 1,
    }


def slurm_job(machine: MachineConfig, partition: str, kind: str) -> dict[str, Any]:
    asked = machine.slurm
    assert asked is not None
    account = {"slurm_account": asked.account} if asked.account else {}
    return {"slurm_partition": partition, "runtime": asked.runtime_min[kind]} | account
