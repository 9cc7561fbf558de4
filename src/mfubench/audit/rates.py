"""Peaks, MFU and FLOPs of a report against each other and against the card: each figure recomputed from the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mfubench.audit.counting import near
from mfubench.audit.findings import Finding, sentence_of
from mfubench.audit.reported import ReportedRun
from mfubench.flops import CONVENTIONS, FlopTerms, count_parameters, flops_per_token
from mfubench.hardware import NoPeak, Peak, find_gpu, load_hardware, peak_for

PEAK_TOLERANCE = 0.025  # reports round peaks: 155 for 154.8, 990 for 989.4, 366 for 362
FLOPS_TOLERANCE = 0.002  # FLOPs a token are stated to three digits at least
# Cards boost above the clock that their peak assumes: an H100 to 1,980 MHz from 1,830, 8 %.
CEILING_MARGIN = 0.10
EXPLAINS_MFU = {"peak_is_sparse", "peak_is_wrong", "ranks_counted_twice", "above_ceiling"}  # why one is above 100 %


def known_peak(run: ReportedRun) -> tuple[Peak | None, list[Finding]]:
    """The dense peak of the run's card, or why there is none."""
    if run.gpu_name is None:
        return None, []
    try:
        return peak_for(run.gpu_name, run.dtype, run.tf32, run.precision.lower() == "fp8"), []
    except NoPeak as error:
        return None, [Finding("peak_unknown", sentence_of(error), 0.99)]


def check_peak(run: ReportedRun, peak: Peak) -> list[Finding]:
    """The stated peak, of one card or of all of them, against the dense one."""
    stated = run.hardware_peak_tflops
    if stated is None:
        return []
    cards = run.num_gpus
    if is_peak(stated, peak.tflops * cards) or is_peak(stated, peak.tflops):
        return []
    of = f"{cards} x " if cards > 1 else ""
    for divisor in dict.fromkeys((cards, 1)):
        if is_peak(stated / divisor, 2 * peak.tflops):
            sentence = (
                f"the stated peak {stated:g} TFLOP/s is {of if divisor > 1 else ''}{stated / divisor:g}, the rate with "
                f"2:4 sparsity; training is dense: {peak.tflops:g} a card, so the stated MFU is half of the true one"
            )
            return [Finding("peak_is_sparse", sentence, 0.97, peak.tflops * cards)]
    name = name_of_peak(stated / cards, run) or name_of_peak(stated, run)
    is_what = f", which is {name}" if name else ""
    sentence = (
        f"the stated peak {stated:g} TFLOP/s{is_what} is not that of {of}{run.gpu_name} in {peak.dtype}: "
        f"{peak.tflops:g} a card, dense"
    )
    return [Finding("peak_is_wrong", sentence, 0.95, peak.tflops * cards)]


def is_peak(stated: float, expected: float) -> bool:
    return abs(stated / expected - 1) <= PEAK_TOLERANCE


def name_of_peak(tflops: float, run: ReportedRun) -> str | None:
    """What a wrong peak is: another arithmetic of the same card, or another card's bf16 rate."""
    own = own_rate(tflops, run)
    if own:
        return own
    for row in load_hardware():
        if row.dense_tflops.bf16 and is_peak(tflops, row.dense_tflops.bf16):
            return f"the rate of {row.names[0]}"
    return None


def own_rate(tflops: float, run: ReportedRun) -> str | None:
    """The arithmetic of the run's own card that has this rate."""
    assert run.gpu_name is not None
    for arithmetic, rate in find_gpu(run.gpu_name).dense_tflops.model_dump().items():
        if rate and is_peak(tflops, rate):
            return f"the card's {arithmetic} rate"
    return None


def check_mfu(run: ReportedRun, peak: Peak | None, rate: float | None, terms: FlopTerms | None) -> list[Finding]:
    """MFU x peak = achieved = tokens/s x FLOPs a token, as far as they are stated. rate: tokens/s as stated."""
    if run.mfu_percent is None:
        return []
    mfu = run.mfu_percent / 100
    if run.flops_per_token is None and terms is None and run.achieved_tflops is None:
        if run.architecture is not None:
            lacking = f"with the model ({run.architecture.name}), but without seq_len, which its attention depends on"
        else:
            lacking = "without FLOPs a token, their convention or the model"
        sentence = f"an MFU is stated {lacking}: it can be compared with nothing"
        return [Finding("flops_convention_unstated", sentence, 0.9)]
    if run.hardware_peak_tflops is not None:
        return check_mfu_of_stated_peak(run, peak, mfu, rate, terms)
    if peak is None or rate is None:
        return []
    return check_implied_peak(run, peak, mfu, rate, terms)


def check_mfu_of_stated_peak(
    run: ReportedRun, peak: Peak | None, mfu: float, rate: float | None, terms: FlopTerms | None
) -> list[Finding]:
    """With a stated peak the three figures must close by themselves, right or wrong as the peak may be.

    The peak may be that of all cards or of one; so may the achieved FLOP/s, where they are stated.
    """
    assert run.hardware_peak_tflops is not None
    if run.achieved_tflops is not None:
        candidates = [run.achieved_tflops]
    elif rate is not None:
        candidates = [rate * flops / 1e12 for flops in flops_candidates(run, terms).values()]
    else:
        return []
    counts = tuple(dict.fromkeys((1, run.num_gpus)))  # how often the stated peak is taken
    if any(near(mfu * run.hardware_peak_tflops * count, one) for count in counts for one in candidates):
        return []
    achieved = candidates[0]
    count = times_taken(run, peak, mfu, achieved, counts)
    total = run.hardware_peak_tflops * count
    sentence = (
        f"MFU {run.mfu_percent:g} % of {f'{count} x ' if count > 1 else ''}{run.hardware_peak_tflops:g} TFLOP/s is "
        f"{mfu * total:.4g} TFLOP/s, but the run's other figures give {achieved:.4g}: the MFU was divided by another "
        f"peak, {achieved / mfu:.4g} TFLOP/s"
    )
    return [Finding("peak_is_wrong", sentence, 0.9, 100 * achieved / total)]


def times_taken(run: ReportedRun, peak: Peak | None, mfu: float, achieved_tflops: float, counts: Sequence[int]) -> int:
    """How many stated peaks the achieved FLOP/s are to be divided by: as many as make the peak of all cards.

    Where the card does not tell, or the achieved FLOP/s are stated and may be one card's: what is nearest to the MFU.
    """
    assert run.hardware_peak_tflops is not None
    stated = run.hardware_peak_tflops
    if peak is not None and run.achieved_tflops is None:
        fitting = [count for count in counts if is_peak(stated * count, peak.tflops * run.num_gpus)]
        counts = fitting or counts
    return min(counts, key=lambda count: abs(math.log(mfu * stated * count / achieved_tflops)))


def check_implied_peak(run: ReportedRun, peak: Peak, mfu: float, rate: float, terms: FlopTerms | None) -> list[Finding]:
    """Without a stated peak, MFU and tokens/s imply one."""
    candidates = flops_candidates(run, terms)
    for convention, flops in candidates.items():
        if near(rate * flops / 1e12 / mfu, peak.tflops * run.num_gpus):
            if convention in ("stated", "palm") or convention == run.flops_convention:
                return []
            sentence = f"the stated MFU {run.mfu_percent:g} % is right only by the convention {convention!r}, unnamed"
            value = 100 * rate * candidates["palm"] / 1e12 / (peak.tflops * run.num_gpus)
            return [Finding("flops_convention_unstated", sentence, 0.85, f"{value:.3g} % (palm)")]
    flops = next(iter(candidates.values()))
    implied = rate * flops / 1e12 / mfu / run.num_gpus
    true_percent = 100 * rate * flops / 1e12 / (peak.tflops * run.num_gpus)
    shown = f"{rate:,.0f} tokens/s at an MFU of {run.mfu_percent:g} % imply a peak of {implied:.4g} TFLOP/s a card"
    if is_peak(implied, 2 * peak.tflops):
        return [Finding("peak_is_sparse", f"{shown}, the rate with 2:4 sparsity", 0.9, f"{true_percent:.3g} %")]
    name = own_rate(implied, run)
    sentence = (
        f"{shown}{f', {name}' if name else ''}; dense {peak.dtype} is {peak.tflops:g}, and the MFU {true_percent:.3g} %"
    )
    return [Finding("peak_is_wrong", sentence, 0.85, f"{true_percent:.3g} %")]


def flops_candidates(run: ReportedRun, terms: FlopTerms | None) -> dict[str, float]:
    """FLOPs a token by name: as stated, then by each convention."""
    candidates: dict[str, float] = {"stated": run.flops_per_token} if run.flops_per_token else {}
    if terms is not None:
        candidates.update({convention: flops_per_token(terms, convention) for convention in CONVENTIONS})
    return candidates


def check_flops(run: ReportedRun, terms: FlopTerms | None) -> list[Finding]:
    """Stated FLOPs a token must be those of a convention, and of the one that is named."""
    stated = run.flops_per_token
    if stated is None or terms is None:
        return []
    known = {convention: flops_per_token(terms, convention) for convention in CONVENTIONS}
    fitting = [convention for convention, flops in known.items() if abs(stated / flops - 1) <= FLOPS_TOLERANCE]
    if fitting and run.flops_convention in (None, *fitting):
        return []
    listed = ", ".join(f"{convention} {flops / 1e9:.4g}" for convention, flops in known.items())
    what = f"that is {fitting[0]}, not {run.flops_convention}" if fitting else "no convention gives that for this model"
    sentence = f"{stated / 1e9:.4g} GFLOPs a token are stated, and {what} ({listed})"
    return [Finding("flops_convention_unstated", sentence, 0.9, known["palm"])]


def check_parameters(run: ReportedRun) -> list[Finding]:
    """The stated number of parameters against complete dimensions."""
    if run.architecture is None or run.parameters is None:
        return []
    counts = count_parameters(run.architecture)
    if abs(run.parameters / counts.total - 1) <= 0.005:  # a rounded "1.36B" is another matter than a wrong model
        return []
    sentence = (
        f"{run.parameters:,} parameters are stated, the dimensions of {run.architecture.name} give {counts.total:,}"
        + explain_parameters(run.parameters - counts.total, counts.total - counts.matmul, counts.lm_head)
    )
    return [Finding("parameters_differ", sentence, 0.9, counts.total)]


def explain_parameters(difference: int, not_matmul: int, lm_head: int) -> str:
    """Why a count of parameters may be off, where the difference is one of the known ones."""
    if abs(difference) == lm_head:
        return ": the embedding (or the head tied to it) was counted " + ("twice" if difference > 0 else "too seldom")
    if difference == -not_matmul:
        return ": embeddings and norms were left out"
    return ""


def check_ceiling(
    tokens_per_s_per_gpu: float, run: ReportedRun, peak: Peak, terms: FlopTerms | None, what: str
) -> list[Finding]:
    """Executed FLOPs against the datasheet's peak, by the surest count of them that is above it."""
    limit = peak.tflops * (1 + CEILING_MARGIN)
    above = [count for count in executed_counts(run, terms) if tokens_per_s_per_gpu * count.flops / 1e12 > limit]
    if not above:
        return []
    surest = max(above, key=lambda count: count.confidence)
    sentence = (
        f"{what} means {tokens_per_s_per_gpu * surest.flops / 1e12:,.0f} TFLOP/s on each card, counting {surest.what}; "
        f"{run.gpu_name} has {peak.tflops:g} in {peak.dtype} ({CEILING_MARGIN:.0%} more where it boosts above its "
        "stated clock)"
    )
    value = f"at most {limit / surest.flops * 1e12 * run.num_gpus:,.0f} tokens/s"
    return [Finding("above_ceiling", sentence, surest.confidence, value)]


@dataclass(frozen=True)
class Executed:
    """FLOPs that a token takes at least, and how sure that is."""

    flops: float
    what: str
    confidence: float


def executed_counts(run: ReportedRun, terms: FlopTerms | None) -> list[Executed]:
    """What is known of the FLOPs that a token executes, by the figures there are.

    Without dimensions it is not known how many of N parameters are looked up instead of multiplied. At most half of
    them are: an embedding that is not its own output head has a head of the same size, which multiplies.
    """
    causal = "only what causal kernels execute"
    if run.architecture is not None:
        if terms is not None:
            return [Executed(flops_per_token(terms, "causal"), causal, 0.98)]
        flops = 6.0 * count_parameters(run.architecture).matmul
        return [Executed(flops, "no attention, as the length is not stated", 0.98)]
    counts = []
    if terms is not None:
        counts.append(Executed(flops_per_token(terms, "causal"), causal, 0.9))
    elif run.flops_per_token is not None:
        counts.append(Executed(run.flops_per_token, "the FLOPs a token as stated", 0.8))
    if run.parameters is not None:
        counts.append(Executed(6.0 * run.parameters, "6 FLOPs a parameter, embeddings too", 0.7))
        least = "only 6 FLOPs for half of the parameters (the other half is the largest embedding there can be)"
        counts.append(Executed(3.0 * run.parameters, least, 0.97))
    return counts


def check_mfu_possible(run: ReportedRun, terms: FlopTerms | None, findings: Sequence[Finding]) -> list[Finding]:
    """An MFU above 100 %, where no other finding has explained it yet."""
    if run.mfu_percent is None or run.mfu_percent <= 100 or {finding.code for finding in findings} & EXPLAINS_MFU:
        return []
    executed = run.mfu_percent / 100
    if terms is not None:
        executed *= flops_per_token(terms, "causal") / flops_per_token(terms, run.flops_convention or "palm")
    impossible = executed > 1 + CEILING_MARGIN
    sentence = f"an MFU of {run.mfu_percent:g} % is stated: more FLOP/s than the hardware has, by any convention"
    if not impossible:
        sentence += "; only a clock above the datasheet's, or full attention over long sequences, explains it"
    confidence = (0.97 if terms is not None else 0.92) if impossible else 0.6
    return [Finding("above_ceiling", sentence, confidence, "below 100 %")]
