"""Audit of a run JSON, its clocks: what two records of one time say, and that a part is not longer than the whole."""

from __future__ import annotations

import math

from mfubench.audit.findings import Finding
from mfubench.run_log import RunLog
from mfubench.words import number_of

RANK_SPREAD = 1.15  # slowest rank's measured time over rank 0's: all wait for each other in each step
SAME = 1e-6  # relative; rank 0's times are the steps' own, to the last bit
CLOCK_SLACK_S = 1.0  # the start of a process is known to a second
READ_TOGETHER = 10  # steps at most that are read out at once: within them the host may run ahead of the device


def check_clocks(log: RunLog) -> list[Finding]:
    return [*check_rank_times(log), *check_own_times(log), *check_data_times(log), *check_total(log)]


def check_rank_times(log: RunLog) -> list[Finding]:
    """Each rank has a time of each step, and they agree."""
    measured = [position for position, step in enumerate(log.steps) if step.phase == "measured"]
    if not measured or len(log.rank_step_times_s) != log.config.world_size or log.status == "oom":
        return []
    for rank, times in enumerate(log.rank_step_times_s):
        if len(times) != len(log.steps):
            sentence = f"rank {rank} has times of {len(times)} steps, the run {len(log.steps)}: they are not one run's"
            return [Finding("ranks_disagree", sentence, 0.95, len(log.steps))]
    totals = [sum(times[position] for position in measured) for times in log.rank_step_times_s]
    stated = sum(log.steps[position].step_time_s for position in measured)
    if not totals or stated <= 0 or max(totals) <= RANK_SPREAD * stated:
        return []
    slowest = totals.index(max(totals))
    if slowest == 0:  # the same clock as the steps': `check_own_times` compares them step by step
        return []
    sentence = (
        f"rank {slowest} took {max(totals):.4g} s for the measured steps, the log's clock says {stated:.4g} s: ranks "
        "wait for each other, so the faster clock did not wait for the device"
    )
    return [Finding("ranks_disagree", sentence, 0.85, f"{max(totals) / len(measured):.4g} s a step")]


def check_own_times(log: RunLog) -> list[Finding]:
    """Times of the steps and of rank 0 are one clock, written down twice."""
    if not log.rank_step_times_s or len(log.rank_step_times_s[0]) != len(log.steps):
        return []
    pairs = list(zip(log.steps, log.rank_step_times_s[0], strict=True))
    other = [(step, time) for step, time in pairs if not math.isclose(step.step_time_s, time, rel_tol=SAME)]
    if not other:
        return []
    step, time = other[0]
    sentence = (
        f"step {step.step} took {step.step_time_s:.6g} s by the list of steps and {time:.6g} s by rank 0's own list, "
        f"which is the same clock, and {number_of(len(other), 'step')} of {len(pairs)} differ so: one of the two lists "
        "was changed"
    )
    return [Finding("times_contradict", sentence, 0.97)]


def check_data_times(log: RunLog) -> list[Finding]:
    """Waiting for data lies within the steps.

    A CPU's step by step. On CUDA the host waits while the device still computes what was launched before, but for no
    more steps than are read out together; so the waiting is held against the sum of these, and all of it against all.
    """
    reach = 1 if log.environment.device == "cpu" else READ_TOGETHER
    times_s = [step.step_time_s for step in log.steps]
    for position, step in enumerate(log.steps):
        around_s = sum(times_s[max(0, position + 1 - reach) : position + 1])
        if step.data_time_s > around_s * (1 + SAME) + SAME:
            within = "it took" if reach == 1 else f"it and the steps that it may overlap with took {around_s:.4g} s, it"
            sentence = (
                f"step {step.step} waited {step.data_time_s:.4g} s for data, and {within} {step.step_time_s:.4g} s: "
                "the waiting is part of the step"
            )
            return [Finding("times_contradict", sentence, 0.95)]
    waited_s = sum(step.data_time_s for step in log.steps)
    if waited_s > sum(times_s) * (1 + SAME) + SAME:
        sentence = (
            f"the steps waited {waited_s:.4g} s for data, and took {sum(times_s):.4g} s: the waiting is part of them"
        )
        return [Finding("times_contradict", sentence, 0.95)]
    return []


def check_total(log: RunLog) -> list[Finding]:
    """Training is part of the process's time."""
    wall = log.wall
    if wall is None or wall.total_s + CLOCK_SLACK_S >= wall.training_s:
        return []
    sentence = (
        f"{wall.training_s:.4g} s of training are claimed of a process that took {wall.total_s:.4g} s from its start "
        "to its end"
    )
    return [Finding("times_contradict", sentence, 0.97)]
