"""The machine and the software that ran, written down before the first step."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import torch

import mfubench
from mfubench.machine import KERNEL_PACKAGES, cpu_name, describe_cards, installed_version
from mfubench.run_log import Environment, Gpu
from mfubench.train.process import Process

# Packages whose version changes speed or results, beside torch
PACKAGES = ("nvidia-cudnn-frontend", "numpy", *(name for name in KERNEL_PACKAGES if name != "torch"))
# Environment variables that change speed...
PREFIXES = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "UCX_", "FI_"),
    *("TORCH", "PYTORCH_", "CUDA_", "CUBLAS", "TRITON_"),
    # ...or say which cards and nodes the job was given (`job.py`, SLURM)
    *("MFUBENCH_LEASE", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT"),
)


def capture_environment(process: Process) -> Environment:
    """Describe this run's machines and software. Collective: every rank must call it, all get the same cards."""
    on_cuda = process.on_cuda
    commit, dirty = git_state()
    return Environment(
        host=socket.gethostname(),
        device="cuda" if on_cuda else "cpu",
        gpus=process.gather(describe_gpu(process)) if on_cuda else [],
        cpu=cpu_name(),
        cpu_count=os.cpu_count() or 1,
        cpu_threads=torch.get_num_threads(),
        memory_gib=psutil.virtual_memory().total / 2**30,
        driver=describe_cards()[1] if on_cuda else None,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        cudnn=cudnn_version() if on_cuda else None,
        torch=torch.__version__,
        python=platform.python_version(),
        packages={"mfubench": mfubench.__version__}
        | {name: version for name in PACKAGES if (version := installed_version(name))},
        git_commit=commit,
        git_dirty=dirty,
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        variables={key: value for key, value in sorted(os.environ.items()) if key.startswith(PREFIXES)} | settings(),
        command=shlex.join(sys.orig_argv),
    )


def settings() -> dict[str, str]:
    """What is no environment variable and changes speed or rounding all the same."""
    matmul = torch.backends.cuda.matmul
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "cpu affinity of rank 0": f"{len(cores)} cores, {cores[0]}-{cores[-1]}" if cores else "unknown",
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.cuda.matmul.allow_bf16_reduced_precision_reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "torch.cuda.matmul.allow_fp16_reduced_precision_reduction": str(matmul.allow_fp16_reduced_precision_reduction),
    }


def describe_gpu(process: Process) -> Gpu:
    """This rank's card, by its UUID: the index that torch counts by depends on CUDA_VISIBLE_DEVICES."""
    properties = torch.cuda.get_device_properties(process.device)
    uuid = f"GPU-{properties.uuid}"
    index, name, power_limit = process.local_rank, properties.name, None
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        index, name = pynvml.nvmlDeviceGetIndex(handle), pynvml.nvmlDeviceGetName(handle)
        power_limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    except pynvml.NVMLError:
        pass  # a container without NVML, or a MIG slice without a power limit: torch's own description stands
    return Gpu(
        index=index,
        name=name,
        uuid=uuid,
        memory_gib=properties.total_memory / 2**30,
        power_limit_w=power_limit,
    )


def cudnn_version() -> str | None:
    """Readable form of cuDNN's number: 91900 -> 9.19.0."""
    number = torch.backends.cudnn.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else None


def git_state() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout this code runs from; (None, None) for an installed package."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None
