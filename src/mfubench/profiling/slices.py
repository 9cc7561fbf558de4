"""What took time in a step: kernels on a device's streams, or the own time of a CPU's operators. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mfubench.profiling.categories import (
    BETWEEN_CARDS,
    COMMUNICATION,
    DATA,
    MATMUL,
    category_of_kernel,
    category_of_operator,
)
from mfubench.profiling.chrome_trace import (
    DATA_MARK,
    DEVICE_WORK,
    HOST_WORK,
    STEP_MARK,
    CutStep,
    Event,
    end_of,
    matmul_shape,
    pass_of,
)

Span = tuple[float, float]  # microseconds on the rank's time line


@dataclass(frozen=True)
class Slice:
    """Something that took time on one lane (a stream, a thread). On a CPU a piece of an operator's own time."""

    name: str
    category: str
    start: float
    end: float
    launched: float | None = None
    direction: str | None = None  # forward | backward
    shape: tuple[int, int, int] | None = None  # of a matmul: m, k, n
    of: int = 0  # the event that this is (a piece of)


def overlap(piece: Slice, window: Span) -> float:
    return min(piece.end, window[1]) - max(piece.start, window[0])


def is_collective(piece: Slice) -> bool:
    """A transfer that waits for all ranks: not the operator that asks for it, nor a copy, which has waited before."""
    return piece.category == COMMUNICATION and not piece.name.startswith(("c10d::", BETWEEN_CARDS))


def device_slices(step: CutStep) -> Iterable[Slice]:
    for event in step.events:
        if event["cat"] not in DEVICE_WORK:
            continue
        arguments = event.get("args", {})
        category = category_of_kernel(event["name"], tuple(arguments.get("host", ())))
        yield Slice(
            event["name"],
            category,
            event["ts"],
            end_of(event),
            arguments.get("launched"),
            arguments.get("pass"),
            tuple(arguments["shape"]) if "shape" in arguments else None,
            id(event),
        )


def operator_slices(step: CutStep) -> Iterable[Slice]:
    """A CPU's operators as pieces of own time, thread by thread: inside an operator, what its callees do not take.

    Only the thread of the step and collectives (gloo has threads of its own) are work of the step.
    """
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in step.events:
        if event["cat"] not in HOST_WORK:
            continue
        if event["tid"] == step.main_thread:
            threads[event["tid"]].append(event)
        elif category_of_operator(event["name"]) == COMMUNICATION:
            yield Slice(event["name"], COMMUNICATION, event["ts"], end_of(event), of=id(event))
    for events in threads.values():
        for event, enclosing, start, end in own_time(events):
            names = tuple(other["name"] for other in enclosing if not other["name"].startswith(STEP_MARK))
            waiting = any(name.startswith(DATA_MARK) for name in names)
            category = DATA if waiting else category_of_operator(event["name"], names)
            direction = pass_of([*names, event["name"]])
            shape = matmul_shape([*enclosing, event]) if category == MATMUL else None
            yield Slice(event["name"], category, start, end, None, direction, shape, id(event))


def own_time(events: list[Event]) -> Iterable[tuple[Event, list[Event], float, float]]:
    """(event, those around it, start, end) for each stretch in which an event of one thread is the innermost."""
    stack: list[Event] = []
    now = 0.0
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while stack and end_of(stack[-1]) <= event["ts"]:
            done = stack.pop()
            if end_of(done) > now:
                yield done, list(stack), now, end_of(done)
                now = end_of(done)
        if stack and event["ts"] > now:
            yield stack[-1], stack[:-1], now, event["ts"]
        now = max(now, event["ts"])
        stack.append(event)
    while stack:
        done = stack.pop()
        if end_of(done) > now:
            yield done, list(stack), now, end_of(done)
            now = end_of(done)
