"""Where the rest went: a profiled step taken apart, what each part is worth, the kernels on a roofline."""

from __future__ import annotations

from mfubench.analysis.figures import roofline, waterfall
from mfubench.analysis.figures.style import per_gpu
from mfubench.analysis.findings import Findings
from mfubench.analysis.profiled_matmuls import profiled_matmuls
from mfubench.analysis.profiles import Profiled, Row, asked_for
from mfubench.analysis.report.blocks import Block, Folded, Notice, Section, Table, Text
from mfubench.analysis.report.blocks import Figure as FigureBlock
from mfubench.analysis.units import (
    format_milliseconds,
    format_percent,
    format_rate,
    format_signed_percent,
)
from mfubench.host_load import Contention, contention_of_run
from mfubench.profiling.categories import COMMUNICATION, ELEMENTWISE_GROUPS, HOST, LOSS, OPTIMIZER, QUEUE

SHOWN_KERNELS = 30
UNLIKE = 0.2  # from here on a profiled step says little of the measured ones
HOW_TO = (
    "A profile is a last, unmeasured step of a run under torch.profiler. Ask for it where it is wanted, on a case or "
    "in the `base` of a stage: `measurement: {profile: timeline}`; the run is then measured again."
)

NO_CEILINGS = (
    " The machine's ceilings were not measured, so only gaps, copies and communication have a best time: "
    "`{command}` measures them."
)

# What to try when a part has the most to win.
ON_GPU = {
    "matmul": "a larger micro-batch, sizes divisible by 128, or `fp8`",
    "attention": "another backend (`attention`)",
    "norm": "`kernels: {norm: fused}`",
    "rope": "`kernels: {rope: fused}`",
    "activation": "`kernels: {swiglu: fused}`",
    "accumulation": "`kernels: {weight_gradient: accumulate}`",
    "optimizer": "`kernels: {adamw: fused}`, or a sharded optimizer (`parallelism: zero1`)",
    "elementwise": "`compile: block`, which fuses it",
    "loss": "another form of the loss (`loss`)",
    "communication": "more accumulation, or another `parallelism`",
    "host": "`compile: block` and `cuda_graphs: true`",
    "queue": "`cuda_graphs: true`",
    "data": "`loader: {kind: dataloader}` with more workers",
}
ON_CPU = {
    "elementwise": "`compile: block`, which fuses it",
    "host": "`compile: block`, or a larger micro-batch",
    "data": ON_GPU["data"],
}


def profile_section(found: Findings) -> Section:
    profiles, missing = found.profiles
    section = Section("profile", "Where the rest went")
    if not profiles:
        section.blocks.append(Text("**No case of this study has a profile**, so its steps are not taken apart here."))
    else:
        section.blocks.extend(headline_blocks(found, profiles[0]))
        if len(profiles) > 1:
            section.blocks.append(cases_table(profiles))
        section.blocks.extend(folded_blocks(found, profiles))
    if missing:
        rows = [[f"`{name}`", reason] for name, reason in missing.items()]
        section.blocks.append(Table(["case|", "why|"], rows, "Profiles that are not to be had"))
    if not (profiles or missing or asked_for(found.study)):
        section.blocks.append(Text(HOW_TO))
    return section


def headline_blocks(found: Findings, profiled: Profiled) -> list[Block]:
    """The fastest profiled case: what to do next, the waterfall as picture and table, the roofline."""
    alt = f"Parts of a step of {profiled.case}, one after the other, each with what it takes at best."
    blocks: list[Block] = []
    if (others := contention_of_run(profiled.judged.log)) is not None:
        busy = f"The machine was busy with something else during `{profiled.case}`: {others}. What follows is of both."
        blocks.append(Notice(busy))
    if (others := found.ceilings_contention) is not None:
        blocks.append(Notice(no_next_sentence(profiled, others)))
    else:
        blocks.append(Notice(next_sentence(found, profiled), "good"))
    if abs(profiled.overhead) > UNLIKE:
        blocks.append(Notice(unlike_sentence(profiled)))
    blocks += [
        FigureBlock("waterfall", alt, waterfall.draw),
        parts_table(found, profiled),
        Text(how_taken(found, profiled)),
        FigureBlock("roofline", "Kernel groups by FLOPs a byte and by achieved rate, under two roofs.", roofline.draw),
        Text(
            "FLOPs and bytes are counted from shapes, not by the card's counters: a group far below the roof moves "
            "more than it must, or moves it slowly. Elementwise arithmetic is a rough count; its distance to the slope "
            "is not."
        ),
    ]
    return blocks


def no_next_sentence(profiled: Profiled, others: Contention) -> str:
    """Why no part is named: the best times are of a machine that others used."""
    return (
        f"**No next optimisation of `{profiled.case}` is named:** other processes took {others.others:.1f} of "
        f"{others.cores} cores while the ceilings were measured, so that the best times below are too long, each by "
        "another factor. The command at the head of this report measures the ceilings anew."
    )


def next_sentence(found: Findings, profiled: Profiled) -> str:
    row = profiled.next_row
    unknown = ""
    if "matmul" not in profiled.ideals.seconds:
        unknown = NO_CEILINGS.format(command=found.study.snakemake("analysis"))
    if row is None or row.ideal_s is None:
        return f"`{profiled.case}`: no part of its step takes longer than it must.{unknown}"
    time, step, ideal = map(format_milliseconds, (row.time_s, profiled.rank.step_s, row.ideal_s))
    at_best = f"{ideal} at best here ({row.ideal})" if row.ideal_s > 0 else "nothing at best"
    return (
        f"**The next optimisation of `{profiled.case}` is: {row.label}.** It takes {time} of a step of {step}, and "
        f"{at_best}. {worth_words(found, profiled, row)}{remedy(found, profiled.case, row)}{unknown}"
    )


def worth_words(found: Findings, profiled: Profiled, row: Row) -> str:
    now, won = profiled.tokens_per_s, profiled.rate_won(row.excess_s)
    if won is None:
        return "Removing it would leave almost nothing of the step, so no rate is given."
    return (
        f"Without the difference the rate would be {format_rate(now + won)} instead of {format_rate(now)} "
        f"{per_gpu(found)} ({format_signed_percent(won / now)})."
    )


def unlike_sentence(profiled: Profiled) -> str:
    return (
        f"The profiled step took {format_milliseconds(profiled.rank.step_s)}, the measured ones "
        f"{format_milliseconds(profiled.measured_step_s)}: they were not alike, so its shares say more than its "
        "times. On a machine that others use, measure again; where the host is the limit, the profiler slows it down."
    )


def remedy(found: Findings, case: str, row: Row) -> str:
    """What to try, where a setting of this project is made for it."""
    if row.key == "attention" and row.ideal.startswith(f"{found.good[case].log.used['attention'].used}, "):
        return " No other backend was faster here: what it takes beyond that is what a whole step costs it."
    on_cpu = per_gpu(found).endswith("process")
    words = (ON_CPU if on_cpu else ON_GPU).get(row.key)
    return f" To try: {words}." if words else ""


def parts_table(found: Findings, profiled: Profiled) -> Table:
    columns = ["part|", "time", "share", "at best here", "could be won", f"worth, {per_gpu(found)}", "what is best|"]
    rows = [part_row(profiled, row) for row in profiled.rows]
    total = profiled.rank.step_s
    rows.append(["**the profiled step**", format_milliseconds(total), "100.0 %", "", "", "", ""])
    caption = f"One step of `{profiled.case}`, rank {profiled.rank.rank}: the parts add up to it"
    return Table(columns, rows, caption)


def part_row(profiled: Profiled, row: Row) -> list[str]:
    share = format_percent(row.time_s / profiled.rank.step_s)
    if row.ideal_s is None:
        return [row.label, format_milliseconds(row.time_s), share, "not known", "–", "–", "–"]
    won = profiled.rate_won(row.excess_s)
    worth = f"+{format_rate(won)}" if won else "–"
    return [
        row.label,
        format_milliseconds(row.time_s),
        share,
        format_milliseconds(row.ideal_s) if row.ideal_s > 0 else "0",
        format_milliseconds(row.excess_s) if row.excess_s > 0 else "–",
        worth,
        row.ideal,
    ]


def how_taken(found: Findings, profiled: Profiled) -> str:
    """What the reader must know of the profile: overhead, ranks, streams, passes, the trace."""
    rank, ideals = profiled.rank, profiled.ideals
    words = [
        f"The profiled step took {format_milliseconds(rank.step_s)}, {format_signed_percent(profiled.overhead)} "
        f"against the median of the measured ones ({format_milliseconds(profiled.measured_step_s)}): the profiler's "
        "overhead, and the spread between steps. Every moment is counted once: kernels that overlap share it, a "
        "collective counts where nothing else ran."
    ]
    if ideals.recomputed_s > 0:
        words.append(
            f"Of the matmuls' best time {format_milliseconds(ideals.recomputed_s)} repeat the forward pass (activation "
            "checkpointing)."
        )
    passes = rank.directions.get("matmul", {})
    if len(passes) == 2:
        forward, backward = (format_milliseconds(passes[key]) for key in ("forward", "backward"))
        words.append(f"Matmuls: {forward} forward, {backward} backward.")
    if rank.collectives_s:
        words.append(communication_words(profiled))
    trace = found.study.traces[profiled.case].relative_to(found.study.folder)
    words.append(f"The trace is `{trace}`, for ui.perfetto.dev; left out of it: {profiled.breakdown.left_out}.")
    return " ".join(words)


def communication_words(profiled: Profiled) -> str:
    rank = profiled.rank
    words = (
        f"{'Copies between cards and collectives' if rank.copies_s else 'Collectives'} ran for "
        f"{format_milliseconds(sum(rank.collectives_s) + rank.copies_s)}, "
        f"{format_milliseconds(rank.hidden_communication_s)} of it hidden behind compute"
    )
    if profiled.ideals.collectives_s is not None:
        words += f"; at the bus rate measured here they would take {format_milliseconds(profiled.ideals.collectives_s)}"
    waits = [other for other in profiled.breakdown.ranks if other.waiting_s is not None]
    if len(waits) > 1:
        longest = max(waits, key=lambda other: other.waiting_s or 0.0)
        words += (
            f". Rank {rank.rank} comes last to them; rank {longest.rank} waits longest for it, "
            f"{format_milliseconds(longest.waiting_s or 0.0)} a step"
        )
    return words + "."


def cases_table(profiles: list[Profiled]) -> Table:
    """All profiled cases side by side, in shares of their steps."""
    columns = ["case|", "step", "matmul", "attention", "elementwise", "loss", "optimizer", "communication, exposed"]
    columns += ["hidden", "gaps", "data", "rank wait", "overhead"]
    rows = []
    for profiled in profiles:
        rank = profiled.rank
        parts = {name: seconds / rank.step_s for name, seconds in rank.parts.items()}
        waits = [other.waiting_s for other in profiled.breakdown.ranks if other.waiting_s is not None]
        shares = [parts["matmul"], parts["attention"], sum(parts[name] for name in ELEMENTWISE_GROUPS), parts[LOSS]]
        shares += [parts[OPTIMIZER], parts[COMMUNICATION], rank.hidden_communication_s / rank.step_s]
        shares += [parts[HOST] + parts[QUEUE], parts["data"]]
        wait = format_milliseconds(max(waits)) if len(waits) > 1 else "–"
        overhead = format_signed_percent(profiled.overhead)
        rows.append(
            [f"`{profiled.case}`", format_milliseconds(rank.step_s), *map(format_percent, shares), wait, overhead]
        )
    caption = (
        "All profiled cases, fastest first: shares of the step of the slowest rank. Rank wait: the longest that a rank "
        "waits for it in collectives; overhead: profiled step over measured median"
    )
    return Table(columns, rows, caption)


def folded_blocks(found: Findings, profiles: list[Profiled]) -> list[Block]:
    blocks: list[Block] = []
    if (matmuls := matmuls_block(found, profiles[0])) is not None:
        blocks.append(matmuls)
    blocks.append(kernels_block(profiles[0]))
    others = [parts_table(found, profiled) for profiled in profiles[1:]]
    if others:
        blocks.append(Folded(f"The parts of the other {len(others)} profiled cases", others))
    return blocks


def matmuls_block(found: Findings, profiled: Profiled) -> Folded | None:
    """Each matmul of the model beside its rate alone; None without shapes (a replayed graph has none)."""
    matmuls = profiled_matmuls(profiled, found.study.ceilings)
    if not matmuls:
        return None
    columns = ["projection|", "product|", "count", "time", "TFLOP/s in the step", "TFLOP/s alone", "could be won"]
    rows = [
        [
            matmul.name,
            matmul.product.replace("_", " "),
            str(matmul.count),
            format_milliseconds(matmul.time_s),
            f"{matmul.tflops:,.4g}",
            f"{matmul.alone_tflops:,.4g}" if matmul.alone_tflops else "–",
            format_milliseconds(matmul.excess_s) if matmul.excess_s > 0 else "–",
        ]
        for matmul in matmuls
    ]
    caption = f"`{profiled.case}`: alone is measured hot, one shape at a time, with `ceilings.micro_batch_size`"
    if profiled.breakdown.device == "cpu":
        caption += ", and counted for a rank's share of the threads"
    return Folded("The matmuls one by one", [Table(columns, rows, caption)])


def kernels_block(profiled: Profiled) -> Folded:
    """The longest kernels, and honestly what the rest is."""
    kernels = profiled.rank.kernels
    rows = [
        [shortened(kernel.name), kernel.category, str(kernel.count), format_milliseconds(kernel.total_s),
         microseconds(kernel.median_s)]
        for kernel in kernels[:SHOWN_KERNELS]
    ]  # fmt: skip
    unknown = sum(kernel.total_s for kernel in kernels if kernel.category == "other")
    what = "kernels" if profiled.breakdown.device == "cuda" else "operators (own time)"
    caption = (
        f"`{profiled.case}`, the {len(rows)} longest of {len(kernels)} {what}; of unknown purpose: "
        f"{format_milliseconds(unknown)} in all"
    )
    return Folded(f"The longest {what}", [Table(["name|", "category|", "count", "total", "median"], rows, caption)])


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.3g} µs" if seconds < 1e-3 else format_milliseconds(seconds)


def shortened(name: str) -> str:
    """A kernel's name without the template arguments that fill pages."""
    name = name.replace("`", "'").replace("**", "* *")
    return f"`{name}`" if len(name) <= 90 else f"`{name[:60]} … {name[-25:]}`"
