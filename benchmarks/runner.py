"""Run jobs within the time that is left, and take what was run before from its files. No torch."""

from __future__ import annotations

import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from benchmarks.cases import Cases, Plan
from benchmarks.peers.job import Job, Record, read_record
from benchmarks.processes import Started, end, finish, start
from mfubench.config import ConfigError
from mfubench.machine import describe_cards
from mfubench.run_log import write_json
from mfubench.stop_signals import on_stop
from mfubench.telemetry import sampler_process

FIRST_RUN_S = 170.0  # a run of which nothing is known yet: start, compilation, a few steps
FIRST_RUN_ON_CPU_S = 5.0  # of a tiny model, without compilation
RERUN_MARGIN = 1.25  # a repeat takes about as long as the one before it
LONGEST_RUN_S = 570.0
SETTLED = ("ok", "oom")  # ends that another try would not change


class OutOfTime(Exception):
    """--minutes are over; all that was finished is kept."""


def deadline_after(minutes: float | None) -> float:
    """When --minutes are over, as time.monotonic() tells it; never where none are given. Raises ConfigError."""
    if minutes is None:
        return float("inf")
    if not minutes > 0:
        raise ConfigError(f"--minutes: found {minutes:g}; a positive number, or leave it out")
    return time.monotonic() + minutes * 60


def errors_in_one_line(main: Callable[[Sequence[str] | None], int]) -> Callable[[Sequence[str] | None], int]:
    """A command that tells a ConfigError, of its arguments or of a file below --work, in a line and ends with 1."""

    @functools.wraps(main)
    def command(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return command


@dataclass
class Runner:
    plan: Plan
    cases: Cases
    deadline: float  # of time.monotonic()
    failed_here: set[str] = field(default_factory=set)  # identities of jobs that failed in this process
    failures: list[str] = field(default_factory=list)  # what failed in this process and why, a line each
    kept_s: float = 0.0  # spent by this process on runs that the same command would not make again
    too_long: str | None = None  # how long a run takes for which the same command would never have the time

    @property
    def first_run_s(self) -> float:
        return FIRST_RUN_ON_CPU_S if self.plan.device == "cpu" else FIRST_RUN_S

    def done(self, jobs: Sequence[Job]) -> list[Record] | None:
        """The records of jobs that ran together; None where one of them is missing."""
        records = [read_record(Path(job.output), job) for job in jobs]
        found = [record for record in records if record is not None]
        return found if len(found) == len(jobs) else None

    def settled(self, jobs: Sequence[Job]) -> list[Record] | None:
        """`done`, but for what failed or was not installed in an earlier process: that may have been mended since."""
        found = self.done(jobs)
        if found is None or any(one.status not in SETTLED and one.job not in self.failed_here for one in found):
            return None
        return found

    def run(self, jobs: Sequence[Job], label: str, expected_s: float, cards: Sequence[Sequence[int]]) -> list[Record]:
        """Records of jobs that run at the same time, each on its own cards. Raises OutOfTime."""
        if (known := self.settled(jobs)) is not None:
            return known
        left = self.deadline - time.monotonic()
        if expected_s > left:
            raise self.out_of_time(f"about {expected_s:.0f} s", expected_s - left)
        print(f"{label} …", end=" ", flush=True)
        began = time.monotonic()
        system = self.cases.systems[jobs[0].system]
        cache = (self.plan.work / "cache" / jobs[0].system / jobs[0].run.model.name).resolve()
        on_cpu = self.plan.device == "cpu"
        started: list[Started] = []
        with on_stop(leave):  # jobs lead sessions of their own: without this, they would outlive a SIGTERM
            try:
                for job, own in zip(jobs, cards, strict=True):
                    started.append(start(job, cache, system.environment, None if on_cpu else own))
                records = finish(started, min(LONGEST_RUN_S, left))
            finally:
                for one in started:
                    end(one.process)
        took = time.monotonic() - began
        if None in records and left < LONGEST_RUN_S:
            print("the time is up", flush=True)
            for job in jobs:
                Path(job.output).unlink(missing_ok=True)
            raise self.out_of_time(f"more than {took:.0f} s", took - left)
        results = []
        for one, record in zip(started, records, strict=True):
            if record is None:
                record = Record("failed", reason=f"did not end within {LONGEST_RUN_S:.0f} s", job=one.job.identity)
                record.write(one.job.output)
            results.append(record)
            if record.status not in SETTLED:
                self.failed_here.add(record.job)
            if record.status == "failed":
                self.failures.append(f"{label}: {record.reason}; log: {one.log}")
        if all(record.status in SETTLED for record in results):
            self.kept_s += took
        words = [f"{r.rate:,.0f} tokens/s/GPU" if r.rate else f"{r.status}: {r.reason}" for r in results]
        print(f"{' and '.join(words)} ({results[0].wall_s:.0f} s)", flush=True)
        return results

    def out_of_time(self, length: str, missing_s: float) -> OutOfTime:
        """To be raised where a run of that length lacks `missing_s` seconds.

        The same command would have `kept_s` more for it, since it takes those runs from their files.
        """
        if missing_s > self.kept_s:
            self.too_long = self.too_long or length
        return OutOfTime()

    def exit_code(self, runs_left: int) -> int:
        """Of a command that has run what it could, with closing lines on stderr for what is not as it should be.

        0: all was run, what cannot be had here included; 1: a run failed, or takes longer than --minutes; 75: the same
        command goes on. runs_left: at most, since what runs out of memory or cannot be had leaves others out.
        """
        for failure in self.failures:
            print(f"failed: {failure}", file=sys.stderr)
        if self.too_long is not None:
            print(f"error: one run takes {self.too_long}: raise --minutes", file=sys.stderr)
            return 1
        if runs_left:
            runs = "1 run is" if runs_left == 1 else f"at most {runs_left} runs are"
            print(f"the time was up and {runs} left; the same command goes on where it ended", file=sys.stderr)
            return 75
        return 1 if self.failures else 0


def leave(number: int) -> NoReturn:
    raise SystemExit(128 + number)


def check_machine(work: Path) -> None:
    """Raises ConfigError where WORK holds runs of other cards: they cannot be compared with what would be run here."""
    work.mkdir(parents=True, exist_ok=True)
    count = len(describe_cards()[0])
    nvml, handles, _ = sampler_process.open_cards(list(range(count)))
    cards = [sampler_process.describe_card(nvml, handle, index) for index, handle in enumerate(handles)]
    here = {"cards": [card["uuid"] for card in cards], "node": None if cards else platform.node()}
    file = work / "machine.json"
    try:
        there = json.loads(file.read_text(encoding="utf-8")) if file.exists() else here
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: is no valid JSON ({error}); use another --work, or delete it") from None
    if there != here:
        raise ConfigError(f"{work} holds runs of another machine ({there}; here: {here}): use another --work")
    write_json(file, here)
