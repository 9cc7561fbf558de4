"""Which checks the figures of a report allow, and which figures the others lack: silence is no approval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mfubench.audit.reported import ReportedRun


@dataclass(frozen=True)
class Check:
    """One thing that can be held against others, where all that it needs is there."""

    what: str
    missing: tuple[str, ...]  # empty: it was made
    of_interest: bool = True  # whether the report says something that it would judge

    def __str__(self) -> str:
        return f"{self.what} (needs {', '.join(self.missing)})"


def checks_of(run: ReportedRun) -> list[Check]:
    """Every check of `audit_reported`, made or not."""
    stated_rate = bool(run.step_rates or run.tokens_per_s or run.tokens_per_s_per_gpu)
    rate = stated_rate or has_totals(run) or has_batch_and_time(run)
    flops = bool(run.architecture or run.parameters or run.flops_per_token)
    sizes = bool(run.flop_terms() or run.flops_per_token)
    needs_rate, needs_gpu = need("tokens_per_s", rate), need("gpu", run.gpu_name)
    needs_model = need("model, or parameters", flops)
    return [
        Check("whether the rate counts all GPUs and micro-steps", missing_for_count(run, stated_rate), stated_rate),
        Check("the rate against the card's peak", (*needs_gpu, *needs_rate, *needs_model), rate),
        Check(
            "the MFU against the rate and the card's peak",
            (*need("mfu_percent", run.mfu_percent), *missing_for_mfu(run, rate, sizes)),
            run.mfu_percent is not None,
        ),
        Check(
            "the stated peak against the card's",
            (*need("hardware_peak_tflops", run.hardware_peak_tflops), *needs_gpu),
            run.hardware_peak_tflops is not None,
        ),
        Check(
            "the number of parameters against the model's dimensions",
            (*need("parameters", run.parameters), *need("model", run.architecture)),
            run.parameters is not None,
        ),
        Check(
            "FLOPs a token against the model's dimensions",
            (*need("flops_per_token", run.flops_per_token), *need(model_and_length(run), run.flop_terms())),
            run.flops_per_token is not None,
        ),
        Check(
            "total tokens and time against the rate",
            (*need("total_tokens and total_time_s", has_totals(run)), *need("tokens_per_s", stated_rate)),
            run.total_tokens is not None,
        ),
    ]


def need(name: str, figure: object) -> tuple[str, ...]:
    return () if figure else (name,)


def model_and_length(run: ReportedRun) -> str:
    """What the FLOPs of a token follow from, as far as it is not there."""
    return "seq_len" if run.architecture and not run.seq_len else "model and seq_len"


def missing_for_count(run: ReportedRun, stated_rate: bool) -> tuple[str, ...]:
    if run.tokens_per_s and run.tokens_per_s_per_gpu:
        return ()
    batch = run.micro_batch_size or (run.global_batch_size and run.num_gpus > 1)
    return tuple(missing_of(tokens_per_s=stated_rate, step_time_s=run.step_time_s or run.step_times_s,
                            micro_batch_size=batch, seq_len=run.seq_len))  # fmt: skip


def missing_for_mfu(run: ReportedRun, rate: bool, sizes: bool) -> tuple[str, ...]:
    """A stated peak and achieved FLOP/s close by themselves."""
    if run.hardware_peak_tflops and run.achieved_tflops:
        return ()
    peak = run.hardware_peak_tflops or run.gpu_name
    return (*missing_of(gpu=peak, tokens_per_s=rate), *need(f"{model_and_length(run)}, or flops_per_token", sizes))


def missing_of(**figures: object) -> Iterator[str]:
    return (name for name, figure in figures.items() if not figure)


def has_totals(run: ReportedRun) -> bool:
    return bool(run.total_tokens and run.total_time_s)


def has_batch_and_time(run: ReportedRun) -> bool:
    return bool(run.tokens_per_micro_batch and run.gradient_accumulation_steps and run.step_time_s)
