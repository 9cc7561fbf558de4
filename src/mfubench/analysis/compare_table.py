"""A comparison of two studies for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from mfubench.analysis.compare import CaseChange, StudyComparison
from mfubench.analysis.statistics import CARD_SPREAD
from mfubench.analysis.units import (
    NOTHING_TOLD,
    format_gib,
    format_interval,
    format_percent,
    format_rate,
    format_signed_percent,
)
from mfubench.words import number_of

# Columns of a terminal from which on each of these is shown: a narrow one leaves them out, so that names stay whole and
# verdicts readable. The verdict knows the interval, and the first rate and its change tell the second.
SHOWN_FROM = {"95 % interval": 80, "second": 90, "MFU (palm)": 125, "memory": 125}
STYLES = {"regression": "bold red", "broken": "bold red", "slower": "yellow", "faster": "green"}


def print_comparison(comparison: StudyComparison, console: Console | None = None) -> None:
    """The machines, one row a case, and the verdict."""
    console = console or Console()
    console.print(f"first:  {comparison.first} — {comparison.machines[0]}", highlight=False)
    console.print(f"second: {comparison.second} — {comparison.machines[1]}", highlight=False)
    in_both = [change for change in comparison.changes if change.verdict != "only in one"]
    if in_both:
        console.print(table_of(in_both, console.width))
    for side in ("not in the first study", "not in the second study"):
        if names := [change.case for change in comparison.changes if change.reason == side]:
            console.print(f"{side}: {', '.join(names)}", highlight=False)
    for change in comparison.changes:
        if change.differs_in and change.verdict != "other model":
            differences = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in change.differs_in.items())
            console.print(f"{change.case} ran with other settings: {differences}", highlight=False)
    if not comparison.compared:
        console.print(f"nothing compared: {why_nothing(comparison)}", style="bold red", highlight=False)
        return
    console.print(basis_of(comparison), highlight=False)
    worse = ", ".join(change.case for change in comparison.regressions)
    verdict = f"regression: {worse}" if worse else f"no regression beyond {format_percent(comparison.threshold)}"
    if untold := sum(change.verdict in NOTHING_TOLD for change in comparison.changes):
        verdict += f"; {number_of(untold, 'case')} not told apart"
    console.print(verdict, style="bold red" if worse else "bold green", highlight=False)


def table_of(changes: list[CaseChange], width: int) -> Table:
    """One row a case, for a terminal of so many columns."""
    rows = [cells_of(change) for change in changes]
    shown = [title for title in rows[0] if width >= SHOWN_FROM.get(title, 0)]
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=width < SHOWN_FROM["second"])
    for title in shown:
        in_words = title in ("case", "verdict")
        table.add_column(title, justify="left" if in_words else "right", no_wrap=title != "verdict")
    for change, row in zip(changes, rows, strict=True):
        table.add_row(*(row[title] for title in shown), style=STYLES.get(change.verdict))
    return table


def why_nothing(comparison: StudyComparison) -> str:
    found = Counter(change.verdict for change in comparison.changes)
    if found["too noisy"]:
        return "what was measured in both studies is too noisy to tell"
    if found["other model"]:
        return f"of the {found['other model']} case(s) that both studies have, none is of one model in both"
    return "no case was measured in both studies"


def cells_of(change: CaseChange) -> dict[str, str]:
    """A case's row by the titles of the columns."""
    measured = change.difference
    return {
        "case": change.case,
        "first": format_rate(change.before) if change.before else "–",
        "second": format_rate(change.after) if change.after else "–",
        "change": format_signed_percent(measured.change) if measured else "–",
        "95 % interval": format_interval(measured.interval) if measured else "–",
        "MFU (palm)": f"{format_percent(change.before_mfu)} → {format_percent(change.after_mfu)}",
        "memory": f"{format_gib(change.before_memory_gib)} → {format_gib(change.after_memory_gib)}",
        "verdict": change.verdict + (f": {change.reason}" if change.reason else ""),
    }


def basis_of(comparison: StudyComparison) -> str:
    rates = f"Rates in {' and '.join(dict.fromkeys(comparison.units))}."
    if comparison.spread is None:
        known = format_percent(CARD_SPREAD.log_deviation, 2)
        return (
            f"{rates} Nothing was repeated: the intervals hold what the steps of one process say and, at the least, "
            f"how processes differ on other cards ({known}, standard deviation)."
        )
    return (
        f"{rates} Intervals from {comparison.spread.processes} repeated processes: their medians differ by "
        f"{format_percent(comparison.spread.log_deviation, 2)} (standard deviation)."
    )
