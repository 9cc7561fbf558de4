"""One step cut out of what torch.profiler exports (kineto's Chrome trace). No torch.

Kineto's categories: `kernel`, `gpu_memcpy`, `gpu_memset` are device work, their tid is a stream; `cuda_runtime` and
`cuda_driver` are calls of the host, tied to device work by args.correlation; `cpu_op` and `user_annotation` are what
the host ran, nested by thread. Times are microseconds.

What is kept carries its origin with it: the operators that a kernel was launched under (`host`, outermost first), when
it was launched, in which pass, and the shape of a matmul. So nothing has to be looked up again, however much of the
host's side is left out of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

STEP_MARK = "mfubench::step"  # around one optimizer step, on the host
DATA_MARK = "mfubench::data"  # around waiting for its batch
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
HOST_WORK = ("cpu_op", "user_annotation")
MATMUL_OPERATORS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")
KEPT_ARGUMENTS = ("stream", "device", "correlation", "grid", "block", "bytes")
HOST_DEPTH = 8  # enclosing operators kept of each kernel, the innermost ones


@dataclass
class CutStep:
    """One rank's events of one step. `window` is the step on its device's time line (a CPU's: on the host's)."""

    rank: int
    device: str  # cuda | cpu
    window: tuple[float, float]
    main_thread: int
    base_ns: int  # what the times count from, in nanoseconds of the machine's clock
    events: list[Event] = field(default_factory=list)
    flows: list[Event] = field(default_factory=list)  # arrows from launches to kernels


def end_of(event: Event) -> float:
    return float(event["ts"] + event.get("dur", 0))


def cut_step(trace: dict[str, Any], rank: int = 0) -> CutStep | None:
    """The last marked step of a trace; without any mark all of it. None where nothing took time."""
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    work = [event for event in spans if event.get("cat") in DEVICE_WORK]
    host = [event for event in spans if event.get("cat") in HOST_WORK]
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    if not work and not host:
        return None
    mark = step_mark(host)
    main_thread = mark["tid"] if mark else next((event["tid"] for event in host), 0)
    if not work:
        window = (mark["ts"], end_of(mark)) if mark else extent(host)
        kept = [event for event in host if overlaps(event, window)]
        return CutStep(rank, "cpu", window, main_thread, base_ns, kept)
    launches = [event for event in spans if event.get("cat") in LAUNCHES]
    note_origins(work, launches, host)
    window = device_window(work, mark)
    kept = [event for event in work if overlaps(event, window)]
    launched = [event["args"]["launched"] for event in kept if "launched" in event["args"]]
    begins = min([window[0], *launched], default=window[0])
    during = (max(begins, mark["ts"]) if mark else begins, window[1])
    kept += [event for event in [*launches, *host] if overlaps(event, during)]
    flows = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") == "ac2g" and during[0] <= event.get("ts", -1) <= during[1]
    ]
    return CutStep(rank, "cuda", window, main_thread, base_ns, kept, flows)


def step_mark(host: list[Event]) -> Event | None:
    """The annotation around the last step: ours, or the profiler's own."""
    for begins in (STEP_MARK, "ProfilerStep#"):
        marks = [event for event in host if event["name"].startswith(begins)]
        if marks:
            return max(marks, key=lambda event: event["ts"])
    return None


def extent(events: list[Event]) -> tuple[float, float]:
    return min(event["ts"] for event in events), max(end_of(event) for event in events)


def overlaps(event: Event, window: tuple[float, float]) -> bool:
    return bool(event["ts"] < window[1] and end_of(event) > window[0])


def device_window(work: list[Event], mark: Event | None) -> tuple[float, float]:
    """From the end of the work launched before the step to the end of the step's own, as step times are measured.

    Work belongs to the step in which it was launched, on whatever thread; without a mark all of it does.
    """
    if mark is None:
        return extent(work)

    def launched(event: Event) -> float:
        return float(event["args"].get("launched", event["ts"]))

    own = [event for event in work if mark["ts"] <= launched(event) < end_of(mark)]
    if not own:
        return extent(work)
    before = [end_of(event) for event in work if launched(event) < mark["ts"]]
    begins = max(before) if before else min(mark["ts"], *(event["ts"] for event in own))
    return begins, max(end_of(event) for event in own)


def note_origins(work: list[Event], launches: list[Event], host: list[Event]) -> None:
    """Write into each piece of device work when and under which operators of the host it was launched."""
    launch_of = {event["args"]["correlation"]: event for event in launches if "correlation" in event.get("args", {})}
    found = {id(launch): enclosing for launch, enclosing in nested(host, launches)}
    for event in work:
        correlation = event.setdefault("args", {}).get("correlation")
        if correlation not in launch_of:
            continue
        launch = launch_of[correlation]
        event["args"]["launched"] = launch["ts"]
        enclosing = found.get(id(launch), [])
        operators = [other for other in enclosing if other["cat"] == "cpu_op"]
        names = [other["name"] for other in enclosing if not other["name"].startswith((STEP_MARK, "ProfilerStep#"))]
        event["args"]["host"] = names[-HOST_DEPTH:]
        if operators:  # a replayed graph has no operators, so nothing tells its passes apart
            event["args"]["pass"] = pass_of(names)
        if (shape := matmul_shape(operators)) is not None:
            event["args"]["shape"] = list(shape)


def pass_of(enclosing: list[str]) -> str:
    """forward or backward, by the names of the operators around it."""
    return "backward" if any(name.startswith("autograd::engine") for name in enclosing) else "forward"


def matmul_shape(operators: list[Event]) -> tuple[int, int, int] | None:
    """(m, k, n) of the innermost matmul operator, where the profiler recorded shapes."""
    for event in reversed(operators):
        if event["name"] in MATMUL_OPERATORS:
            matrices = [size for size in event.get("args", {}).get("Input Dims", []) if len(size) == 2]
            # addmm adds to a vector or a matrix; what it writes to may stand last
            factors = matrices[1:3] if event["name"] == "aten::addmm" and len(matrices) > 2 else matrices[:2]
            if len(factors) == 2 and factors[0][1] == factors[1][0]:
                return factors[0][0], factors[0][1], factors[1][1]
    return None


def nested(host: list[Event], points: list[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each event of `points` with the host events around it on its own thread, outermost first."""
    threads: dict[Any, list[tuple[float, float, bool, Event]]] = {}
    for is_point, events in ((False, host), (True, points)):
        for event in events:
            entry = (event["ts"], -event["dur"], is_point, event)
            threads.setdefault((event.get("pid"), event["tid"]), []).append(entry)
    for entries in threads.values():
        stack: list[Event] = []
        for ts, _, is_point, event in sorted(entries, key=lambda entry: entry[:3]):
            while stack and end_of(stack[-1]) <= ts:
                stack.pop()
            if is_point:
                yield event, list(stack)
            else:
                stack.append(event)
