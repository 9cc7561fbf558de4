"""Step times that hold something else than a step: compilation, evaluation, checkpoints. Shared by all sources."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from mfubench.audit.findings import Finding

EVENT_FACTOR = 2.0  # a step at an evaluation or checkpoint takes so many times the median
WARM_UP_FACTOR = 3.0  # the first steps, and...
WARM_UP_LEAD = 1.5  # ...they take so many times the slowest of the others: on a busy machine any step may be slow
STALL_FACTOR = 10.0  # anywhere, and...
STALL_S = 5.0  # ...so many seconds more than the median: a recompilation, not a hiccup
FIRST = 2  # steps that can be warm-up


def check_series(
    times_s: Sequence[float],
    numbers: Sequence[int],
    events: Collection[int],
    event_name: str,
    warmed_up: bool = False,
) -> list[Finding]:
    """Judge the times of the steps that count.

    numbers: their step numbers; events: steps with work beside training; warmed_up: other steps came before them and
    do not count, so that a slow first one is no warm-up.
    """
    if len(times_s) < 5:
        return []
    median = statistics.median(times_s)
    findings = []
    first = [] if warmed_up else leading_slow(times_s, median)
    if first:
        true = statistics.mean([time for i, time in enumerate(times_s) if i not in first])
        sentence = (
            f"step {numbers[first[0]]} counts and took {times_s[first[0]]:.4g} s where the median is {median:.4g} s: "
            "compilation or warm-up is part of the result"
        )
        findings.append(Finding("warm_up_included", sentence, 0.95, f"{true:.5g} s a step without it"))
    later = [i for i in range(len(times_s)) if i not in first]
    at_events = [i for i in later if numbers[i] in events and times_s[i] > EVENT_FACTOR * median]
    if at_events:
        worst = max(at_events, key=lambda i: times_s[i])
        sentence = (
            f"{len(at_events)} of the steps that count, such as {numbers[worst]} with {times_s[worst]:.4g} s where the "
            f"median is {median:.4g} s, lie at {event_name}: its time is counted as training"
        )
        findings.append(Finding("time_contains_other_work", sentence, 0.92, f"{median:.5g} s a step without it"))
    stalls = [
        i for i in later if i not in at_events and times_s[i] > STALL_FACTOR * median and times_s[i] > median + STALL_S
    ]
    if stalls:
        sentence = (
            f"step {numbers[stalls[0]]} took {times_s[stalls[0]]:.4g} s where the median is {median:.4g} s: a "
            "recompilation, an allocator that gave up its cache, or another process, inside the measurement"
        )
        findings.append(Finding("time_contains_other_work", sentence, 0.75, f"{median:.5g} s a step without it"))
    return findings


def leading_slow(times_s: Sequence[float], median: float) -> list[int]:
    """Positions of the first steps that are slow as only the beginning is."""
    threshold = max(WARM_UP_FACTOR * median, WARM_UP_LEAD * max(times_s[FIRST:]))
    slow = []
    for position in range(FIRST):
        if times_s[position] <= threshold:
            break
        slow.append(position)
    return slow
