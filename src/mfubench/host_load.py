"""Whether a machine did other work while it measured: the host's load beside what the measured processes got.

And which cores a CPU run's processes had: more of them may share the cores that one had alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mfubench.ceilings.schema import Ceilings
from mfubench.run_log import RunLog
from mfubench.telemetry_record import Telemetry

LACKING = 0.25  # of the cores that its threads could use, which a run did not get: less is waiting of its own


@dataclass(frozen=True)
class Contention:
    """Other processes held cores that the measured ones had use for."""

    others: float  # cores that other processes used, median
    cores: int  # of the machine
    used: float  # cores that the measured processes got, median
    wanted: int  # cores that their threads could have used

    def __str__(self) -> str:
        return (
            f"other processes took {self.others:.1f} of {self.cores} cores while this ran, and it got {self.used:.1f} "
            f"for {self.wanted} threads: not a measurement of this machine"
        )


def contention_of_run(log: RunLog) -> Contention | None:
    """What other processes took from a CPU run; None where they took nothing of weight, or nobody looked.

    Of a run that was resumed, of the process that they took most from. A GPU run's threads mostly wait for the device,
    so that what they did not get cannot be told from what they did not want: there telemetry's `host_limited` says
    whether the cards waited.
    """
    environment, config = log.environment, log.config
    if environment.device != "cpu":
        return None
    ranks_here = max(1, config.world_size // config.nnodes)
    threads = ranks_here * environment.cpu_threads
    found = [contention(telemetry, threads, environment.cpu_count) for telemetry in log.telemetry_of_measured()]
    return max((taken for taken in found if taken is not None), key=lambda taken: taken.others, default=None)


def contention_of_ceilings(ceilings: Ceilings, cores: int) -> Contention | None:
    """As `contention_of_run`, of the ceilings of a machine of so many cores."""
    return contention(ceilings.telemetry, ceilings.threads, cores) if ceilings.device == "cpu" else None


def contention(telemetry: Telemetry | None, threads: int, cores: int) -> Contention | None:
    """As `contention_of_run`, of any telemetry summary: `threads` could have used as many of the machine's `cores`.

    Both must hold: the measured processes got clearly fewer cores than they have threads, and the machine had none
    idle that they could have had instead.
    """
    host = telemetry.get("host", {}) if telemetry is not None else {}
    load, own = host.get("cpu_percent"), host.get("run_cores")
    if not load or not own:
        return None
    wanted = min(threads, cores)
    lacking, idle = wanted - own["median"], cores * (1 - load["median"] / 100)
    others = cores - idle - own["median"]
    if lacking < LACKING * wanted or idle > lacking / 2 or others < LACKING * wanted:
        return None
    return Contention(others, cores, own["median"], wanted)


@dataclass(frozen=True)
class ProcessCores:
    """What the processes of a CPU run had."""

    threads: int  # of one process
    cores: int  # that the threads of all of them could use, on all nodes
    crowded: bool = False  # there were more threads than cores


def cores_of_run(log: RunLog) -> ProcessCores | None:
    """None of a GPU run, whose processes have a card each."""
    environment, config = log.environment, log.config
    if environment.device != "cpu":
        return None
    threads, there = config.world_size * environment.cpu_threads, config.nnodes * environment.cpu_count
    return ProcessCores(environment.cpu_threads, min(threads, there), crowded=threads > there)


def shared_cores(by_processes: Sequence[ProcessCores | None]) -> str | None:
    """In words, that more processes shared the cores that fewer had, or one another's: no scaling of hardware.

    by_processes: the fewest first. None where more processes had more cores, one for each thread, and of GPU runs.
    """
    known = [cores for cores in by_processes if cores is not None]
    if not any(more.cores <= known[0].cores or more.crowded for more in known[1:]):
        return None
    threads = ", ".join(str(cores.threads) for cores in known)
    return f"the processes share the same cores (threads a process: {threads})"
