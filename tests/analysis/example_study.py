"""Studies made of factory run logs, as a pipeline would leave them: one of an 8-GPU machine, one of a laptop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from analysis.example_trace import write_example_trace
from factories import ATTENTION_KERNELS, MATMUL_KERNELS, make_model, make_run_config, make_run_log, make_wall

from mfubench.ceilings.schema import AttentionRate, Ceilings, CollectiveRate, CopyRate, MatmulRate
from mfubench.run_log import Choice, Evaluation, Kernels, RankMemory, RunLog, Step, write_json, write_run_log

# case -> (world size, median tokens/s/GPU, reserved GiB, fields of RunConfig)
GPU_CASES: dict[str, tuple[int, float, float, dict[str, Any]]] = {
    "smoke/llama2-1.36b": (1, 38_000, 30.1, {"compile": "none", "max_iters": 10}),
    "baseline/1.1-plain": (2, 55_100, 61.0, {"compile": "none"}),
    "baseline/1.2-compile": (2, 69_300, 52.0, {}),
    "baseline/1.3-dataloader": (2, 69_350, 52.0, {"loader": {"kind": "dataloader"}}),
    "scaling/2.1-plain-gpus2": (2, 55_000, 61.0, {"compile": "none"}),
    "scaling/2.1-plain-gpus4": (4, 54_300, 61.0, {"compile": "none"}),
    "scaling/2.1-plain-gpus8": (8, 53_000, 61.0, {"compile": "none"}),
    "scaling/2.2-compile-gpus2": (2, 69_200, 52.0, {}),
    "scaling/2.2-compile-gpus4": (4, 68_400, 52.0, {}),
    "scaling/2.2-compile-gpus8": (8, 66_500, 52.0, {}),
    "tiers/tier1": (8, 66_480, 52.0, {}),
    "tiers/tier1-repeat1": (8, 66_660, 52.0, {"repeat": 1}),
    "tiers/tier1-repeat2": (8, 66_540, 52.0, {"repeat": 2}),
    "tiers/tier2": (8, 66_600, 52.0, {"loader": {"kind": "dataloader"}}),
    "tiers/tier2-repeat1": (8, 66_500, 52.0, {"loader": {"kind": "dataloader"}, "repeat": 1}),
    "tiers/tier2-repeat2": (8, 66_610, 52.0, {"loader": {"kind": "dataloader"}, "repeat": 2}),
    "tiers/tier3": (8, 68_900, 55.5, {"loader": {"kind": "dataloader"}, "cuda_graphs": True}),
    "ablations/4.1-sdpa": (8, 57_900, 52.4, {"attention": "sdpa"}),
    "ablations/4.2-float32": (8, 24_800, 74.1, {"dtype": "float32", "attention": "cudnn"}),
    "ablations/4.2-bfloat16-control": (8, 57_850, 52.4, {"attention": "sdpa"}),
    "ablations/4.3-accumulation1": (8, 59_900, 52.0, {"gradient_accumulation_steps": 1}),
    "ablations/4.3-accumulation16": (8, 67_700, 52.0, {"gradient_accumulation_steps": 16}),
    "ablations/4.4-micro-batch8": (8, 63_900, 40.4, {"micro_batch_size": 8}),
    "memory/5.2-micro-batch16": (8, 65_900, 46.6, {"micro_batch_size": 16, "compile_mode": "default"}),
    "memory/5.2-micro-batch24": (8, 66_500, 52.0, {}),
    "training/pretrain": (8, 66_300, 52.0, {"max_iters": 600, "gradient_accumulation_steps": 2}),
}
EFFECTS = [
    {"name": "torch.compile", "arm": "baseline/1.2-compile", "control": "baseline/1.1-plain", "expected": "+20 %"},
    {"name": "DataLoader", "arm": "tiers/tier2", "control": "tiers/tier1", "expected": "+3 to 5 %"},
    {"name": "CUDA graphs", "arm": "tiers/tier3", "control": "tiers/tier2", "expected": "+5 to 15 %"},
    {"name": "cuDNN attention", "arm": "tiers/tier1", "control": "ablations/4.1-sdpa", "expected": "+20 to 30 %"},
    {
        "name": "float32",
        "arm": "ablations/4.2-float32",
        "control": "ablations/4.2-bfloat16-control",
        "expected": "−50 %",
    },
    {
        "name": "accumulation 16 instead of 1",
        "arm": "ablations/4.3-accumulation16",
        "control": "ablations/4.3-accumulation1",
        "expected": "+5 to 10 %",
    },
    {"name": "micro-batch 24 instead of 8", "arm": "tiers/tier1", "control": "ablations/4.4-micro-batch8"},
    {"name": "FSDP", "arm": "ablations/4.5-fsdp", "control": "tiers/tier1"},
]

SKIPPED = {"ablations/4.5-fsdp": "needs 16 processes a node, this machine holds 8"}


def noisy_steps(log: RunLog, rate: float, seed: int, deviation: float) -> list[Step]:
    """The log's steps with an AR(1) wobble around tokens/s/GPU, slow first steps, and a loss that falls."""
    random = np.random.default_rng(seed)
    tokens = log.config.tokens_per_step
    base = tokens / log.config.world_size / rate
    wobble, steps = 0.0, []
    for step in log.steps:
        wobble = 0.5 * wobble + random.normal(0, deviation)
        time_s = base * (1 + wobble + abs(random.standard_t(3)) * deviation / 4)
        if step.phase == "compile":
            time_s = 41.7
        elif step.phase == "warmup":
            time_s *= 1.04 + 0.3 * math.exp(-step.step)
        floor = 3.1 + random.normal(0, 0.03)
        loss = floor + (math.log(log.config.model.vocab_size) - floor) * math.exp(-step.step / 60)
        norm = 0.5 + 4 * math.exp(-step.step / 30) * (1 + random.normal(0, 0.15)) + abs(random.normal(0, 0.05))
        changes = {"step_time_s": time_s, "loss": loss, "grad_norm": norm, "data_time_s": 0.0006 + 0.0002 * abs(wobble)}
        steps.append(step.model_copy(update=changes))
    return steps


def make_gpu_log(name: str, seed: int, gpu_name: str = "NVIDIA H100 80GB HBM3", speed: float = 1.0) -> RunLog:
    world_size, rate, reserved, fields = GPU_CASES[name]
    settings = {"micro_batch_size": 24, "gradient_accumulation_steps": 8, "max_iters": 80, "parallelism": "ddp"}
    log = make_run_log(name=name, world_size=world_size, gpu_name=gpu_name, **{**settings, **fields})
    steps = noisy_steps(log, rate * speed, seed, 0.0015)
    memory = [
        RankMemory(rank=rank, peak_allocated_gib=reserved * 0.91, peak_reserved_gib=reserved, peak_rss_gib=3.2)
        for rank in range(world_size)
    ]
    used = dict(log.used)
    if name == "ablations/4.2-float32":
        used["attention"] = Choice(requested="cudnn", used="sdpa", reason="cuDNN attention has no float32")
        log.kernels = Kernels(attention=ATTENTION_KERNELS["sdpa"], matmul=MATMUL_KERNELS["float32"], other_count=61)
    evaluations = log.evaluations
    if name == "training/pretrain":
        losses = {at: (steps[at - 1].loss or 0) + 0.08 for at in range(100, 601, 100)}
        evaluations = [Evaluation(step=at, loss=loss, tokens=4096) for at, loss in losses.items()]
    ranks = [[step.step_time_s * (1 + 0.0004 * rank) for step in steps] for rank in range(world_size)]
    telemetry = {"gpus": [{"power_w": {"median": 640.0, "q1": 633.0, "q3": 651.0, "max": 702.0}}], "throttled": {}}
    return log.model_copy(
        update={
            "steps": steps,
            "rank_step_times_s": ranks,
            "memory": memory,
            "used": used,
            "evaluations": evaluations,
            "telemetry": telemetry,
            "wall": make_wall(steps, log.phases),
        }
    )


def add_untried_case(folder: Path, speed: float) -> Path:
    """CUDA graphs without a DataLoader on 2 GPUs, which no case of the example has on 8; returns its run log."""
    log = make_gpu_log("baseline/1.2-compile", 41, speed=speed)
    config = log.config.model_copy(update={"name": "baseline/1.4-graphs", "cuda_graphs": True})
    used = {**log.used, "cuda_graphs": Choice(requested="true", used="true")}
    path = folder / "runs" / f"{config.name}.json"
    write_run_log(path, log.model_copy(update={"name": config.name, "config": config, "used": used}))
    declare(folder, config.name)
    return path


PROFILED = ("baseline/1.2-compile", "scaling/2.1-plain-gpus8", "tiers/tier3")


def write_gpu_study(folder: Path, speed: float = 1.0, gpu_name: str = "NVIDIA H100 80GB HBM3", seed: int = 0) -> Path:
    """results/<study> of an 8-GPU machine: every stage, repeats, an out-of-memory, a skipped arm, a memory search."""
    for position, name in enumerate(GPU_CASES):
        log = make_gpu_log(name, seed + position, gpu_name, speed)
        if name in PROFILED:
            seconds = sorted(step.step_time_s for step in log.measured_steps())
            steps = log.config.gradient_accumulation_steps
            write_example_trace(folder, name, 1.01 * seconds[len(seconds) // 2], steps, log.config.world_size)
        write_run_log(folder / "runs" / f"{name}.json", log)
    oom = make_gpu_log("tiers/tier1", 99, gpu_name).model_copy(
        update={"name": "ablations/4.4-micro-batch32", "status": "oom", "steps": [], "rank_step_times_s": [],
                "reason": "rank 3: CUDA out of memory at micro-batch 32 (needed 81.9 GiB of 79.2 GiB)"}
    )  # fmt: skip
    oom = oom.model_copy(update={"config": oom.config.model_copy(update={"name": oom.name, "micro_batch_size": 32})})
    write_run_log(folder / "runs" / f"{oom.name}.json", oom)
    write_memory_search(folder)
    write_ceilings(folder, "cuda", gpu_name, {"bf16": 731.0, "tf32": 402.0})
    write_study_file(folder, "llama2-1.36b-80gb", [*GPU_CASES, oom.name], "llama2-1.36b", 2.9)
    return folder


def write_memory_search(folder: Path) -> None:
    """A search of ten trials; a study that is written already declares it from now on."""
    run = make_run_config(name="memory/5.1-limit", world_size=8, parallelism="ddp", max_iters=20)
    search = {"run": json.loads(run.to_json()), "candidates": [16, 24, 32], "bisect": True, "comfort_fraction": 0.85}
    trials = []
    for size in (4, 8, 12, 16, 20, 24, 28, 30, 31, 32):
        needed = 26.0 + 1.72 * size
        fits = needed <= 78.4
        reason = None if fits else f"CUDA out of memory at micro-batch {size}"
        rate = 68_000 * size / (size + 0.55) if fits else None
        trials.append(
            {
                "micro_batch_size": size,
                "status": "ok" if fits else "oom",
                "peak_memory_gib": needed if fits else None,
                "tokens_per_s_per_gpu": rate,
                "reason": reason,
            }
        )
    write_json(
        folder / "memory" / "5.1-limit.json",
        {"name": "memory/5.1-limit", "search": search, "memory_gib": 79.2, "trials": trials,
         "largest": 30, "largest_is_exact": True, "largest_comfortable": 20},
    )  # fmt: skip
    if (folder / "study.json").exists():
        declare(folder, "memory/5.1-limit", kind="searches")


def write_ceilings(folder: Path, device: str, device_name: str, rates: dict[str, float]) -> None:
    """ceilings.json with the large matmul of each arithmetic, TFLOP/s."""
    matmuls = [
        MatmulRate(
            model=None,
            name="large",
            product="forward",
            arithmetic=arithmetic,
            m=8192,
            k=8192,
            n=8192,
            calls_per_step=1,
            tflops=rate,
            tflops_quartiles=(rate, rate, rate),
            seconds=2.0,
        )
        for arithmetic, rate in rates.items()
    ]
    if device == "cuda":
        matmuls += [
            matmuls[0].model_copy(update={"model": "llama2-1.36b", "name": name, "tflops": tflops})
            for name, tflops in (("qkv", 741.0), ("mlp_up", 752.0), ("mlp_down", 694.0), ("lm_head", 702.0))
        ]
    attention = AttentionRate(
        model="llama2-1.36b", backend="cudnn", dtype="bfloat16", batch_size=8, seq_len=2048, query_heads=18,
        key_value_heads=18, head_dim=128, forward_tflops=444.0, forward_backward_tflops=398.0,
    )  # fmt: skip
    collective = CollectiveRate(
        operation="all_reduce", backend="nccl", world_size=8, dtype="bf16", bytes=2**29, time_s=0.0021, bus_gb_s=447.0
    )
    ceilings = Ceilings(
        measured_at="2026-03-02T08:40:00+00:00",
        total_s=30.0,
        host="node-1",
        device=device,
        device_name=device_name,
        threads=2,
        environment={},
        seconds=2.0,
        matmuls=matmuls,
        attention=[attention] if device == "cuda" else [],
        copy_rate=CopyRate(bytes=2**30, gb_s=2960.0 if device == "cuda" else 9.0),
        collectives=[collective] if device == "cuda" else [],
    )
    write_json(folder / "ceilings.json", ceilings.model_dump(mode="json"))


def disturb_ceilings(folder: Path) -> None:
    """As if other processes had taken 1.4 of 2 cores while the ceilings were measured."""
    ceilings = json.loads((folder / "ceilings.json").read_text())
    ceilings["telemetry"] = {"host": {"cpu_percent": {"median": 100.0}, "run_cores": {"median": 0.6}}}
    write_json(folder / "ceilings.json", ceilings)


def write_study_file(folder: Path, study: str, cases: list[str], expectations: str | None, price: float | None) -> None:
    write_json(
        folder / "study.json",
        {
            "study": study,
            "description": "An example.",
            "models": ["llama2-1.36b"],
            "effects": EFFECTS if expectations else [],
            "expectations": expectations,
            "price_per_gpu_hour": price,
            "cases": {name: {} for name in cases},
            "searches": {f"memory/{path.stem}": {} for path in (folder / "memory").glob("*.json")},
            "skipped": SKIPPED if expectations else {},
        },
    )


def declare(folder: Path, *names: str, kind: str = "cases") -> None:
    """Let a written study know further cases, or searches."""
    study = json.loads((folder / "study.json").read_text())
    study[kind] |= {key: {} for key in names}
    write_json(folder / "study.json", study)


def write_cpu_study(folder: Path) -> Path:
    """results/<study> of a laptop without a GPU: four architectures, few steps, noisy."""
    cases = {
        "smoke/gpt2-tiny": {"model": make_model("gpt2-tiny"), "max_iters": 10},
        "smoke/llama2-tiny": {"max_iters": 10},
        "baseline/1.1-plain": {},
        "baseline/1.2-compile": {"compile": "block"},
        "scaling/2.1-plain-gpus1": {},
        "scaling/2.1-plain-gpus2": {"world_size": 2, "parallelism": "ddp"},
        "training/pretrain": {"max_iters": 120},
    }
    for position, (name, fields) in enumerate(cases.items()):
        log = make_run_log(device="cpu", **{"name": name, "max_iters": 14, **fields})
        rate = 11_000 * (1.2 if "compile" in name else 1) * (0.7 if "gpus2" in name else 1)
        steps = noisy_steps(log, rate, position, 0.02)
        ranks = [[step.step_time_s for step in steps] for _ in range(log.config.world_size)]
        changes = {"steps": steps, "rank_step_times_s": ranks, "wall": make_wall(steps, log.phases)}
        write_run_log(folder / "runs" / f"{name}.json", log.model_copy(update=changes))
    write_ceilings(folder, "cpu", "AMD EPYC 7B13", {"fp32": 0.35})
    write_study_file(folder, "default", list(cases), None, None)
    return folder
