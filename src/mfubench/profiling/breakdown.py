"""Where a step's time went: every moment of a rank's step belongs to exactly one category. No torch.

Compute that runs at the same time on several streams shares the moment equally; a copy counts where no compute runs, a
collective where nothing else does (it is hidden otherwise); what is left is a gap. So the parts add up to the step.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mfubench.profiling.categories import BETWEEN_CARDS, CATEGORIES, COMMUNICATION, COPY, DATA, HOST, MATMUL, QUEUE
from mfubench.profiling.chrome_trace import DATA_MARK, HOST_WORK, CutStep, end_of
from mfubench.profiling.slices import Slice, Span, device_slices, is_collective, operator_slices, overlap
from mfubench.profiling.trace_file import Trace


@dataclass(frozen=True)
class KernelTotal:
    """All launches of one kernel name in the step (on a CPU: of one operator, its own time)."""

    name: str
    category: str
    count: int
    total_s: float
    median_s: float


@dataclass(frozen=True)
class MatmulTotal:
    """All matmuls of one shape in one pass: [m, k] @ [k, n]."""

    shape: tuple[int, int, int]  # m, k, n
    direction: str | None  # forward | backward; None: it cannot be told
    count: int
    total_s: float


@dataclass(frozen=True)
class RankBreakdown:
    """One rank's step. `parts` has every category and sums to `step_s`; a collective's is its exposed time."""

    rank: int
    step_s: float
    busy_s: float  # some kernel ran, whatever it was
    parts: dict[str, float]
    directions: dict[str, dict[str, float]]  # category -> forward, backward: kernel time, overlaps not divided
    hidden_communication_s: float
    kernels: list[KernelTotal]
    matmuls: list[MatmulTotal]
    collectives_s: list[float]  # kernel times in launch order
    copies_s: float = 0.0  # to other cards; they begin when all ranks are ready
    waiting_s: float | None = None  # for the last rank to arrive, in collectives or before copies; None: who knows


@dataclass(frozen=True)
class Breakdown:
    """A profiled step of a run."""

    name: str
    device: str
    ranks: list[RankBreakdown] = field(default_factory=list)
    left_out: str = "nothing"

    @property
    def slowest(self) -> RankBreakdown:
        """The rank that the others wait for: its collectives are the transfer itself, not a wait."""
        waits = [rank for rank in self.ranks if rank.waiting_s is not None]
        if len(waits) > 1:
            return min(waits, key=lambda rank: rank.waiting_s or 0.0)
        return max(self.ranks, key=lambda rank: rank.step_s)


def break_down(trace: Trace) -> Breakdown | None:
    """Take a trace apart. None where it holds no step."""
    if not trace.ranks:
        return None
    ranks = with_waits([break_down_rank(rank) for rank in trace.ranks])
    return Breakdown(trace.name, trace.ranks[0].device, ranks, trace.left_out)


def break_down_rank(step: CutStep) -> RankBreakdown:
    slices = device_slices(step) if step.device == "cuda" else operator_slices(step)
    inside = sorted((piece for piece in slices if overlap(piece, step.window) > 0), key=lambda piece: piece.start)
    parts, hidden, gaps = attribute(inside, step.window)
    data_waits = [
        (event["ts"], end_of(event))
        for event in step.events
        if event["cat"] in HOST_WORK and event["name"].startswith(DATA_MARK)
    ]
    for gap, piece in gaps:
        for category, seconds in explain_gap(gap, piece, data_waits).items():
            parts[category] += seconds
    step_us = step.window[1] - step.window[0]
    idle = sum(parts[category] for category in (HOST, QUEUE, DATA))
    return RankBreakdown(
        rank=step.rank,
        step_s=step_us / 1e6,
        busy_s=(step_us - idle) / 1e6,
        parts={category: parts.get(category, 0.0) / 1e6 for category in CATEGORIES},
        directions=by_direction(inside),
        hidden_communication_s=hidden / 1e6,
        kernels=kernel_totals(inside),
        matmuls=matmul_totals(inside),
        collectives_s=[(p.end - p.start) / 1e6 for p in in_launch_order(inside) if is_collective(p)],
        copies_s=covered(piece for piece in inside if piece.name.startswith(BETWEEN_CARDS)) / 1e6,
    )


def covered(slices: Iterable[Slice]) -> float:
    """Microseconds in which at least one of them ran; in the order of their starts."""
    total, until = 0.0, -math.inf
    for piece in slices:
        total += max(0.0, piece.end - max(piece.start, until))
        until = max(until, piece.end)
    return total


def in_launch_order(slices: list[Slice]) -> list[Slice]:
    """The same on all ranks, where the order in which streams run them need not be."""
    return sorted(slices, key=lambda piece: piece.start if piece.launched is None else piece.launched)


# --- whose each moment is ---------------------------------------------------------------------------------------------


def attribute(slices: list[Slice], window: Span) -> tuple[dict[str, float], float, list[tuple[Span, Slice | None]]]:
    """(microseconds by category, hidden communication, gaps with the slice that ends each)."""
    begins, ends = window
    points: list[tuple[float, int, int]] = []  # time, 0 = end before 1 = start, index
    for index, piece in enumerate(slices):
        points.append((max(piece.start, begins), 1, index))
        points.append((min(piece.end, ends), 0, index))
    parts: dict[str, float] = defaultdict(float)
    hidden = 0.0
    gaps: list[tuple[Span, Slice | None]] = []
    active: set[int] = set()
    now = begins
    for time, starts, index in sorted(points):
        if time > now:
            if active:
                hidden += share_moment(time - now, [slices[other].category for other in active], parts)
            else:
                gaps.append(((now, time), slices[index]))
            now = time
        if starts:
            active.add(index)
        else:
            active.discard(index)
    if ends > now:
        gaps.append(((now, ends), None))
    return parts, hidden, gaps


def share_moment(length: float, categories: list[str], parts: dict[str, float]) -> float:
    """Give a moment to what ran in it; returns how much of it hides a collective."""
    communicating = COMMUNICATION in categories
    # a CPU's interpreter stands around while a collective runs: that is the wait for it
    compute = [category for category in categories if category not in (COMMUNICATION, COPY, HOST)]
    if compute:
        for category in compute:
            parts[category] += length / len(compute)
        return length if communicating else 0.0
    owner = next(category for category in (COMMUNICATION, COPY, HOST) if category in categories)
    parts[owner] += length
    return 0.0


def explain_gap(gap: Span, piece: Slice | None, data_waits: list[Span]) -> dict[str, float]:
    """An idle stretch of the device: until the next kernel was launched the host was behind (for data, or for its own
    work), after that the device had it and did not run it."""
    begins, ends = gap
    if piece is None or piece.launched is None:
        return {QUEUE: ends - begins}
    launched = min(max(piece.launched, begins), ends)
    for_data = sum(max(0.0, min(launched, end) - max(begins, start)) for start, end in data_waits)
    return {DATA: for_data, HOST: launched - begins - for_data, QUEUE: ends - launched}


# --- totals -----------------------------------------------------------------------------------------------------------


def kernel_totals(slices: list[Slice]) -> list[KernelTotal]:
    """Largest first. A name that serves several purposes stands once for each."""
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for piece in slices:
        times[piece.name, piece.category][piece.of] += (piece.end - piece.start) / 1e6
    totals = [
        KernelTotal(name, category, len(seconds), sum(seconds.values()), statistics.median(seconds.values()))
        for (name, category), seconds in times.items()
    ]
    return sorted(totals, key=lambda total: -total.total_s)


def by_direction(slices: list[Slice]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for piece in slices:
        if piece.direction is not None:
            found[piece.category][piece.direction] += (piece.end - piece.start) / 1e6
    return {category: dict(times) for category, times in found.items()}


def matmul_totals(slices: list[Slice]) -> list[MatmulTotal]:
    found: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for piece in slices:
        if piece.shape is not None and piece.category == MATMUL:
            found[piece.shape, piece.direction][piece.of] += (piece.end - piece.start) / 1e6
    return [
        MatmulTotal(shape, direction, len(seconds), sum(seconds.values()))
        for (shape, direction), seconds in found.items()
    ]


def with_waits(ranks: list[RankBreakdown]) -> list[RankBreakdown]:
    """Note how long each rank waited for others.

    A collective ends on all ranks at once and begins when the last one comes: what a rank's takes longer than the
    shortest is its wait. Before copies to other cards a rank waits with nothing running: what it has of gaps, though
    the next kernel was launched, beyond the rank that has least. Clocks of several machines need not agree for that.
    """
    counts = {len(rank.collectives_s) for rank in ranks}
    copies = all(rank.copies_s > 0 for rank in ranks)
    if len(ranks) < 2 or len(counts) > 1 or (counts == {0} and not copies):
        return ranks
    shortest = [min(times) for times in zip(*(rank.collectives_s for rank in ranks), strict=True)]
    waits = [sum(rank.collectives_s) - sum(shortest) for rank in ranks]
    if copies:
        least = min(rank.parts[QUEUE] for rank in ranks)
        waits = [wait + rank.parts[QUEUE] - least for wait, rank in zip(waits, ranks, strict=True)]
    return [RankBreakdown(**{**rank.__dict__, "waiting_s": wait}) for rank, wait in zip(ranks, waits, strict=True)]
