"""Expectations against themselves: what each figure implies, and where documents deny themselves or one another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from mfubench.analysis.expectations import EFFECT_TOLERANCE, Expectation, Expectations, ExpectedEffect, Quantity
from mfubench.analysis.units import format_quantity, format_range, format_share
from mfubench.flops import flop_terms, flops_per_token
from mfubench.hardware import peak_for
from mfubench.presets import load_model

POINT_TOLERANCE = 0.05  # "~180K" stands for 5 % to either side

Kind = Literal["impossible", "contradicts itself", "effect differs from the table", "documents differ"]
Range = tuple[float, float]  # its lower and upper end


@dataclass(frozen=True)
class Contradiction:
    """One fault of the expectations, as a sentence with its arithmetic."""

    kind: Kind
    subject: str  # case and machine
    statement: str
    source: str


def implied_mfu(expectations: Expectations, item: Expectation) -> Range | None:
    """MFU (palm, dense bf16 peak) that an expectation's tokens/s, or its tokens and hours, stand for."""
    if item.tokens_per_s is not None:
        rates = item.tokens_per_s
    elif item.tokens is not None and item.hours is not None:
        rates = (item.tokens / item.hours[1] / 3600, item.tokens / item.hours[0] / 3600)
    else:
        return None
    machine = expectations.machines[item.machine]
    terms = flop_terms(load_model(expectations.model), expectations.seq_len)
    peak = peak_for(machine.card, "bfloat16", tf32=False, fp8=False).tflops * 1e12
    factor = flops_per_token(terms, "palm") / machine.world_size / peak
    return (rates[0] * factor, rates[1] * factor)


def contradictions(expectations: Expectations) -> list[Contradiction]:
    """Every fault, the gravest kind first."""
    found = [fault for item in expectations.expectations if (fault := fault_of_figure(expectations, item))]
    found += [fault for effect in expectations.effects if (fault := fault_of_effect(expectations, effect))]
    found += faults_between_documents(expectations)
    order = list(Kind.__args__)  # type: ignore[attr-defined]
    return sorted(found, key=lambda fault: order.index(fault.kind))


def fault_of_figure(expectations: Expectations, item: Expectation) -> Contradiction | None:
    """A rate above the peak, or one that is not the MFU beside it."""
    implied = implied_mfu(expectations, item)
    if implied is None:
        return None
    machine = expectations.machines[item.machine]
    if item.tokens_per_s is not None:
        figure = f"{format_quantity('tokens_per_s', item.tokens_per_s)} over {machine.world_size} GPUs"
    else:
        figure = f"{(item.tokens or 0) / 1e9:.3g}B tokens in {format_quantity('hours', item.hours or (0, 0))}"
    means = f"{figure} is {format_share(implied)} of the dense bf16 peak of {machine.world_size}× {machine.card}"
    subject = f"{item.case or 'no case'} on {machine.world_size}× {machine.card}"
    if implied[1] > 1:
        note = f" ({item.note})" if item.note else ""
        verdict = "more than they can do" if implied[0] > 1 else "its faster end is more than they can do"
        return Contradiction("impossible", subject, f"{means}: {verdict}{note}", item.source)
    if item.mfu is not None and apart(widened(implied), item.mfu):
        statement = f"{means}, but {format_share(item.mfu)} is stated beside it"
        return Contradiction("contradicts itself", subject, statement, item.source)
    return None


def fault_of_effect(expectations: Expectations, effect: ExpectedEffect) -> Contradiction | None:
    """A claimed change that the testing guide's own figures for its two arms do not give."""
    if effect.arm is None or effect.control is None or effect.rank != "primary" or effect.of == "memory":
        return None
    arm = primary_range(expectations, effect.arm, effect.of)
    control = primary_range(expectations, effect.control, effect.of)
    if arm is None or control is None:
        return None
    ends = sorted((arm[0] / control[0] - 1, arm[1] / control[1] - 1))
    implied = (ends[0] - EFFECT_TOLERANCE, ends[1] + EFFECT_TOLERANCE)
    if implied[1] >= effect.change[0] and effect.change[1] >= implied[0]:
        return None
    statement = (
        f"{format_change(effect.change)} in {effect.of.replace('_', ' ')} is claimed, but the table has "
        f"{format_quantity(effect.of, control)} → {format_quantity(effect.of, arm)}: "
        f"{format_change((ends[0], ends[1]))}"
    )
    return Contradiction("effect differs from the table", effect.name, statement, effect.source)


def primary_range(expectations: Expectations, case: str, quantity: Quantity) -> Range | None:
    for item in expectations.of_case(case):
        stated: Range | None = getattr(item, quantity)
        if item.rank == "primary" and stated is not None:
            return stated
    return None


def faults_between_documents(expectations: Expectations) -> list[Contradiction]:
    """Two statements about the same quantity of the same case and machine that share at most an end point."""
    found = []
    quantities: tuple[Quantity, ...] = ("mfu", "tokens_per_s", "memory_gb")
    for one, other in combinations(expectations.expectations, 2):
        if one.case is None or (one.case, one.machine) != (other.case, other.machine):
            continue
        for quantity in quantities:
            first, second = getattr(one, quantity), getattr(other, quantity)
            if first is None or second is None or not apart(widened(first), widened(second), touching=True):
                continue
            machine = expectations.machines[one.machine]
            found.append(
                Contradiction(
                    "documents differ",
                    f"{one.case} on {machine.world_size}× {machine.card}",
                    f"{format_quantity(quantity, first)} in one, {format_quantity(quantity, second)} in the other",
                    f"{one.source} — {other.source}",
                )
            )
    return found


def widened(stated: Range) -> Range:
    """A single figure ("~180K") as the range it stands for."""
    if stated[0] == stated[1]:
        return (stated[0] * (1 - POINT_TOLERANCE), stated[1] * (1 + POINT_TOLERANCE))
    return stated


def apart(first: Range, second: Range, touching: bool = False) -> bool:
    """Two ranges have nothing in common (or, with `touching`, no more than an end point)."""
    if touching:
        return first[1] <= second[0] or second[1] <= first[0]
    return first[1] < second[0] or second[1] < first[0]


def format_change(change: Range) -> str:
    return format_range(change, lambda value: f"{100 * value:+.3g}", "%")
