"""A profiled step as tables in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from mfubench.config import ConfigError
from mfubench.profiling.breakdown import Breakdown, RankBreakdown, break_down
from mfubench.profiling.categories import CATEGORIES, COMMUNICATION, DATA, HOST, QUEUE
from mfubench.profiling.trace_file import read_trace

NUMBERS_WIDTH = 48  # of the kernels' table beside the names, with its borders
WORDS = {
    COMMUNICATION: "communication, exposed",
    HOST: "the host was behind",  # on a CPU: Python between operators
    QUEUE: "gaps between launched kernels",
    DATA: "waiting for data",
}


def show_profile(what: Path, kernels: int, console: Console | None = None) -> None:
    """Print the breakdown of a trace, or of a run JSON's. Raises ConfigError where there is none."""
    path = trace_of(what)
    trace = read_trace(path)
    found = break_down(trace)
    if found is None:
        raise ConfigError(f"{path}: holds no step: {trace.reason}")
    console = console or Console()
    console.print(parts_table(found))
    rank = found.slowest
    if rank.hidden_communication_s:
        console.print(f"hidden behind compute: {1000 * rank.hidden_communication_s:.3g} ms of communication")
    if kernels:
        console.print(kernels_table(rank, kernels, console.width - NUMBERS_WIDTH))


def trace_of(what: Path) -> Path:
    """A trace as it is; of results/<study>/runs/<stage>/<case>.json the one under traces/, or in the work folder; of
    the run JSON of `mfubench train` the one in the work folder beside it."""
    beside = what.parent / f"{what.stem}-work" / "trace.json.gz"
    if what.parent.parent.name != "runs":
        return beside if beside.exists() else what
    study, stage, case = what.parents[2], what.parent.name, what.stem
    places = [study / "traces" / stage / f"{case}.json.gz", *(study / "work" / stage / case).glob("**/trace.json.gz")]
    for place in places:
        if place.exists():
            return place
    raise ConfigError(
        f"{what}: no trace of it under {study / 'traces'}; set measurement: {{profile: timeline}} on the case and run "
        "it again"
    )


def parts_table(found: Breakdown) -> Table:
    """Milliseconds of each category on each rank; a column adds up to the step."""
    table = Table(title=f"{found.name}: one step, milliseconds")
    table.add_column("part")
    for rank in found.ranks:
        table.add_column(f"rank {rank.rank}", justify="right")
    table.add_column(f"share, rank {found.slowest.rank}", justify="right")
    for category in CATEGORIES:
        times = [rank.parts[category] for rank in found.ranks]
        if any(times):
            share = found.slowest.parts[category] / found.slowest.step_s
            table.add_row(
                WORDS.get(category, category), *(f"{1000 * seconds:,.3f}" for seconds in times), f"{100 * share:.1f} %"
            )
    table.add_section()
    table.add_row("step", *(f"{1000 * rank.step_s:,.3f}" for rank in found.ranks), "100.0 %")
    if all(rank.waiting_s is not None for rank in found.ranks):
        table.add_row("waits for a later rank", *(f"{1000 * (rank.waiting_s or 0):,.3f}" for rank in found.ranks), "")
    return table


def kernels_table(rank: RankBreakdown, count: int, name_width: int) -> Table:
    """The longest kernels, names cut to a width."""
    table = Table(title=f"the longest of {len(rank.kernels)} kernels, rank {rank.rank}")
    for title in ("total ms", "count", "median µs"):
        table.add_column(title, justify="right")
    table.add_column("part")
    table.add_column("name")
    for kernel in rank.kernels[:count]:
        numbers = (f"{1000 * kernel.total_s:,.3f}", str(kernel.count), f"{1e6 * kernel.median_s:,.1f}")
        name = kernel.name if len(kernel.name) <= name_width else f"{kernel.name[: max(name_width, 12) - 1]}…"
        table.add_row(*numbers, kernel.category, name)
    return table
