"""Audit of one run JSON."""

from __future__ import annotations

import statistics

from mfubench.audit import run_clocks, run_facts, run_numbers, run_steps
from mfubench.audit.counting import Count
from mfubench.audit.findings import Finding, RunVerdict, sentence_of
from mfubench.ceilings.schema import Ceilings
from mfubench.flops import flop_terms, flops_per_token, mfu
from mfubench.hardware import NoPeak, Peak, arithmetic_of_run, peak_for_run
from mfubench.host_load import cores_of_run
from mfubench.run_log import RunLog


def audit_run(log: RunLog, ceilings: Ceilings | None = None) -> list[Finding]:
    """Everything that is wrong with a run, recomputed from its raw facts; empty for a good one.

    ceilings: of the machine that ran it; executed FLOPs are then held against its own fastest matmul, and a CPU run
    can be judged at all.
    """
    return judge_run(log, log.name, ceilings).findings


def judge_run(log: RunLog, source: str, ceilings: Ceilings | None) -> RunVerdict:
    """The findings of a run and its true rate and MFU. A run without steps (oom, skipped) has facts only."""
    unit = "GPU" if log.environment.device == "cuda" else "process"
    count, findings = run_numbers.count_tokens(log, unit)
    peak, unknown = peak_or_finding(log, ceilings)
    findings += unknown
    findings += run_numbers.check_wall(log)
    findings += run_numbers.check_step_times(log)
    findings += run_numbers.check_ceiling(log, count, peak, ceilings)
    findings += run_numbers.check_parameters(log)
    findings += run_facts.check_status(log)
    findings += run_facts.check_what_ran(log)
    findings += run_facts.check_ranks(log)
    findings += run_facts.check_memory(log)
    findings += run_clocks.check_clocks(log)
    findings += run_steps.check_steps(log)
    findings += run_facts.check_schedule(log)
    findings += run_facts.check_learning(log)
    findings += run_facts.check_tokens_fit(log)
    findings += run_facts.check_machine(log)
    rate = true_rate(log, count)
    return RunVerdict(
        name=log.name,
        source=source,
        world_size=log.config.world_size,
        micro_steps_per_gpu=count.micro_steps_per_gpu if count else None,
        true_tokens_per_s=rate,
        true_mfu_palm=palm_mfu(log, rate, peak),
        precision=arithmetic_of_run(log),
        findings=findings,
        unit=unit,
        cores=cores_of_run(log),
        not_checked=["the rate against what this CPU can do (needs its ceilings.json)"]
        if rate and peak is None and not unknown
        else [],
    )


def peak_or_finding(log: RunLog, ceilings: Ceilings | None) -> tuple[Peak | None, list[Finding]]:
    """The peak of what ran; an unknown card is a finding, a CPU without measured ceilings is not."""
    try:
        return peak_for_run(log, ceilings), []
    except NoPeak as error:
        if log.environment.device == "cpu":
            return None, []
        return None, [Finding("peak_unknown", sentence_of(error), 0.99)]


def true_rate(log: RunLog, count: Count | None) -> float | None:
    """Tokens/s over all GPUs: true tokens of a step over the median time of the measured ones."""
    times_s = [step.step_time_s for step in log.measured_steps()]
    if count is None or not times_s or log.status == "failed":
        return None
    config = log.config
    tokens = count.micro_steps_per_gpu * config.micro_batch_size * config.seq_len * config.world_size
    return tokens / statistics.median(times_s)


def palm_mfu(log: RunLog, rate: float | None, peak: Peak | None) -> float | None:
    if rate is None or peak is None:
        return None
    flops = flops_per_token(flop_terms(log.config.model, log.config.seq_len), "palm")
    return mfu(rate / log.config.world_size, flops, peak.tflops)
