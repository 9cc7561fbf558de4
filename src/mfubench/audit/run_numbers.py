"""Audit of a run JSON, its numbers: tokens, time, FLOPs, parameters. Each is recomputed from what determines it."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict

from mfubench.audit.counting import Count, count_micro_batches
from mfubench.audit.cpu_ceiling import check_measured_ceiling
from mfubench.audit.findings import Finding
from mfubench.audit.rates import CEILING_MARGIN, explain_parameters
from mfubench.audit.series import check_series
from mfubench.ceilings.schema import Ceilings
from mfubench.flops import FlopTerms, count_parameters, executed_flops_per_token, flop_terms, flops_per_token
from mfubench.hardware import Peak, used_of
from mfubench.run_log import Phase, RunLog, Step, Wall

MEASURED_MARGIN = 0.05  # over the fastest matmul measured on the card: cards of one kind differ by 2.5 %
FASTEST_MARGIN = 1.5  # single steps: so many times above the limit
UNACCOUNTED_SHARE = 0.25  # of the training time that neither steps nor phases explain, and...
UNACCOUNTED_S = 5.0  # ...so many seconds
OVERLAP_S = 0.5


def own_steps(log: RunLog) -> list[Step]:
    """The steps that the last process of the run did: those after the last resume, without the ones it repeats."""
    if not log.resumes:
        return log.steps
    resumed = log.resumes[-1].step
    begins = max((i for i, step in enumerate(log.steps) if step.step == resumed), default=None)
    return log.steps[begins:] if begins is not None else [step for step in log.steps if step.step > resumed]


def own_phases(log: RunLog) -> list[Phase]:
    """Phases of the run's last process; a process that resumes begins with its setup, after the steps it found."""
    if not log.resumes:
        return log.phases
    resumed = log.resumes[-1].step
    starts = [i for i, phase in enumerate(log.phases) if phase.kind == "setup" and phase.after_step == resumed]
    return log.phases[starts[-1] :] if starts else [phase for phase in log.phases if phase.after_step > resumed]


def count_tokens(log: RunLog, unit: str) -> tuple[Count | None, list[Finding]]:
    """Tokens per step against micro-batch x accumulation x world x seq_len."""
    if not log.steps:
        return None, []
    config = log.config
    usual = Counter(step.tokens for step in log.steps).most_common(1)[0][0]
    count = count_micro_batches(
        usual / (config.micro_batch_size * config.seq_len),
        config.world_size,
        config.gradient_accumulation_steps,
        unit=unit,
    )
    findings = list(count.findings)
    odd = [step for step in log.steps if step.tokens != usual]
    if odd:
        findings.append(explain_odd_step(odd[0], usual, log))
    return count, findings


def explain_odd_step(odd: Step, usual: int, log: RunLog) -> Finding:
    """A step with other tokens than the rest: after a resume often the tokens of all steps before it."""
    resumed = [resume.step for resume in log.resumes if odd.tokens >= resume.step * usual > 0]
    if resumed:
        sentence = (
            f"step {odd.step} counts {odd.tokens:,} tokens where a step has {usual:,}: those of the {resumed[-1]} "
            "steps before the resume are counted again"
        )
        return Finding("resumed_tokens_counted", sentence, 0.97, usual)
    sentence = f"step {odd.step} counts {odd.tokens:,} tokens, the others {usual:,}: batches of a run do not change"
    return Finding("steps_miscounted", sentence, 0.95, usual)


def check_wall(log: RunLog) -> list[Finding]:
    """Tokens and time of the steps against the clock of the whole run."""
    steps = own_steps(log)
    if log.wall is None or not steps:
        return []
    return [*check_wall_tokens(log, steps, log.wall), *check_time(log, steps)]


def check_wall_tokens(log: RunLog, steps: list[Step], wall: Wall) -> list[Finding]:
    """The tokens of a process are those of its steps. A step with tokens of its own is known by `count_tokens`."""
    counted = sum(step.tokens for step in steps)
    usual = Counter(step.tokens for step in steps).most_common(1)[0][0]
    stated = wall.training_tokens
    if stated < min(counted, usual * len(steps)):
        sentence = (
            f"the run claims {stated:,} tokens, its steps have {counted:,}: steps were added to the record, or the "
            "total is that of another run"
        )
        return [Finding("steps_miscounted", sentence, 0.95, f"{counted:,} tokens")]
    if stated <= counted:
        return []
    earlier = log.resumes[-1].step if log.resumes else 0
    why = (
        f"the {earlier} steps before the resume are counted over the time after it"
        if earlier
        else "no step accounts for the rest"
    )
    sentence = f"the run claims {stated:,} tokens, its steps have {counted:,}: {why}"
    value = f"{counted / wall.training_s:,.0f} tokens/s over the training time" if wall.training_s > 0 else None
    code = "resumed_tokens_counted" if earlier else "steps_miscounted"
    return [Finding(code, sentence, 0.97, value)]


def check_time(log: RunLog, steps: list[Step]) -> list[Finding]:
    """Steps and the phases between them must fill the training time: no more, and not much less.

    steps: of the run's last process, whose time this is; its phases are looked for here.
    """
    assert log.wall is not None
    training_s = log.wall.training_s
    stepping_s = sum(step.step_time_s for step in steps)
    first, last = steps[0].step, steps[-1].step
    phases = [phase for phase in own_phases(log) if phase.kind != "setup"]
    between_s = sum(phase.time_s for phase in phases if first < phase.after_step < last)
    all_phases_s = sum(phase.time_s for phase in phases)
    if stepping_s + between_s > training_s * 1.01 + OVERLAP_S:
        kinds = sorted({phase.kind for phase in phases if first < phase.after_step < last})
        sentence = (
            f"steps ({stepping_s:.4g} s) and the {', '.join(kinds) or 'time'} between them ({between_s:.4g} s) add up "
            f"to more than the {training_s:.4g} s of training: the steps' clock ran while other work was done"
        )
        return [Finding("time_contains_other_work", sentence, 0.93, f"{training_s - between_s:.5g} s in steps")]
    missing_s = training_s - stepping_s - all_phases_s
    if missing_s > UNACCOUNTED_SHARE * training_s and missing_s > UNACCOUNTED_S:
        sentence = (
            f"{missing_s:.4g} of {training_s:.4g} s of training are in no step and no phase: the clock of a step was "
            "read before the device had finished it, or work between the steps is hidden"
        )
        return [Finding("time_contains_other_work", sentence, 0.8, f"{training_s - all_phases_s:.5g} s in steps")]
    return []


def check_step_times(log: RunLog) -> list[Finding]:
    """Compilation, evaluation and checkpoints inside the steps that count."""
    measured = log.measured_steps()
    findings = check_series(
        [step.step_time_s for step in measured],
        [step.step for step in measured],
        events_without_phase(log),
        "an evaluation or checkpoint that the log does not time apart",
        warmed_up=any(step.phase != "measured" for step in own_steps(log)),
    )
    retries = sum(memory.allocator_retries or 0 for memory in log.memory)
    if retries and measured:
        sentence = (
            f"the allocator ran out of memory and emptied its cache {retries} times: steps in which it did so waited "
            "for it; a smaller micro-batch shows the speed without"
        )
        findings.append(Finding("time_contains_other_work", sentence, 0.5))
    return findings


def events_without_phase(log: RunLog) -> set[int]:
    """Steps at which other work was due that no phase accounts for; both neighbours, as logs number it either way."""
    timed: dict[str, set[int]] = {}
    for phase in log.phases:
        timed.setdefault(phase.kind, set()).add(phase.after_step)
    due = {"evaluation": {evaluation.step for evaluation in log.evaluations}, "checkpoint": set[int]()}
    intervals = {"evaluation": log.config.evaluation.interval, "checkpoint": log.config.checkpoint.interval}
    for kind, interval in intervals.items():
        if interval:
            due[kind] |= {step.step for step in log.steps if step.step > 0 and step.step % interval == 0}
    events = set()
    for kind, steps in due.items():
        for step in steps:
            near = {step - 1, step, step + 1}
            if not near & timed.get(kind, set()):
                events |= near
    return events


def check_ceiling(log: RunLog, count: Count | None, peak: Peak | None, ceilings: Ceilings | None) -> list[Finding]:
    """Executed FLOPs (causal, and what checkpointing repeats) against what the card can do at most."""
    measured = log.measured_steps()
    if not measured or peak is None or count is None:
        return []
    terms = flop_terms(log.config.model, log.config.seq_len)
    tokens = count.micro_steps_per_gpu * log.config.micro_batch_size * log.config.seq_len
    executed = executed_flops_per_token(terms, log.config, used_of(log, "weight_gradient"))
    tflop = tokens * executed / 1e12  # of one step on one device
    if peak.measured:
        assert ceilings is not None
        palm = tokens * flops_per_token(terms, "palm") / 1e12
        return check_measured_ceiling(log, tflop, palm, peak, ceilings)
    limit, of_what, confidence = ceiling_of(log, peak, ceilings)
    median_s = statistics.median(step.step_time_s for step in measured)
    fastest = min(measured, key=lambda step: step.step_time_s)
    if tflop > limit * median_s:
        what, rate = f"the median step of {median_s:.4g} s", tflop / max(median_s, 1e-9)
    elif tflop > FASTEST_MARGIN * limit * fastest.step_time_s:
        what, rate = f"step {fastest.step} of {fastest.step_time_s:.4g} s", tflop / max(fastest.step_time_s, 1e-9)
    else:
        return []
    sentence = (
        f"{what} means {rate:,.4g} TFLOP/s on each device, counting only what is executed; {of_what}. Its clock was "
        "read before the device had finished, or less was computed than the record says"
    )
    return [Finding("above_ceiling", sentence, confidence, f"at least {tflop / limit:.4g} s a step")]


def ceiling_of(log: RunLog, peak: Peak, ceilings: Ceilings | None) -> tuple[float, str, float]:
    """(TFLOP/s that no run exceeds, what it is, how sure): the measured matmul where there is one, or the datasheet."""
    fastest = None
    if (
        ceilings is not None
        and ceilings.device == "cuda"
        and {gpu.name for gpu in log.environment.gpus} == {ceilings.device_name}
    ):
        fastest = ceilings.fastest_matmul_tflops(peak.dtype)
    if fastest is not None and fastest * (1 + MEASURED_MARGIN) < peak.tflops * (1 + CEILING_MARGIN):
        limit = fastest * (1 + MEASURED_MARGIN)
        return (
            limit,
            f"the fastest matmul measured on it made {fastest:.4g} in {peak.dtype} (+{MEASURED_MARGIN:.0%})",
            0.97,
        )
    limit = peak.tflops * (1 + CEILING_MARGIN)
    return limit, f"the datasheet has {peak.tflops:g} in {peak.dtype} ({CEILING_MARGIN:.0%} more above its clock)", 0.98


def check_parameters(log: RunLog) -> list[Finding]:
    """Counted parameters and FLOP terms against the dimensions of the configuration."""
    findings = []
    counts = count_parameters(log.config.model)
    if log.parameters is not None and (log.parameters.total, log.parameters.matmul) != (counts.total, counts.matmul):
        if log.parameters.total != counts.total:
            what, stated, true = "parameters", log.parameters.total, counts.total
        else:
            what, stated, true = "parameters that multiply", log.parameters.matmul, counts.matmul
        sentence = (
            f"{stated:,} {what} were counted, the dimensions of {log.config.model.name} give {true:,}"
            + explain_parameters(stated - true, counts.total - counts.matmul, counts.lm_head)
        )
        findings.append(Finding("parameters_differ", sentence, 0.98, true))
    true_terms = flop_terms(log.config.model, log.config.seq_len)
    if log.flop_terms is not None and FlopTerms(**log.flop_terms.model_dump()) != true_terms:
        stated_terms, wanted = log.flop_terms.model_dump(), asdict(true_terms)
        wrong = [key for key in wanted if stated_terms[key] != wanted[key]]
        listed = ", ".join(f"{key} {stated_terms[key]:,} for {wanted[key]:,}" for key in wrong)
        sentence = f"the FLOP terms are not those of the model's dimensions ({listed}): every MFU from them is wrong"
        findings.append(Finding("parameters_differ", sentence, 0.98, f"{wrong[0]} = {wanted[wrong[0]]:,}"))
    return findings
