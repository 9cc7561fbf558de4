"""The head of the report: which study, what of it was measured, on how many cards, when."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import mfubench
from mfubench.analysis.figures.style import count_words, machine_label
from mfubench.analysis.findings import Findings
from mfubench.analysis.report.audit_section import audit_of, verdict_of
from mfubench.words import number_of

FEW = 6  # cases that a machine had no room for, named at once: more have their place at the end


def head_facts(found: Findings) -> dict[str, Any]:
    """What the templates show above the first section.

    `covered` ("10 of 23 cases") and `lacking` (a sentence that names the others) are None where every case of the study
    has a result: what a study says of itself holds for the whole of it alone. `ceilings`: why they are in doubt, or
    None.
    """
    study = found.study
    times = sorted(log.wall.started_at for log in study.runs.values() if log.wall)
    declared = study.declared_names()
    covered = [name for name in declared if name in study.runs or name in study.limits]
    partial = len(covered) < len(declared)
    return {
        "study": study.name,
        "description": study.declared.description,
        "machine": machine_label(found),
        "covered": f"{len(covered)} of {len(declared)} cases" if partial else None,
        "lacking": lacking_words(found, len(covered), len(declared)) if partial else None,
        "cards": cards_words(found),
        "models": ", ".join(dict.fromkeys(log.config.model.name for log in study.runs.values())) or "no model yet",
        "counts": case_counts(found),
        "measured_from": times[0][:16].replace("T", " ") if times else None,
        "measured_to": times[-1][:16].replace("T", " ") if times else None,
        "version": mfubench.__version__,
        "ceilings": ceilings_words(found),
        "audit": verdict_of(audit_of(found)),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def ceilings_words(found: Findings) -> str | None:
    """That the ceilings were measured on a busy machine, and the command that measures them anew."""
    taken = found.ceilings_contention
    if taken is None:
        return None
    command = found.study.measure_anew("ceilings.json")
    return (
        f"**Other processes took {taken.others:.1f} of {taken.cores} cores while the ceilings were measured:** every "
        f"MFU is too high and every best time too long, until `{command}` measures them anew, "
        "with nothing else running here."
    )


def case_counts(found: Findings) -> dict[str, int]:
    """How many cases ended how: {"measured": 9, "memory limit": 1, "missing": 13}; what no case did is not in it."""
    study = found.study
    counts = Counter({"measured": len(found.good)})
    for name, log in study.runs.items():
        if name not in found.good:
            words = {"oom": "out of memory", "ok": "without measured steps", "skipped": "left out"}
            counts[words.get(log.status, log.status)] += 1
    counts["memory limit" if len(study.limits) == 1 else "memory limits"] = len(study.limits)
    counts["left out"] += len(study.left_out())
    counts["failed"] += len(study.failures)
    counts["missing"] = len(study.missing())
    counts["left over"] = len(study.left_over)
    return {words: count for words, count in counts.items() if count}


def lacking_words(found: Findings, covered: int, declared: int) -> str:
    """How much of the study this report is about, on how many cards, and the name of each case that it lacks."""
    study = found.study
    run = {log.config.world_size for log in study.runs.values()}
    asked = {values["world_size"] for values in study.declared.cases.values() if "world_size" in values}
    unused = sorted(asked - run)
    words = f"**A part of the study: {covered} of its {declared} cases have a result.**"
    if run and unused:
        *few, last = [str(size) for size in unused]
        sizes = f"{', '.join(few)} or {last}" if few else last
        words += f" None of its runs on {sizes} {count_words(found, unused[-1]).split()[1]} is among them."
    lacking = {"Missing": study.missing(), "Left out": study.left_out(), "Failed": list(study.failures)}
    for what, names in lacking.items():
        if names:
            many = what == "Left out" and len(names) > FEW
            named = "see Skipped arms and fallbacks" if many else ", ".join(f"`{name}`" for name in names)
            words += f" {what} ({len(names)}): {named}."
    return words


def cards_words(found: Findings) -> str:
    """How many runs took how many cards: "9 runs on 1 GPU, 3 runs on 2 GPUs"; those that were left out took none."""
    sizes = Counter(log.config.world_size for log in found.study.runs.values() if log.status != "skipped")
    if not sizes:
        return "no run yet"
    return ", ".join(
        f"{number_of(count, 'run')} on {count_words(found, size)}" for size, count in sorted(sizes.items())
    )
