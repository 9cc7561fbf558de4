"""Measure the ceilings of this machine: `measure`, and `main` for a script."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from mfubench.ceilings.collectives import measure_collectives
from mfubench.ceilings.kernels import (
    attention_backends_for,
    large_linear,
    measure_attention,
    measure_copy,
    measure_matmuls,
    model_linears,
)
from mfubench.ceilings.schema import Arithmetic, AttentionRate, CardRate, Ceilings, MatmulRate
from mfubench.config import ConfigError, ModelConfig, Strict, parse
from mfubench.machine import cpu_name, describe_cards
from mfubench.run_log import write_json
from mfubench.telemetry import Sampler

PREHEAT_S = 8.0  # of large matmuls on a GPU before anything counts: clocks and temperature settle
CPU_BUDGET_S = 1.5  # for all kernels together on a CPU, besides starting processes for the collectives
CPU_COLLECTIVE_S = 0.05
LARGE_SHARES = 4  # the large matmul is the denominator of others' ratios: measured so many times longer
VARIABLE_PREFIXES = ("OMP_", "MKL_", "NCCL_", "TORCH", "PYTORCH_", "CUDA_", "CUBLAS", "NVIDIA_TF32")


def measure(
    *,
    models: list[ModelConfig],
    seq_len: int,
    micro_batch_size: int,
    dtypes: list[str],
    device: str,
    seconds: float,
    world_sizes: list[int],
) -> Ceilings:
    """Measure matmuls, attention, copy and collectives, with clocks and power sampled from another process.

    dtypes: float32 | bfloat16 | float16; float32 is measured with TF32 on and off where CUDA has it. seconds: of hot
    time per kernel on a GPU; a CPU takes a few seconds in all, with torch's own number of threads, as in training.
    world_sizes: processes on this node whose collectives are measured.
    """
    chosen = choose_device(device)
    t0, started_s = time.perf_counter(), time.time()
    arithmetics = arithmetics_of(dtypes, chosen)
    if chosen.type == "cuda":
        preheat(chosen, arithmetics[0])
    else:
        seconds = min(seconds, CPU_BUDGET_S / count_kernels(models, arithmetics, chosen))
    with tempfile.TemporaryDirectory() as folder, Sampler(folder, visible_cards(chosen)) as sampler:
        matmuls = measure_all_matmuls(models, seq_len * micro_batch_size, arithmetics, chosen, seconds)
        copy_rate = measure_copy(chosen, seconds)
        attention = measure_all_attention(models, micro_batch_size, seq_len, dtypes, chosen, seconds)
        cards = measure_cards(arithmetics[0], seconds) if chosen.type == "cuda" else []
        telemetry = sampler.summarize([(started_s, time.time())])
    release_memory(chosen)
    announce("collectives")
    collectives, skipped = measure_collectives(
        world_sizes, device_type(chosen), seconds if chosen.type == "cuda" else CPU_COLLECTIVE_S
    )
    return Ceilings(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        total_s=time.perf_counter() - t0,
        host=platform.node(),
        device=device_type(chosen),
        device_name=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else cpu_name(),
        device_uuid=device_uuid(chosen),
        threads=torch.get_num_threads(),
        environment=describe_environment(),
        variables={key: value for key, value in sorted(os.environ.items()) if key.startswith(VARIABLE_PREFIXES)},
        seconds=seconds,
        matmuls=matmuls,
        attention=attention,
        copy_rate=copy_rate,
        cards=cards,
        collectives=collectives,
        collectives_skipped=skipped,
        topology=describe_topology(),
        telemetry=telemetry,
    )


def announce(what: str) -> None:
    """For who waits: a measurement takes a minute or two."""
    print(f"measuring {what}", file=sys.stderr, flush=True)


def choose_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("ceilings: device cuda was asked for, but torch sees no CUDA device here; use auto or cpu")
    return torch.device(device, 0) if device == "cuda" else torch.device("cpu")


def device_type(device: torch.device) -> Literal["cuda", "cpu"]:
    return "cuda" if device.type == "cuda" else "cpu"


def device_uuid(device: torch.device) -> str | None:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def visible_cards(device: torch.device) -> list[int]:
    return list(range(torch.cuda.device_count())) if device.type == "cuda" else []


def arithmetics_of(dtypes: list[str], device: torch.device) -> list[Arithmetic]:
    """What the matmuls of these dtypes compute in on this device."""
    by_dtype: dict[str, tuple[Arithmetic, ...]] = {
        "bfloat16": ("bf16",),
        "float16": ("fp16",),
        "float32": ("tf32", "fp32") if device.type == "cuda" else ("fp32",),
    }
    unknown = [dtype for dtype in dtypes if dtype not in by_dtype]
    if not dtypes:
        raise ConfigError("ceilings: there is no run to measure for; declare one under `experiments`")
    if unknown:
        raise ConfigError(f"ceilings: dtypes {dtypes} must be some of {', '.join(by_dtype)}")
    return list(dict.fromkeys(arithmetic for dtype in dtypes for arithmetic in by_dtype[dtype]))


def count_kernels(models: list[ModelConfig], arithmetics: list[Arithmetic], device: torch.device) -> int:
    """Timed kernels in all: 3 products of 5 weights a model, the large one (which takes 4 shares), attention, copy."""
    matmuls = len(arithmetics) * (15 * len(models) + LARGE_SHARES)
    return matmuls + 2 * len(models) * len(attention_backends_for(device)) + 1


def preheat(device: torch.device, arithmetic: Arithmetic) -> None:
    measure_matmuls(large_linear(device), arithmetic, device, PREHEAT_S, products=("forward",))


def measure_all_matmuls(
    models: list[ModelConfig], rows: int, arithmetics: list[Arithmetic], device: torch.device, seconds: float
) -> list[MatmulRate]:
    rates = []
    for arithmetic in arithmetics:
        announce(f"a large matmul in {arithmetic}")
        rates += measure_matmuls(large_linear(device), arithmetic, device, seconds * LARGE_SHARES, ("forward",))
        for model in models:
            announce(f"the matmuls of {model.name} in {arithmetic}")
            for linear in model_linears(model, rows):
                rates += measure_matmuls(linear, arithmetic, device, seconds)
                release_memory(device)
    return rates


def measure_all_attention(
    models: list[ModelConfig],
    batch_size: int,
    seq_len: int,
    dtypes: list[str],
    device: torch.device,
    seconds: float,
) -> list[AttentionRate]:
    """Every backend, in the first dtype that is not float32 (which most backends lack) where there is one."""
    name = next((dtype for dtype in dtypes if dtype != "float32"), dtypes[0])
    rates = []
    for model in models:
        announce(f"attention of {model.name}")
        for backend in attention_backends_for(device):
            rates.append(measure_attention(model, backend, batch_size, seq_len, getattr(torch, name), device, seconds))
            release_memory(device)
    return rates


def measure_cards(arithmetic: Arithmetic, seconds: float) -> list[CardRate]:
    """The large matmul on each visible card, where there are several."""
    if torch.cuda.device_count() < 2:
        return []
    rates = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        with torch.cuda.device(device):
            (rate,) = measure_matmuls(large_linear(device), arithmetic, device, 2 * seconds, ("forward",))
            name, uuid = torch.cuda.get_device_name(device), device_uuid(device)
        rates.append(CardRate(index=index, name=name, uuid=uuid, arithmetic=arithmetic, tflops=rate.tflops))
    return rates


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_environment() -> dict[str, str | None]:
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": describe_cards()[1],
    }


def describe_topology() -> str | None:
    """How the cards are linked: the table of `nvidia-smi topo -m`; None where there is no such tool."""
    if shutil.which("nvidia-smi") is None:
        return None
    found = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    return found.stdout.strip() or None


class Request(Strict):
    """What a workflow asks for, as one JSON string."""

    models: list[ModelConfig]
    seq_len: int
    micro_batch_size: int
    dtypes: list[str]
    seconds: float
    world_sizes: list[int]
    device: str = "auto"


def describe(ceilings: Ceilings) -> str:
    """A few lines for the person who waits."""
    lines = [f"{ceilings.device_name}, {ceilings.total_s:.0f} s"]
    for arithmetic in ceilings.measured_dtypes():
        lines.append(f"  {arithmetic}: large matmul {ceilings.large_matmul_tflops(arithmetic):.4g} TFLOP/s")
        for model in dict.fromkeys(rate.model for rate in ceilings.matmuls if rate.model):
            lines.append(f"    matmuls of {model}: {ceilings.model_matmul_tflops(model, arithmetic):.4g} TFLOP/s")
    for rate in ceilings.attention:
        speed = (
            f"forward {rate.forward_tflops:.4g}, with backward {rate.forward_backward_tflops:.4g} TFLOP/s"
            if rate.forward_tflops and rate.forward_backward_tflops
            else f"not measured: {rate.reason}"
        )
        lines.append(f"  attention {rate.backend} of {rate.model}: {speed}")
    if ceilings.copy_rate:
        lines.append(f"  copy: {ceilings.copy_rate.gb_s:.4g} GB/s")
    for collective in ceilings.collectives:
        size = f"{collective.bytes / 2**20:g} MiB of {collective.dtype}"
        lines.append(
            f"  {collective.operation} over {collective.world_size}, {size}: {collective.bus_gb_s:.4g} GB/s bus"
        )
    lines += [f"  {what}: not measured: {why}" for what, why in ceilings.collectives_skipped.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """`measure_ceilings.py --request JSON --output FILE`."""
    parser = argparse.ArgumentParser(description="Measure what this machine can do, hot.")
    parser.add_argument("--request", required=True, help="models, seq_len, micro_batch_size, dtypes, seconds … as JSON")
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args(argv)
    try:
        values: Any = json.loads(arguments.request)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--request: is no JSON ({error})") from None
    request: Request = parse(Request, values, "--request")
    ceilings = measure(**{name: getattr(request, name) for name in Request.model_fields})
    write_json(arguments.output, ceilings.model_dump(mode="json"))
    print(describe(ceilings))
    return 0
