"""mfubench against other systems on one card: `benchmarks/run.sh`, which is `python -m benchmarks.compare`.

Where a case names several micro-batches for a system, each is first tried shortly and the fastest taken. Then all
systems are repeated in turn, A B C A B C …, every run a process of its own. Finished runs are kept as files: what was
broken off, by --minutes or otherwise, goes on where it ended. Results are written anew after each run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figure, rows
from benchmarks.cases import CHECKOUTS, FILE, WORK, Case, Cases, Plan, check_data, make_job, read_cases, results_folder
from benchmarks.peers.job import Job, Record
from benchmarks.peers.mfubench_engine import run_config
from benchmarks.runner import (
    RERUN_MARGIN,
    SETTLED,
    OutOfTime,
    Runner,
    check_machine,
    deadline_after,
    errors_in_one_line,
)
from mfubench.config import ConfigError
from mfubench.experiments import parse_overrides
from mfubench.run_log import write_text_atomically


class Bench:
    """One case: its systems, their jobs, and the files of those that are done."""

    def __init__(self, name: str, systems: Sequence[str], runner: Runner, repeats: int):
        self.name, self.systems, self.runner, self.repeats = name, systems, runner, repeats
        self.cases, self.plan = runner.cases, runner.plan
        self.tried: dict[str, dict[int, Record]] = {system: {} for system in systems}
        self.repeated: dict[str, list[Record]] = {system: [] for system in systems}

    # --- runs ---------------------------------------------------------------------------------------------------------

    def trial(self, system: str, size: int) -> Job:
        return make_job(self.plan, self.cases, self.name, system, size, f"trial-mb{size}", trial=True)

    def repeat(self, system: str, size: int, number: int) -> Job:
        job = make_job(self.plan, self.cases, self.name, system, size, f"mb{size}-repeat-{number}", trial=False)
        times = known[-1].step_times_s if (known := self.known(system, size)) else []
        return dataclasses.replace(job, step_time_s=statistics.median(times)) if times else job

    def run(self, job: Job, expected_s: float) -> Record:
        return self.runner.run([job], f"{self.name}: {job.system}, {job.folder.name}", expected_s, [[0]])[0]

    def candidates(self, system: str) -> tuple[int, ...]:
        return self.cases.cases[self.name].candidates(system)

    def try_sizes(self, system: str) -> None:
        """Run each candidate micro-batch shortly."""
        while sizes := self.untried(system):
            self.tried[system][sizes[0]] = self.run(self.trial(system, sizes[0]), self.runner.first_run_s)
            self.write()

    def untried(self, system: str) -> list[int]:
        """Candidates that a trial is still to choose from: after an out-of-memory none that is larger."""
        candidates, tried = self.candidates(system), self.tried[system]
        if len(candidates) == 1 or any(record.status not in SETTLED for record in tried.values()):
            return []  # there is no choice, or the system is missing or broken: with any batch
        limit = min((size for size, record in tried.items() if record.status == "oom"), default=sys.maxsize)
        return [size for size in candidates if size not in tried and size < limit]

    def best_size(self, system: str) -> int | None:
        """The fastest of those tried, or the one candidate that needs no trial; None where none ran."""
        if len(candidates := self.candidates(system)) == 1:
            return candidates[0]
        rates = {size: record.rate for size, record in self.tried[system].items() if record.rate}
        return max(rates, key=lambda size: rates[size] or 0.0) if rates else None

    def known(self, system: str, size: int) -> list[Record]:
        """Runs of the same work that are done: the repeats or, before the first, the trial."""
        trial = self.tried[system].get(size)
        return self.repeated[system] or ([trial] if trial else [])

    def everything(self) -> None:
        for system in self.systems:
            self.try_sizes(system)
        self.write()
        for number in range(self.repeats):
            for system in self.systems:
                if self.is_lost(system) or (size := self.best_size(system)) is None:
                    continue
                known = self.known(system, size)
                longer_s = 0.0 if self.repeated[system] else self.plan.preheat_s + self.plan.measure_s
                expected_s = (known[-1].wall_s + longer_s) * RERUN_MARGIN if known else self.runner.first_run_s
                self.repeated[system].append(self.run(self.repeat(system, size, number), expected_s))
                self.write()

    def is_lost(self, system: str) -> bool:
        """Whether all that a system ran did not go well: it would fail again."""
        known = self.repeated[system] or self.tried[system].values()
        return bool(known) and all(one.status != "ok" for one in known)

    def runs_left(self) -> int:
        """Runs that the same command would still make, at most: a trial that fails leaves others out."""
        left = 0
        for system in self.systems:
            left += len(untried := self.untried(system))
            if untried or not self.is_lost(system):
                left += self.repeats - len(self.repeated[system])
        return left

    # --- results ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict]:
        found = []
        for system in self.systems:
            tried, repeated = self.tried[system], self.repeated[system]
            if not tried and not repeated:
                continue  # its turn has not come
            words = {str(size): f"{r.rate:,.0f} tokens/s/GPU" if r.rate else r.status for size, r in tried.items()}
            if (size := self.best_size(system)) is None:
                broken = [size for size, record in tried.items() if record.status not in SETTLED]
                size = next(iter(broken or tried))
                found.append(rows.row_of(self.trial(system, size), [tried[size]], words))
            elif repeated:
                found.append(rows.row_of(self.repeat(system, size, 0), repeated, words))
        return found

    def write(self) -> None:
        """work/NAME/rows.json; `publish` makes the result files of it."""
        rows.write_rows(self.plan.work / self.name / "rows.json", self.rows())

    def publish(self, results: Path) -> str:
        """Write JSON, table and figure; returns the table."""
        found = self.rows()
        mfu = {}
        for row in found:
            if rate := row["tokens_per_s_per_gpu"]:
                job = self.trial(row["system"], row["micro_batch_size"])
                mfu[row["system"]] = rows.palm_mfu(job, row["card"], rate["median"])
        table = rows.peers_table(found, mfu)
        results.mkdir(parents=True, exist_ok=True)
        rows.write_rows(results / f"peers-{self.name}.json", found)
        write_text_atomically(results / f"peers-{self.name}.md", table)
        draw(results / f"peers-{self.name}.png", self.name, self.cases.cases[self.name], self.plan, found)
        return table


def draw(path: Path, name: str, case: Case, plan: Plan, found: Sequence[dict[str, Any]]) -> None:
    """The figure of a case's rows; the title says what tells the case from others of its model."""
    card = next((row["card"] for row in found if row["card"]), None) or "CPU"
    torch_version = next((row["torch"] for row in found if row["torch"]), "")
    own_name = name.replace(case.model, "").strip("-")
    figure.draw(
        path,
        found,
        f"{case.model}{f', {own_name}' if own_name else ''}: tokens per second on one {card}",
        f"{case.sequences_per_step} sequences of {case.seq_len:,} tokens a step, same tokens, AdamW, clipped; batch "
        f"= micro-batch × accumulation; torch {torch_version}; {plan.measure_s:.0f} s a run after "
        f"{plan.preheat_s:.0f} s of preheating, repeats in turn.",
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare mfubench with other systems on one GPU.")
    parser.add_argument("--case", nargs="+", help="cases of the file, or all; default: llama2-1.36b")
    parser.add_argument("--cases", type=Path, default=FILE, metavar="FILE", help="another file than cases.yaml")
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--data", type=Path, help="folder of a prepared dataset: the tokens that all systems read")
    parser.add_argument("--work", type=Path, default=WORK, help="logs, caches, runs")
    parser.add_argument("--results", type=Path, help="left out: benchmarks/results, with --tiny below --work")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--preheat", type=float, default=10.0, help="seconds before the measured window")
    parser.add_argument("--measure", type=float, default=20.0, help="seconds of the measured window")
    parser.add_argument("--minutes", type=float, help="stop in time; the same command goes on where it ended")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of mfubench, over cases.yaml"
    )
    parser.add_argument("--tiny", action="store_true", help="the whole harness on a CPU, in two minutes")
    for name in CHECKOUTS.values():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help="its source tree")
    return parser


def own_settings(cases: Cases, pairs: list[str]) -> Cases:
    """The cases with KEY=VALUE settings for all systems that are mfubench's engine."""
    own = {
        name: system.model_copy(update={"settings": system.settings | parse_overrides(pairs)})
        for name, system in cases.systems.items()
        if system.driver == "mfubench_engine"
    }
    return cases.model_copy(update={"systems": cases.systems | own})


def prepare(arguments: argparse.Namespace) -> tuple[Cases, Plan, list[str]]:
    """Cases, plan and the names of the cases to run. Raises ConfigError."""
    if arguments.repeats < 1:
        raise ConfigError(f"--repeats: found {arguments.repeats}; at least 1")
    if arguments.tiny and arguments.case:
        raise ConfigError("--tiny runs cases of its own: leave out --case")
    cases = read_cases(arguments.cases)
    checkouts = {system: path for system, name in CHECKOUTS.items() if (path := getattr(arguments, name))}
    for path in checkouts.values():
        if not path.is_dir():
            raise ConfigError(f"{path}: is no folder; a peer's source tree was expected there")
    data = check_data(arguments.data, arguments.tiny)
    plan = Plan(data, arguments.work, checkouts=checkouts)
    plan = dataclasses.replace(plan, preheat_s=arguments.preheat, measure_s=arguments.measure)
    names = arguments.case or ["llama2-1.36b"]
    if arguments.tiny:
        plan = dataclasses.replace(plan, device="cpu", preheat_s=0.2, measure_s=0.5, trial_s=0.2, min_steps=3)
        names = ["tiny", "tiny-gpt2"]
    if names == ["all"]:
        names = [name for name in cases.cases if not name.startswith("tiny")]
    if unknown := [name for name in names if name not in cases.cases]:
        raise ConfigError(f"--case: no case {unknown[0]!r} in {arguments.cases}: {', '.join(cases.cases)}")
    if unknown := [name for name in arguments.systems or () if name not in cases.systems]:
        raise ConfigError(f"--systems: no system {unknown[0]!r} in {arguments.cases}: {', '.join(cases.systems)}")
    cases = own_settings(cases, arguments.set)
    if arguments.systems:
        chosen = {name: cases.cases[name].model_copy(update={"systems": tuple(arguments.systems)}) for name in names}
        cases = cases.model_copy(update={"cases": cases.cases | chosen})
    check_own_settings(cases, plan, names)
    return cases, plan, names


def check_own_settings(cases: Cases, plan: Plan, names: Sequence[str]) -> None:
    """Raises ConfigError where mfubench would refuse its settings, before anything runs."""
    for name in names:
        for system in cases.cases[name].systems:
            if cases.systems[system].driver == "mfubench_engine":
                size = cases.cases[name].candidates(system)[0]
                run_config(make_job(plan, cases, name, system, size, "checked", trial=True))


@errors_in_one_line
def main(argv: Sequence[str] | None = None) -> int:
    """0: all was run; 75: --minutes are over, the same command goes on; 1: bad input, or a run failed."""
    arguments = make_parser().parse_args(argv)
    deadline = deadline_after(arguments.minutes)
    cases, plan, names = prepare(arguments)
    check_machine(plan.work)
    runner, runs_left = Runner(plan, cases, deadline), 0
    results = results_folder(arguments.results, arguments.work, arguments.tiny)
    for name in names:
        bench = Bench(name, cases.cases[name].systems, runner, arguments.repeats)
        try:
            bench.everything()
        except OutOfTime:
            runs_left += bench.runs_left()
        print(f"\n{name}\n{bench.publish(results)}", flush=True)
    return runner.exit_code(runs_left)


if __name__ == "__main__":
    sys.exit(main())
