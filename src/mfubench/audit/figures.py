"""Audit of reported figures: what must hold between them, recomputed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mfubench.audit.counting import Count, count_micro_batches, near, one_rank, rate_differs
from mfubench.audit.coverage import checks_of
from mfubench.audit.findings import Finding, RunVerdict
from mfubench.audit.rates import (
    check_ceiling,
    check_flops,
    check_mfu,
    check_mfu_possible,
    check_parameters,
    check_peak,
    known_peak,
)
from mfubench.audit.reported import ReportedRun
from mfubench.audit.series import check_series
from mfubench.config import ConfigError
from mfubench.flops import FlopTerms, flops_per_token
from mfubench.hardware import Peak


@dataclass(frozen=True)
class Rate:
    """The run's tokens/s: as its source means it, over all GPUs, and as it truly was."""

    stated: float | None
    true: float | None
    micro_steps_per_gpu: float | None
    findings: list[Finding]
    one_rank: bool = False


def audit_reported(run: ReportedRun, source: str, *, others_are_one_rank: bool = False) -> RunVerdict:
    """Judge one report; `others_are_one_rank` as in `count_micro_batches`."""
    rate = understand_rate(run, others_are_one_rank)
    peak, findings = known_peak(run)
    terms = run.flop_terms()
    findings = [*rate.findings, *findings]
    if peak is not None:
        findings += check_peak(run, peak)
    findings += check_mfu_of_either_rate(run, peak, rate, terms)
    findings += check_flops(run, terms)
    findings += check_parameters(run)
    if peak is not None and rate.true is not None:
        what = f"{rate.true:,.0f} tokens/s"
        findings += check_ceiling(rate.true / run.num_gpus, run, peak, terms, what)
    findings += check_mfu_possible(run, terms, findings)
    findings += check_totals(run, rate.true)
    findings += check_series(run.step_times_s, run.step_numbers, events_of(run), "an evaluation or checkpoint")

    palm = flops_per_token(terms, "palm") if terms else run.flops_per_token
    checks = checks_of(run)
    true_mfu = rate.true * palm / (peak.tflops * 1e12 * run.num_gpus) if rate.true and palm and peak else None
    return RunVerdict(
        name=run.name,
        source=source,
        group=(run.parameters or run.model, run.gpu_name, run.seq_len, run.micro_batch_size),
        world_size=run.num_gpus,
        micro_steps_per_gpu=rate.micro_steps_per_gpu,
        true_tokens_per_s=rate.true,
        true_mfu_palm=true_mfu,
        precision=peak.dtype if peak else "bf16",
        stated_mfu=run.mfu_percent / 100 if run.mfu_percent else None,
        findings=findings,
        checked=bool(findings) or any(not check.missing for check in checks),
        not_checked=[str(check) for check in checks if check.missing and check.of_interest],
    )


def check_mfu_of_either_rate(run: ReportedRun, peak: Peak | None, rate: Rate, terms: FlopTerms | None) -> list[Finding]:
    """A source that states another rate than the true one may still have its MFU of the true one."""
    of_stated, of_true = (check_mfu(run, peak, one, terms) for one in (rate.stated, rate.true))
    return of_true if all(finding.code == "flops_convention_unstated" for finding in of_true) else of_stated


def check_auditable(verdicts: Sequence[RunVerdict], where: str) -> None:
    """Raises ConfigError where nothing that was reported could be held against anything: silence is no approval."""
    if not any(verdict.checked for verdict in verdicts):
        raise ConfigError(
            f"{where}: holds no figures that can be audited; give a rate (tokens_per_s), the card (gpu, num_gpus) and "
            "the model (model, or parameters), as far as known with step_time_s, micro_batch_size, seq_len and "
            "gradient_accumulation_steps"
        )


def audit_reported_runs(runs: Sequence[ReportedRun], source: str) -> list[RunVerdict]:
    """Judge the runs of one source. What one of them proves about its logger is held against the others."""
    proven = any(understand_rate(run, False).one_rank for run in runs)
    verdicts = [audit_reported(run, source, others_are_one_rank=proven) for run in runs]
    for group in {verdict.group for verdict in verdicts}:
        members = [verdict for verdict in verdicts if verdict.group == group]
        steps = {verdict.name: verdict.micro_steps_per_gpu for verdict in members if verdict.micro_steps_per_gpu}
        if len(steps) < 2 or near(min(steps.values()), max(steps.values())):
            continue
        listed = ", ".join(f"{name} {value:.4g}" for name, value in steps.items())
        factor = max(steps.values()) / min(steps.values())
        sentence = (
            f"the runs are compared, but did unequal work per GPU and step (micro-steps: {listed}): that alone makes "
            f"one step take {factor:.3g} times as long as another"
        )
        for verdict in members:
            verdict.findings.append(Finding("workloads_differ", sentence, 0.97, f"x {factor:.3g} in step time"))
    return verdicts


def understand_rate(run: ReportedRun, others_are_one_rank: bool) -> Rate:
    """Tokens/s against step time and batch."""
    stated = stated_rate(run)
    findings: list[Finding] = []
    both = run.tokens_per_s and run.tokens_per_s_per_gpu
    if both and run.num_gpus > 1 and near(run.tokens_per_s or 0.0, run.tokens_per_s_per_gpu or 0.0):
        findings.append(one_rank(run.num_gpus, "the rate over all GPUs equals the rate per GPU", 0.98))
        return Rate(stated, (run.tokens_per_s or 0.0) * run.num_gpus, None, findings, True)
    tokens_a_step = tokens_of_a_step(run, stated)
    if stated is None:
        return rate_from_batch(run)
    if tokens_a_step is None or run.tokens_per_micro_batch is None:
        return rate_by_global_batch(run, stated, tokens_a_step)
    count = count_micro_batches(
        tokens_a_step / run.tokens_per_micro_batch,
        run.num_gpus,
        run.gradient_accumulation_steps,
        others_are_one_rank=others_are_one_rank,
    )
    findings += count.findings
    findings += check_global_batch(run, count)
    return Rate(stated, stated * count.factor, count.micro_steps_per_gpu, findings, count.one_rank)


def stated_rate(run: ReportedRun) -> float | None:
    """Tokens/s as the source means it to be over all GPUs."""
    if run.step_rates:
        return statistics.median(run.step_rates)
    if run.tokens_per_s:
        return run.tokens_per_s
    if run.tokens_per_s_per_gpu:
        return run.tokens_per_s_per_gpu * run.num_gpus
    return None


def tokens_of_a_step(run: ReportedRun, stated: float | None) -> float | None:
    """Stated tokens/s times step time; of a series the median of the products, which do not vary as the factors do."""
    if run.step_rates and run.step_times_s:
        return statistics.median(rate * time for rate, time in zip(run.step_rates, run.step_times_s, strict=True))
    return stated * run.step_time_s if stated and run.step_time_s else None


def tokens_of_the_batch(run: ReportedRun) -> int | None:
    """Tokens of a step over all GPUs, by micro-batch and accumulation as they are stated."""
    if run.tokens_per_micro_batch is None or run.gradient_accumulation_steps is None:
        return None
    return run.tokens_per_micro_batch * run.gradient_accumulation_steps * run.num_gpus


def rate_from_batch(run: ReportedRun) -> Rate:
    """No rate is stated: from the batch and the step time, or from totals."""
    if run.total_tokens and run.total_time_s:
        return Rate(None, run.total_tokens / run.total_time_s, None, [])
    if (tokens := tokens_of_the_batch(run)) and run.step_time_s:
        return Rate(None, tokens / run.step_time_s, run.gradient_accumulation_steps, [])
    return Rate(None, None, None, [])


def rate_by_global_batch(run: ReportedRun, stated: float, tokens_a_step: float | None) -> Rate:
    """The micro-batch is not known: the global batch still tells one rank's rate from everyone's."""
    if tokens_a_step is None or not (run.global_batch_size and run.seq_len):
        return Rate(stated, stated, None, [])
    expected = run.global_batch_size * run.seq_len
    if near(tokens_a_step, expected):
        return Rate(stated, stated, None, [])
    shown = f"tokens/s x step time is {tokens_a_step:,.0f} tokens"
    if near(tokens_a_step * run.num_gpus, expected):
        why = f"{shown}, the global batch {expected:,}"
        return Rate(stated, stated * run.num_gpus, None, [one_rank(run.num_gpus, why, 0.95)], True)
    sentence = f"{shown}, {rate_differs(tokens_a_step / expected, f'the {expected:,} of the global batch')}"
    return Rate(stated, stated, None, [Finding("rate_differs_from_step_time", sentence, 0.7)])


def check_global_batch(run: ReportedRun, count: Count) -> list[Finding]:
    """The stated global batch against the micro-steps that were claimed (one that fits nothing is known already)."""
    accumulation = run.gradient_accumulation_steps
    if not (run.global_batch_size and run.micro_batch_size and accumulation):
        return []
    batch = run.micro_batch_size * accumulation * run.num_gpus
    if run.global_batch_size == batch or any(f.code == "accumulation_differs_from_banner" for f in count.findings):
        return []
    sentence = (
        f"a global batch of {run.global_batch_size:,} sequences is claimed, but "
        f"{run.micro_batch_size} x {accumulation} x {run.num_gpus} GPUs are {batch:,}"
    )
    return [Finding("accumulation_differs_from_banner", sentence, 0.9, batch)]


def check_totals(run: ReportedRun, true_rate: float | None) -> list[Finding]:
    """Total tokens over total time cannot beat the rate; after a resume they do when earlier tokens are counted."""
    if not (run.total_tokens and run.total_time_s and true_rate):
        return []
    total_rate = run.total_tokens / run.total_time_s
    if total_rate <= true_rate * 1.05:
        return []
    beyond = (
        f"{run.total_tokens:,.0f} tokens in {run.total_time_s:,.0f} s are {total_rate:,.0f} tokens/s, more than the "
        f"{true_rate:,.0f} of its steps"
    )
    if run.resumed_at_step == 0 or (run.resumed_at_step is None and made_by_its_steps(run)):
        sentence = f"{beyond}, and nothing was trained before them: the stated rate or the total time is wrong"
        return [Finding("rate_differs_from_step_time", sentence, 0.7)]
    resumed = f"the resume at step {run.resumed_at_step}" if run.resumed_at_step else "a resume"
    sentence = f"{beyond}: tokens trained before {resumed} are counted over the time after it"
    confidence = 0.95 if run.resumed_at_step else 0.6
    return [Finding("resumed_tokens_counted", sentence, confidence, f"{true_rate * run.total_time_s:,.0f} tokens")]


def made_by_its_steps(run: ReportedRun) -> bool:
    """Whether the run's own steps, each of the batch that is stated, make its total tokens."""
    tokens = tokens_of_the_batch(run)
    if not (run.steps and run.total_tokens and tokens):
        return False
    return near(run.total_tokens, run.steps * tokens)


def events_of(run: ReportedRun) -> set[int]:
    """Logged steps at which an evaluation or checkpoint was due."""
    intervals = [interval for interval in (run.evaluation_interval, run.checkpoint_interval) if interval]
    return {step for step in run.step_numbers for interval in intervals if step > 0 and step % interval == 0}
