"""Expected against measured, and the expectations against themselves."""

from __future__ import annotations

from collections import Counter

from mfubench.analysis.contradictions import Contradiction, implied_mfu
from mfubench.analysis.expectations import Expectations
from mfubench.analysis.expected import Comparison
from mfubench.analysis.findings import Findings
from mfubench.analysis.report.blocks import Folded, Section, Table, Text
from mfubench.analysis.units import format_measured, format_quantity, format_share

MARKS = {"as expected": "● as expected", "below": "▼ below", "above": "▲ above"}

KINDS = {
    "impossible": "impossible",
    "contradicts itself": "rates that are not the MFU beside them",
    "effect differs from the table": "effects that the tables deny",
    "documents differ": "disagreements between documents",
}


def expected_section(found: Findings) -> Section:
    section = Section("expected", "Expected against measured")
    left_out = found.study.left_out()
    possible = [row for row in found.comparisons if row.case not in left_out]
    primary = [row for row in possible if row.rank == "primary"]
    further = [row for row in possible if row.rank == "further"]
    counts = Counter(row.verdict for row in primary)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    section.blocks.append(
        Text(
            f"Of the {len(primary)} figures of the MFU testing guide about cases of this study: {words or 'none'}. MFU "
            "compares across cards, since it is a share of each card's own peak (`palm`, dense); tokens/s, memory and "
            "hours are judged only on the machine they were stated for. A single figure stands for 5 % to either side."
        )
    )
    if missed := len(found.comparisons) - len(possible):
        section.blocks.append(Text(f"{missed} more are about cases that were left out on this machine."))
    judged = [row for row in primary if row.verdict != "not comparable"]
    elsewhere = [row for row in primary if row.verdict == "not comparable"]
    if judged:
        section.blocks.append(comparison_table(judged, "MFU testing guide"))
    if elsewhere:
        title = f"{len(elsewhere)} rates, memory figures and hours that were stated for another machine"
        section.blocks.append(Folded(title, [comparison_table(elsewhere, "MFU testing guide")]))
    if further:
        title = f"{len(further)} further expectations, of other documents"
        section.blocks.append(Folded(title, [comparison_table(further, "Other documents")]))
    return section


def comparison_table(rows: list[Comparison], caption: str) -> Table:
    columns = ["case|", "expected", "measured", "verdict|", "stated for|", "source|"]
    return Table(columns, [comparison_row(row) for row in rows], caption)


def comparison_row(row: Comparison) -> list[str]:
    measured = "–" if row.measured is None else format_measured(row.quantity, row.measured)
    verdict = MARKS.get(row.verdict, row.verdict)
    if row.verdict == "not comparable":
        verdict = "other machine"
    if row.verdict == "not measured" and row.note:
        verdict = f"not measured: {row.note}"
    expected = format_quantity(row.quantity, row.expected)
    return [f"`{row.case}`", expected, measured, verdict, short(row.expected_on), row.source]


def contradictions_section(found: Findings, expectations: Expectations) -> Section:
    section = Section("contradictions", "Where the expectations contradict themselves")
    if not found.contradictions:
        section.blocks.append(Text("Nothing found."))
        return section
    kinds = Counter(fault.kind for fault in found.contradictions)
    counted = ", ".join(f"**{count}** {KINDS[kind]}" for kind, count in kinds.items())
    statements = f"{len(expectations.expectations)} statements about {expectations.model}"
    section.blocks.append(
        Text(
            f"{statements} were checked by arithmetic alone: {counted}. Each rate is worth a certain MFU on the "
            "machine it is stated for; a rate that is not the MFU beside it cannot be met together with it."
        )
    )
    section.blocks.append(implied_table(expectations, "primary"))
    section.blocks.append(Folded("The same for the other documents", [implied_table(expectations, "further")]))
    rest = [fault for fault in found.contradictions if fault.kind != "contradicts itself"]
    if rest:
        section.blocks.append(fault_table(rest))
    return section


def implied_table(expectations: Expectations, rank: str) -> Table:
    """Every stated rate or duration beside the MFU that it stands for."""
    rows = []
    for item in expectations.expectations:
        implied = implied_mfu(expectations, item)
        if implied is None or item.rank != rank:
            continue
        machine = expectations.machines[item.machine]
        stated = (
            format_quantity("tokens_per_s", item.tokens_per_s)
            if item.tokens_per_s is not None
            else f"{(item.tokens or 0) / 1e9:.3g}B tokens in {format_quantity('hours', item.hours or (0, 0))}"
        )
        share = f"**{format_share(implied)}**" if implied[1] > 1 else format_share(implied)
        beside = format_share(item.mfu) if item.mfu is not None else "–"
        where = short(f"{machine.world_size}× {machine.card}")
        rows.append([f"`{item.case}`" if item.case else "–", where, stated, share, beside, item.source])
    columns = ["case|", "machine|", "stated", "is an MFU of", "MFU stated beside it", "source|"]
    caption = "What each figure implies: palm convention, dense bf16 peak; bold: more than the cards can do"
    return Table(columns, rows, caption)


def fault_table(faults: list[Contradiction]) -> Folded:
    rows = [[fault.kind, f"`{fault.subject}`", fault.statement, fault.source] for fault in faults]
    return Folded(
        f"{len(rows)} other faults, each with its arithmetic",
        [Table(["fault|", "about|", "arithmetic|", "source|"], rows)],
    )


def short(machine: str) -> str:
    """`8× B200`, on one line."""
    return machine.replace("NVIDIA ", "").replace(" ", "\u00a0")
