"""How many micro-batches a stated rate really counts: the arithmetic that unmasks per-rank and per-micro-step rates."""

from __future__ import annotations

from dataclasses import dataclass

from mfubench.audit.findings import Finding
from mfubench.words import number_of, plural

TOLERANCE = 0.015  # stated rates and times are rounded; a miscount is off by a whole factor
WHOLE = 0.1  # micro-steps that a count may lie beside a whole one: of large counts any is near one by TOLERANCE
CLOSE = 0.2  # a mean rate over pauses beside a median step time lies within this of what it should be


@dataclass(frozen=True)
class Count:
    """A stated rate, understood."""

    micro_steps_per_gpu: float
    factor: float  # true rate over all GPUs = factor x stated rate
    findings: tuple[Finding, ...] = ()
    one_rank: bool = False  # the reading that tokens/s are one rank's is what explains the numbers


def near(value: float, expected: float) -> bool:
    return expected > 0 and abs(value / expected - 1) <= TOLERANCE


def is_whole(value: float) -> bool:
    return round(value) >= 1 and near(value, round(value)) and abs(value - round(value)) <= WHOLE


def count_micro_batches(
    counted: float,
    world_size: int,
    accumulation: int | None,
    *,
    others_are_one_rank: bool = False,
    unit: str = "GPU",
) -> Count:
    """Read `counted` = stated tokens/s x step time / tokens per micro-batch, the micro-batches behind a stated rate.

    accumulation: micro-steps per GPU and step that the source claims; None where it claims none.
    others_are_one_rank: another run of the same system proved that it logs one rank's rate; used where this run's own
    numbers fit no reading of the claim. unit: what a rank runs on, in words.
    """
    W, A = world_size, accumulation
    shown = f"tokens/s x step time is {counted:.4g} micro-batches"
    if A is None:
        return count_without_claim(counted, W, others_are_one_rank, shown)
    if near(counted, A * W):
        return Count(A, 1.0)
    if near(counted, A):
        also = " (or leaves out the accumulation: the two factors are the same here)" if A == W else ""
        why = f"{shown}, one {unit}'s {number_of(A, 'micro-step')} instead of {W} x {A}{also}"
        return Count(A, W, (one_rank(W, why, 0.98),), True)
    if near(counted, W):
        sentence = f"{shown}, one for each {unit}, but a step accumulates {A} of them: the rate is {A} times too low"
        return Count(A, A, (Finding("tokens_per_s_excludes_accumulation", sentence, 0.98, f"x {A}"),))
    if near(counted, 1):
        why = f"{shown}: one micro-batch of one {unit}, while a step is {W} {plural(unit)} x {A} micro-steps"
        sentence = f"{why}; the rate leaves out the accumulation"
        return Count(
            A,
            A * W,
            (one_rank(W, why, 0.95), Finding("tokens_per_s_excludes_accumulation", sentence, 0.95, f"x {A}")),
            True,
        )
    if W > 1 and near(counted, A * W * W):
        sentence = f"{shown}, {W} times the {W} x {A} of a step: a rate over all was multiplied by {W} once more"
        return Count(A, 1 / W, (Finding("ranks_counted_twice", sentence, 0.97, f"x 1/{W}"),))
    return count_against_claim(counted, W, A, others_are_one_rank, shown, unit)


def one_rank(world_size: int, why: str, confidence: float) -> Finding:
    sentence = f"{why}: the stated tokens/s are one rank's, the run made {world_size} times as many"
    return Finding("tokens_per_s_is_one_rank", sentence, confidence, f"x {world_size}")


def count_without_claim(counted: float, world_size: int, others_are_one_rank: bool, shown: str) -> Count:
    """Only that every GPU does one micro-batch at least, and whole ones, can be held against the rate."""
    if world_size > 1 and (counted < world_size * (1 - TOLERANCE) or others_are_one_rank):
        confidence = 0.9 if others_are_one_rank else 0.95
        why = f"{shown}, and {world_size} GPUs do {world_size} at least" if not others_are_one_rank else shown
        return Count(counted, world_size, (one_rank(world_size, why, confidence),), True)
    if world_size > 1 and is_whole(counted) and not is_whole(counted / world_size):
        why = f"{shown}, a whole number that is no multiple of {world_size} GPUs"
        return Count(counted, world_size, (one_rank(world_size, why, 0.7),), True)
    return Count(counted / world_size, 1.0)


def count_against_claim(
    counted: float, world_size: int, accumulation: int, others_are_one_rank: bool, shown: str, unit: str
) -> Count:
    """The claimed accumulation fits no reading: say what was really done, as one rank's rate or as everyone's, where
    that is a whole number of micro-steps; else that rate and step time are not of the same steps."""
    W, A = world_size, accumulation
    not_everyones = not is_whole(counted / W) and is_whole(counted) and abs(counted / W / A - 1) > CLOSE
    rank_reading = W > 1 and (others_are_one_rank or counted < W * (1 - TOLERANCE) or not_everyones)
    per_gpu = counted if rank_reading else counted / W
    findings = []
    if rank_reading:
        reason = " (another run of the same system shows that it logs one rank's)" if others_are_one_rank else ""
        findings.append(one_rank(W, f"{shown}{reason}", 0.93 if others_are_one_rank else 0.7))
    # of many micro-steps any number lies near a whole one
    may_be_pauses = abs(per_gpu / A - 1) <= CLOSE and A * TOLERANCE > WHOLE
    if is_whole(per_gpu) and not may_be_pauses:
        spread = f" over all {W} (or, were the rate one rank's, {counted:.4g} on each)"
        sentence = (
            f"{number_of(A, 'micro-step')} per {unit} {'is' if A == 1 else 'are'} claimed, but "
            f"{shown}{'' if rank_reading or W == 1 else spread}: {per_gpu:.4g} per {unit} were done. "
            f"With {A}, the step would have computed {A / per_gpu:.3g} times as much in its time"
        )
        findings.append(Finding("accumulation_differs_from_banner", sentence, 0.97, round(per_gpu, 3)))
    else:
        claimed = A if rank_reading else f"{W} x {A}"
        sentence = f"{shown}, {rate_differs(per_gpu / A, f'the {claimed} of a step')}"
        per_gpu = A
        findings.append(Finding("rate_differs_from_step_time", sentence, 0.7))
    return Count(per_gpu, W if rank_reading else 1.0, tuple(findings), rank_reading)


def rate_differs(ratio: float, whose: str) -> str:
    """ratio: tokens/s x step time over the tokens of a step; whose: what says how many these are."""
    return (
        f"{abs(ratio - 1):.1%} {'less' if ratio < 1 else 'more'} than {whose}: rate and step time are not of the same "
        "steps (a mean over pauses beside a median without them), or one of the figures is wrong"
    )
