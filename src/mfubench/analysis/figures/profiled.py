"""What the figures of a profiled step share: which case they show, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from mfubench.analysis.figures.style import Theme, empty_figure, machine_label
from mfubench.analysis.findings import Findings
from mfubench.analysis.profiles import Profiled

PLURAL_VERBS = {"has": "have", "was": "were"}
HOW_TO = "no case was profiled; set measurement: {profile: timeline} on one in the study"


def fastest_profile(found: Findings, theme: Theme, title: str) -> Profiled | Figure:
    """The fastest profiled case, or the panel that says why there is none."""
    profiles, missing = found.profiles
    if profiles:
        return profiles[0]
    cases: dict[str, list[str]] = {}
    for case, reason in missing.items():
        cases.setdefault(reason, []).append(case)
    why = "; ".join(told(names, reason) for reason, names in cases.items())
    return empty_figure(theme, title, machine_label(found), why or HOW_TO)


def told(cases: Sequence[str], reason: str) -> str:
    """Cases that share a reason, as a sentence where the reason is one's predicate."""
    names = ", ".join(cases)
    verb, _, rest = reason.partition(" ")
    if verb not in PLURAL_VERBS:
        return f"{names}: {reason}"
    return f"{names} {verb if len(cases) == 1 else PLURAL_VERBS[verb]} {rest}"
