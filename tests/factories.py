"""Run logs for tests: good, self-consistent and realistic, with any field overridden.

`make_run_log()` is a run of llama2-1.36b on one H100; `make_run_log(device="cpu")` one of llama2-tiny on a CPU. An
override that names a field of RunConfig changes the config and everything that follows from it (tokens, memory of
each rank, wall clock); one that names a field of RunLog replaces that field as it is, consistent or not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from mfubench.ceilings.schema import Ceilings, MatmulRate
from mfubench.config import ModelConfig, RunConfig
from mfubench.flops import count_parameters, flop_terms
from mfubench.run_log import (
    Choice,
    Dataset,
    Environment,
    Evaluation,
    Gpu,
    Kernels,
    Parameters,
    Phase,
    RankMemory,
    RunFlopTerms,
    RunLog,
    Step,
    Wall,
)

MODELS_FILE = Path(__file__).parents[1] / "config" / "models.yaml"
COMPILE_STEP_S = 41.7
SETUP_S = 9.4
EVALUATION_S = 2.6

# Kernel names as the profiler reports them on an H100 with torch 2.11.
ATTENTION_KERNELS = {
    "cudnn": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_kernel0_0",
    ],
    "sdpa": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
    ],
    "sdpa-float32": [
        "fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, Sm80>::Params)",
        "fmha_cutlassB_f32_aligned_64x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>::Params)",
    ],
    "fa2": [
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
    ],
    "eager": ["void (anonymous namespace)::softmax_warp_forward<float, c10::BFloat16, float, 11>"],
}
MATMUL_KERNELS = {
    "bfloat16": ["nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"],
    "float16": ["nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"],
    "float32": ["cutlass_80_tensorop_s1688gemm_256x128_16x3_nn_align4"],
}


# tokens/s of llama2-1.36b on an H100 by what it computes in, about as measured.
H100_RATES = {"bfloat16": 72_000, "float16": 71_000, "tf32": 33_000, "float32": 4_800, "fp8": 88_000}
CPU_RATE = 11_000  # tokens/s of llama2-tiny on one process


def make_model(preset: str = "llama2-1.36b", **overrides: Any) -> ModelConfig:
    """A preset of config/models.yaml with keys overridden."""
    return ModelConfig(**{"name": preset, **read_models()[preset], **overrides})


@functools.cache
def read_models() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))


def make_run_config(device: str = "cuda", **overrides: Any) -> RunConfig:
    """The config behind `make_run_log`; `overrides` are fields of RunConfig."""
    fields: dict[str, Any] = {
        "name": "baseline/one-gpu",
        "model": make_model(),
        "dataset": "slimpajama-6b-llama2",
        "seq_len": 2048,
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_iters": 30,
        "attention": "cudnn",
        "loss": "chunked",
        "compile": "model",
        "device": "cuda",
    }
    if device == "cpu":
        fields |= {
            "model": make_model("llama2-tiny"),
            "dataset": "stdlib-bpe4096",
            "seq_len": 256,
            "gradient_accumulation_steps": 2,
            "dtype": "float32",
            "attention": "sdpa",
            "compile": "none",
            "device": "cpu",
        }
    if overrides.get("dtype") == "float32":
        fields["attention"] = "sdpa"  # cuDNN and FlashAttention have no float32
    fields |= overrides
    if fields.get("world_size", 1) == 1:
        fields.setdefault("parallelism", "none")
    return RunConfig(**fields)


def make_environment(device: str, config: RunConfig, gpu_name: str) -> Environment:
    if device == "cpu":
        return Environment(
            host="laptop",
            device="cpu",
            gpus=[],
            cpu="AMD EPYC 7B13",
            cpu_count=2,
            cpu_threads=max(1, 2 // config.world_size),
            memory_gib=24.0,
            torch="2.13.0+cpu",
            python="3.11.9",
            command="python -m mfubench.train",
        )
    gpus = [
        Gpu(
            index=rank,
            name=gpu_name,
            uuid=f"GPU-00000000-0000-0000-0000-{rank:012d}",
            memory_gib=79.2,
            power_limit_w=700.0,
        )
        for rank in range(config.world_size)
    ]
    return Environment(
        host="node-1",
        device="cuda",
        gpus=gpus,
        cpu="Intel(R) Xeon(R) Platinum 8480C",
        cpu_count=104,
        cpu_threads=8,
        memory_gib=1007.0,
        driver="580.95.05",
        cuda="13.0",
        nccl="2.28.9",
        cudnn="9.19.0",
        torch="2.11.0+cu130",
        python="3.12.3",
        packages={"liger-kernel": "0.8.5", "triton": "3.6.0"},
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=False,
        command="torchrun --nproc-per-node=1 -m mfubench.train",
    )


def make_used(config: RunConfig, device: str) -> dict[str, Choice]:
    def as_asked(value: str) -> Choice:
        return Choice(requested=value, used=value)

    tf32 = config.tf32 and device == "cuda"
    return {
        "attention": as_asked("cudnn" if config.attention == "auto" else config.attention),
        "compile": as_asked(config.compile),
        "cuda_graphs": as_asked(str(config.cuda_graphs).lower()),
        "loader": as_asked(config.loader.kind),
        "loss": as_asked("chunked" if config.loss == "auto" else config.loss),
        "parallelism": as_asked(config.parallelism),
        "dtype": as_asked(config.dtype),
        "tf32": Choice(
            requested=str(config.tf32).lower(),
            used=str(tf32).lower(),
            reason="a CPU has no TF32" if config.tf32 and not tf32 else None,
        ),
        "fp8": as_asked(str(config.fp8).lower()),
    }


def attention_kernels(attention: str, dtype: str) -> list[str]:
    return ATTENTION_KERNELS[f"{attention}-float32" if (attention, dtype) == ("sdpa", "float32") else attention]


def make_steps(config: RunConfig, step_time_s: float, first_step: int = 0, count: int | None = None) -> list[Step]:
    """One compile step, the warm-up, then measured steps that wobble by half a percent."""
    compiled = config.compile != "none" or config.cuda_graphs
    steps = []
    for position in range(count if count is not None else config.max_iters - first_step):
        step = first_step + position
        if position == 0 and compiled:
            phase, time_s = "compile", COMPILE_STEP_S
        elif position < 1 + config.measurement.warmup_steps:
            phase, time_s = "warmup", step_time_s * 1.03
        else:
            phase, time_s = "measured", step_time_s * (1 + 0.005 * math.sin(2.4 * position))
        steps.append(
            Step(
                step=step,
                phase=phase,
                step_time_s=time_s,
                data_time_s=0.0006,
                tokens=config.tokens_per_step,
                loss=math.log(config.model.vocab_size) - 1.2 * (1 - math.exp(-step / 40)),
                learning_rate=config.optimizer.learning_rate * (step + 1) / config.optimizer.warmup_iters,
                grad_norm=1.0 + 2.0 * math.exp(-step / 20),
            )
        )
    return steps


def make_wall(steps: list[Step], phases: list[Phase]) -> Wall:
    """The clock that reconciles with these steps and phases, with a little time that nobody accounts for."""
    between = sum(phase.time_s for phase in phases if phase.kind != "setup")
    training_s = sum(step.step_time_s for step in steps) + between + 0.02
    setup = sum(phase.time_s for phase in phases if phase.kind == "setup")
    return Wall(
        started_at="2026-03-02T09:00:00+00:00",
        total_s=setup + training_s + 1.1,
        training_s=training_s,
        training_tokens=sum(step.tokens for step in steps),
    )


def usual_step_time_s(config: RunConfig, device: str) -> float:
    """A realistic step: the same FLOP/s whatever the model's size, by what it computes in."""
    terms = flop_terms(config.model, config.seq_len)
    executed = 6 * terms.matmul_parameters + terms.attention / 2
    if device == "cpu":
        usual, rate = flop_terms(make_model("llama2-tiny"), 256), CPU_RATE
    else:
        arithmetic = "fp8" if config.fp8 else "tf32" if config.dtype == "float32" and config.tf32 else config.dtype
        usual, rate = flop_terms(make_model("llama2-1.36b"), 2048), H100_RATES[arithmetic]
    tokens_a_rank = config.tokens_per_step / config.world_size
    return tokens_a_rank / rate * executed / (6 * usual.matmul_parameters + usual.attention / 2)


def make_run_log(
    *,
    device: str = "cuda",
    gpu_name: str = "NVIDIA H100 80GB HBM3",
    step_time_s: float | None = None,
    first_step: int = 0,
    step_count: int | None = None,
    **overrides: Any,
) -> RunLog:
    """A good run log of ~30 steps.

    step_time_s: of one measured step; by default about 63 % MFU (palm) on an H100, 11,000 tokens/s a CPU process.
    first_step: steps that an earlier process had done (a resumed run); step_count: steps done here.
    overrides: fields of RunLog (replaced as given) or of RunConfig (consistent); `name` sets both, `kernels` are those
    that ran.
    """
    log_fields = {key: value for key, value in overrides.items() if key in RunLog.model_fields and key != "name"}
    config_fields = {
        key: overrides[key] for key in overrides.keys() & RunConfig.model_fields.keys() - log_fields.keys()
    }
    unknown = overrides.keys() - RunConfig.model_fields.keys() - RunLog.model_fields.keys()
    if unknown:
        raise TypeError(f"make_run_log: {sorted(unknown)} are fields of neither RunConfig nor RunLog")

    config = log_fields.pop("config", None) or make_run_config(device, **config_fields)
    if step_time_s is None:
        step_time_s = usual_step_time_s(config, device)

    steps = make_steps(config, step_time_s, first_step, step_count)
    middle = steps[len(steps) // 2].step if steps else 0
    phases = [
        Phase(kind="setup", after_step=first_step, time_s=SETUP_S),
        Phase(kind="evaluation", after_step=middle, time_s=EVALUATION_S),
        Phase(kind="profile", after_step=first_step + len(steps), time_s=1.3),
    ]
    counts = count_parameters(config.model)
    used = make_used(config, device)
    fields: dict[str, Any] = {
        "name": config.name,
        "status": "ok",
        "config": config,
        "environment": make_environment(device, config, gpu_name),
        "used": used,
        "parameters": Parameters(total=counts.total, trainable=counts.total, matmul=counts.matmul),
        "flop_terms": RunFlopTerms(**asdict(flop_terms(config.model, config.seq_len))),
        "dataset": Dataset(
            name=config.dataset,
            train_tokens=5_900_000_000 if device == "cuda" else 3_300_000,
            val_tokens=10_000_000 if device == "cuda" else 70_000,
            vocab_size=config.model.vocab_size,
            token_dtype="uint16" if config.model.vocab_size <= 65_536 else "uint32",
            tokenizer_sha256="9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347",
            source="test",
        ),
        "steps": steps,
        "rank_step_times_s": [
            [step.step_time_s * (1 + 0.0004 * rank) for step in steps] for rank in range(config.world_size)
        ],
        "phases": phases,
        "evaluations": [Evaluation(step=middle, loss=9.7, tokens=20 * config.micro_batch_size * config.seq_len)],
        "memory": [
            RankMemory(
                rank=rank,
                peak_allocated_gib=41.3 if device == "cuda" else None,
                peak_reserved_gib=46.8 if device == "cuda" else None,
                peak_rss_gib=3.1,
                allocator_retries=0 if device == "cuda" else None,
            )
            for rank in range(config.world_size)
        ],
        "kernels": Kernels(
            attention=attention_kernels(used["attention"].used, config.dtype)
            if device == "cuda"
            else ["aten::_scaled_dot_product_flash_attention_for_cpu"],
            matmul=MATMUL_KERNELS[config.dtype] if device == "cuda" else ["aten::mm", "aten::addmm"],
            other_count=61,
        ),
        "resumes": [],
        "wall": make_wall(steps, phases),
    }
    if first_step:
        fields["resumes"] = [{"step": first_step, "at": "2026-03-02T08:59:50+00:00"}]
    return RunLog(**(fields | log_fields))


def with_threads(log: RunLog, cpu_threads: int) -> RunLog:
    """The run as if its processes had had as many threads."""
    return log.model_copy(update={"environment": log.environment.model_copy(update={"cpu_threads": cpu_threads})})


def make_ceilings(device: str, arithmetic: str, tflops: float) -> Ceilings:
    """Ceilings that hold one large matmul."""
    rate = MatmulRate(
        model=None,
        name="large",
        product="forward",
        arithmetic=arithmetic,
        m=8192,
        k=8192,
        n=8192,
        calls_per_step=1,
        tflops=tflops,
        tflops_quartiles=(tflops, tflops, tflops),
        seconds=2.0,
    )
    return Ceilings(
        measured_at="2026-03-02T08:00:00+00:00",
        total_s=60.0,
        host="node-1",
        device=device,
        device_name="NVIDIA H100 80GB HBM3" if device == "cuda" else "AMD EPYC 7B13",
        threads=2,
        environment={"torch": "2.11.0"},
        seconds=2.0,
        matmuls=[rate],
    )
