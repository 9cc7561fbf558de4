"""Where the machine's time went: steps that count, and everything that stood around them."""

from __future__ import annotations

from mfubench.analysis.figures.style import per_gpu
from mfubench.analysis.findings import Findings
from mfubench.analysis.machine_time import MEASURED, PARTS, MachineTime, machine_time
from mfubench.analysis.report.blocks import Block, Folded, Section, Table, Text
from mfubench.analysis.units import format_percent

MINUTE_NS = 60e9


def time_section(found: Findings) -> Section:
    section = Section("time", "Where the machine's time went")
    time = machine_time(found.study.runs.values())
    each = "GPU-minutes" if per_gpu(found).endswith("GPU") else "process-minutes"
    if not time.total.total_ns:
        section.blocks.append(Text("No run has recorded its clock yet."))
        return section
    section.blocks.append(Text(largest_words(time.total, each)))
    section.blocks.append(time_table(time.total, "All stages", each))
    by_stage = [time_table(spent, f"Stage {stage}", each) for stage, spent in time.stages.items()]
    section.blocks.append(Folded(f"Each of the {len(by_stage)} stages", by_stage))
    section.blocks.extend(left_out_words(time.left_out))
    section.blocks.append(Text(around_words(found)))
    return section


def largest_words(total: MachineTime, each: str) -> str:
    part = total.largest_overhead
    return (
        f"{format_percent(total.share(MEASURED), 0)} of {minutes(total.total_ns)} minutes went into measured steps. "
        f"The largest part that is no measured step: **{PARTS[part]}**, {minutes(total.parts_ns[part])} minutes "
        f"({format_percent(total.share(part), 0)}), {minutes(total.gpu_parts_ns[part])} {each} "
        f"({format_percent(total.gpu_share(part), 0)})."
    )


def time_table(spent: MachineTime, title: str, each: str) -> Table:
    rows = [
        [
            PARTS[part],
            minutes(spent.parts_ns[part]),
            format_percent(spent.share(part)),
            minutes(spent.gpu_parts_ns[part]),
            format_percent(spent.gpu_share(part)),
        ]
        for part in PARTS
        if spent.parts_ns[part]
    ]
    rows.append(["**total**", minutes(spent.total_ns), "100 %", minutes(spent.gpu_total_ns), "100 %"])
    runs = "1 run" if spent.runs == 1 else f"{spent.runs} runs"
    return Table(
        ["part|", "minutes", "share", each, "share"], rows, f"{title}: {runs}; a share is of the column before it"
    )


def minutes(nanoseconds: int) -> str:
    return f"{nanoseconds / MINUTE_NS:,.2f}"


def left_out_words(left_out: dict[str, str]) -> list[Block]:
    """One sentence for each reason."""
    names: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names.setdefault(why, []).append(f"`{name}`")
    return [Text(f"Left out ({why}): {', '.join(runs)}.") for why, runs in names.items()]


def around_words(found: Findings) -> str:
    """What the table is of, and what it is not."""
    words = (
        "Each run counts from the start of its first process until its log was complete, by the clock of rank 0; the "
        "last part is what nothing else explains (collecting the results; of runs by earlier versions all of the "
        "start). "
        "Preparation, memory searches, failed tries and the time between two runs are in no run's clock."
    )
    if found.study.ceilings is not None:
        words += f" Measuring the ceilings took {found.study.ceilings.total_s / 60:,.2f} minutes more."
    if any(log.resumes for log in found.study.runs.values()):
        words += " Of a run that was resumed, its last process alone is counted."
    return words + " Figures are rounded one by one."
