"""Expected against measured, statement by statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mfubench.analysis.contradictions import widened
from mfubench.analysis.effects import Effect, why_missing
from mfubench.analysis.expectations import (
    QUANTITIES,
    Expectation,
    Expectations,
    ExpectedMachine,
    Quantity,
    judged_change,
)
from mfubench.analysis.measures import Measures, final_loss
from mfubench.analysis.study import Study
from mfubench.analysis.units import GB_PER_GIB
from mfubench.config import ConfigError
from mfubench.hardware import find_gpu
from mfubench.run_log import RunLog

PARAMETER_TOLERANCE = 0.005  # "~1.545B"

Verdict = Literal["as expected", "below", "above", "not comparable", "not measured"]


@dataclass(frozen=True)
class Comparison:
    """One quantity of one statement beside what was measured, in the statement's unit."""

    case: str
    quantity: Quantity
    expected: tuple[float, float]
    expected_on: str
    measured: float | None
    same_machine: bool  # same card and number of GPUs
    verdict: Verdict
    rank: str
    source: str
    note: str | None  # the document's, or why nothing can be compared


def compare_expectations(study: Study, measures: dict[str, Measures], expectations: Expectations) -> list[Comparison]:
    """Every statement about a case of this study, in the order of the study's cases, the testing guide's first."""
    cases = [*study.runs, *study.declared.skipped, *study.failures, *study.missing()]
    return [
        compare(study, measures.get(case), case, expectations.machines[item.machine], item, quantity)
        for case in dict.fromkeys(cases)
        for item in expectations.of_case(case)
        for quantity in QUANTITIES
        if getattr(item, quantity) is not None
    ]


def compare(
    study: Study,
    judged: Measures | None,
    case: str,
    machine: ExpectedMachine,
    item: Expectation,
    quantity: Quantity,
) -> Comparison:
    expected = getattr(item, quantity)
    same = judged is not None and is_same_machine(judged, machine)
    measured = measured_quantity(judged, item, quantity) if judged is not None else None
    note = item.note
    if judged is None or judged.log.status != "ok":
        verdict: Verdict = "not measured"
        note = why_missing(study, case)
    elif measured is None:
        verdict = "not measured"
        note = missing_quantity(judged, item, quantity) or item.note
    elif not same and quantity in ("tokens_per_s", "hours", "memory_gb"):
        verdict = "not comparable"
    else:
        verdict = judge(measured, expected, quantity)
    expected_on = f"{machine.world_size}× {machine.card}"
    return Comparison(case, quantity, expected, expected_on, measured, same, verdict, item.rank, item.source, note)


def judge(measured: float, expected: tuple[float, float], quantity: Quantity) -> Verdict:
    low, high = widened(expected)
    if quantity == "parameters":
        low, high = expected[0] * (1 - PARAMETER_TOLERANCE), expected[1] * (1 + PARAMETER_TOLERANCE)
    if measured < low:
        return "below"
    return "above" if measured > high else "as expected"


def measured_quantity(judged: Measures, item: Expectation, quantity: Quantity) -> float | None:
    """What the run has to say on a quantity, in the expectation's unit; None where it says nothing."""
    if quantity == "mfu":
        return judged.headline_mfu
    if quantity == "tokens_per_s":
        return judged.tokens_per_s
    if quantity == "memory_gb":
        return judged.peak_allocated_gib * GB_PER_GIB if judged.peak_allocated_gib is not None else None
    if quantity == "loss":
        return loss_after(judged.log, item.iterations) if item.iterations is not None else None
    if quantity == "parameters":
        return float(judged.log.parameters.total) if judged.log.parameters else None
    if item.tokens is not None and judged.tokens_per_s is not None:
        return item.tokens / judged.tokens_per_s / 3600
    if item.iterations is not None and judged.step_time_s is not None:
        return item.iterations * judged.step_time_s.median / 3600
    return None


def loss_after(log: RunLog, iterations: int) -> float | None:
    """The training loss that a run had reached after so many steps; None of one that made fewer."""
    steps = [step for step in log.steps if step.step < iterations]
    return final_loss(steps) if steps and steps[-1].step == iterations - 1 else None


def missing_quantity(judged: Measures, item: Expectation, quantity: Quantity) -> str | None:
    if quantity == "loss" and item.iterations:
        return f"stated after {item.iterations} iterations; this run made {len(judged.log.steps)}"
    if quantity == "mfu":
        return judged.peak_problem
    if quantity == "memory_gb":
        return "a CPU has no allocator's peak"
    return None


def is_same_machine(judged: Measures, machine: ExpectedMachine) -> bool:
    gpus = judged.log.environment.gpus
    if not gpus or judged.log.config.world_size != machine.world_size:
        return False
    try:
        return {find_gpu(gpu.name).key for gpu in gpus} == {find_gpu(machine.card).key}
    except ConfigError:
        return False


def judge_effect_size(effect: Effect, expected: tuple[float, float]) -> Verdict:
    """Whether the interval of a measured effect meets the expected range."""
    if effect.difference is None:
        return "not measured"
    low, high = judged_change(expected)
    if effect.difference.interval.high < low:
        return "below"
    return "above" if effect.difference.interval.low > high else "as expected"
