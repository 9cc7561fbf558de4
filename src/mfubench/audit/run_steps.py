"""Audit of a run JSON, which steps it has: numbers without gaps, and phases that follow from the configuration."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise

import numpy as np

from mfubench.audit.findings import Finding
from mfubench.audit.run_numbers import own_steps
from mfubench.run_log import RunLog, Step
from mfubench.words import number_of

SHORT_COMPILE = 1.5  # a step that compiled takes so many times the median at least, where nothing hides it
ROUNDING = 1e-9  # of sums that were added up in another order
FEW_COMPILES = 3  # later ones that none of them shows: one may hide behind work that the device has still to do


def check_steps(log: RunLog) -> list[Finding]:
    """As many steps as the configuration says, each once, in order; none left out, none called what it is not."""
    return check_numbers(log) or [*check_phases(log), *check_adaptive(log)]


def check_numbers(log: RunLog) -> list[Finding]:
    """A resume goes on from the history of its checkpoint, so that numbers have no gap; a run that continues another's
    checkpoint begins with its first resume.
    """
    numbers = [step.step for step in log.steps]
    repeated = [number for number, count in Counter(numbers).items() if count > 1]
    if repeated:
        tokens = log.config.tokens_per_step * len(set(numbers))
        code = "resumed_tokens_counted" if log.resumes else "steps_miscounted"
        sentence = f"step {repeated[0]} and {len(repeated) - 1} others are listed twice: their tokens count twice"
        return [Finding(code, sentence, 0.97, f"{tokens:,} tokens")]
    if numbers != sorted(numbers):
        sentence = "the steps are not in order: records of several processes were mixed"
        return [Finding("steps_miscounted", sentence, 0.95)]
    done = len(own_steps(log)) + (log.resumes[-1].step if log.resumes else 0)
    if done > log.config.max_iters and not log.config.evaluation.only:  # which does no step of those it tells of
        sentence = f"{done} steps were done where max_iters is {log.config.max_iters}: more work than the run claims"
        return [Finding("steps_miscounted", sentence, 0.95, log.config.max_iters)]
    return check_missing(log, numbers)


def check_missing(log: RunLog, numbers: list[int]) -> list[Finding]:
    """Steps that must have been done and are not listed: at the beginning, in the middle, at the end."""
    if not numbers:
        return []
    first = log.resumes[0].step if log.resumes and numbers[0] >= log.resumes[0].step else 0
    missing = [number for before, after in pairwise([first - 1, *numbers]) for number in range(before + 1, after)]
    if missing:
        sentence = (
            f"step {missing[0]} and {len(missing) - 1} others are not listed, though later ones are: steps were left "
            "out of the record, and the rate is that of the others"
        )
        return [Finding("steps_miscounted", sentence, 0.95, f"{len(numbers) + len(missing)} steps")]
    done, wanted = numbers[-1] + 1, log.config.max_iters
    if log.status == "ok" and done < wanted and not (ended_early(log) or log.config.evaluation.only):
        sentence = (
            f"the run calls itself ok and ends after {number_of(done, 'step')} of {wanted}, without a reason: the "
            "others were left out of the record, or never done"
        )
        return [Finding("steps_miscounted", sentence, 0.95, f"{wanted} steps")]
    return []


def ended_early(log: RunLog) -> bool:
    """Whether the run stopped by itself, its median being known well enough."""
    return log.config.measurement.adaptive and log.stopped_early is not None


def processes(log: RunLog) -> list[list[Step]]:
    """The steps of each process that took part, in order; numbers are known to have no gaps."""
    if not log.steps:
        return []
    starts = sorted({log.steps[0].step} | {resume.step for resume in log.resumes})
    ends = [*starts[1:], None]
    parts = [
        [step for step in log.steps if start <= step.step and (end is None or step.step < end)]
        for start, end in zip(starts, ends, strict=True)
    ]
    return [part for part in parts if part]


def check_phases(log: RunLog) -> list[Finding]:
    """What each step counts as: in each process the first one and `warmup_steps` after it are warm-up, the others are
    measured, and one that compiled is neither.
    """
    warmup = log.config.measurement.warmup_steps
    taken_out, too_early = called_warm_up(log), called_measured(log)
    findings = []
    if taken_out:
        sentence = (
            f"step {taken_out[0].step} and {len(taken_out) - 1} others are called warm-up, though warmup_steps "
            f"{warmup} was over: steps that count were taken out of the result"
        )
        findings.append(Finding("steps_miscounted", sentence, 0.95, with_them(log, taken_out)))
    if too_early:
        sentence = (
            f"step {too_early[0].step} and {len(too_early) - 1} others are called measured, though the first step of a "
            f"process and warmup_steps {warmup} after it are not: warm-up is part of the result"
        )
        findings.append(Finding("warm_up_included", sentence, 0.95))
    return findings + check_compiled(log)


def called_warm_up(log: RunLog) -> list[Step]:
    """Steps that are called warm-up, and cannot be.

    Two things make warm-up of steps that were measured, both only of those before the first that still is: adaptive
    length, which finds it in the step times, and a resume that computes in another way, of all that was done before.
    The configuration is that of the last process: an earlier one may have had other `warmup_steps`.
    """
    warmup = log.config.measurement.warmup_steps
    wrong: list[Step] = []
    any_measured = False
    for steps in processes(log):
        measured = False
        for position, step in enumerate(steps):
            measured |= step.phase == "measured"
            may_be_found = ended_early(log) and not any_measured
            wrongly = position > warmup and not may_be_found if is_last(log, steps) else measured
            if step.phase == "warmup" and wrongly:
                wrong.append(step)
            any_measured |= measured
    return wrong


def called_measured(log: RunLog) -> list[Step]:
    """Steps that are called measured, and are warm-up; the first step of a process always is."""
    warmup = log.config.measurement.warmup_steps
    firsts = [step for steps in processes(log) for step in steps[: 1 + (warmup if is_last(log, steps) else 0)]]
    return [step for step in firsts if step.phase == "measured"]


def is_last(log: RunLog, steps: list[Step]) -> bool:
    """Whether these are steps of the last process, whose configuration is known."""
    return not log.resumes or steps[-1].step >= log.resumes[-1].step


def with_them(log: RunLog, steps: list[Step]) -> str:
    """The median time of the measured steps and of those that were taken out."""
    return f"{statistics.median(step.step_time_s for step in (*log.measured_steps(), *steps)):.5g} s a step with them"


def check_compiled(log: RunLog) -> list[Finding]:
    """Steps after the warm-up that are said to have compiled, and took no longer than others."""
    warmup = log.config.measurement.warmup_steps
    measured = log.measured_steps()
    late = [step for steps in processes(log) for step in steps[warmup + 1 :] if step.phase == "compile"]
    if len(late) < FEW_COMPILES or not measured:
        return []
    median_s = statistics.median(step.step_time_s for step in measured)
    if max(step.step_time_s for step in late) > SHORT_COMPILE * median_s:
        return []
    sentence = (
        f"{len(late)} steps after the warm-up, such as {late[0].step} with {late[0].step_time_s:.4g} s, are said to "
        f"have compiled, and none took much longer than the median of {median_s:.4g} s: steps that count were taken "
        "out of the result"
    )
    return [Finding("steps_miscounted", sentence, 0.6, with_them(log, late))]


def check_adaptive(log: RunLog) -> list[Finding]:
    """Of a run that stopped by itself: the warm-up that it found and the median that it stopped at, recomputed."""
    measured_s = [step.step_time_s for step in log.measured_steps()]
    if not ended_early(log) or not measured_s:
        return []
    assert log.stopped_early is not None
    known = f"after {len(measured_s)} measured steps the median step time {statistics.median(measured_s):.6f} s "
    if not log.stopped_early.startswith(known):
        sentence = (
            f"the run says that it stopped “{log.stopped_early}”, and has "
            f"{number_of(len(measured_s), 'measured step')} with a median of {statistics.median(measured_s):.6f} s: "
            "they are not the ones that it stopped at"
        )
        return [Finding("steps_miscounted", sentence, 0.93)]
    if log.resumes:  # which steps it looked at is not known: a resume may have made warm-up of earlier ones
        return []
    after_warmup = log.steps[log.config.measurement.warmup_steps + 1 :]
    settled = [step for step in after_warmup if step.phase != "compile"]
    stated = len(settled) - len(measured_s)
    errors = truncation_errors(np.asarray([step.step_time_s for step in settled]))
    found = int(np.argmin(errors))
    if stated < len(errors) and errors[stated] <= errors[found] * (1 + ROUNDING):
        return []
    sentence = (
        f"{number_of(stated, 'step')} after warmup_steps are called warm-up that was found in the step times, where "
        f"they show {found}: which steps count was chosen in another way"
    )
    return [Finding("steps_miscounted", sentence, 0.9)]


def truncation_errors(times_s: np.ndarray) -> list[float]:
    """Squared standard error of the mean by the number of steps left out at the start, at most half: where it is
    smallest the warm-up ends (MSER, as the engine has it; recomputed here on its own).
    """
    most = len(times_s) // 2 if len(times_s) >= 4 else 0
    return [float(times_s[start:].var()) / (len(times_s) - start) for start in range(most + 1)]
