"""What several GPUs lose: `python -m benchmarks.scaling`, a job over N cards against the same cards by themselves.

By themselves means N one-GPU jobs at the same time, one a card: they share power, air and host as the joint job's ranks
do, and slow cards are slow in both. The two take turns, with equal micro-batch and accumulation; an efficiency is the
joint job's rate per GPU over the mean of the single ones', repeat by repeat.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import figure, rows
from benchmarks.cases import CHECKOUTS, WORK, Cases, Plan, check_data, job_of, make_run, read_cases, results_folder
from benchmarks.compare import own_settings
from benchmarks.peers.job import Job, Record
from benchmarks.peers.mfubench_engine import run_config
from benchmarks.runner import RERUN_MARGIN, OutOfTime, Runner, check_machine, deadline_after, errors_in_one_line
from mfubench.analysis.statistics import student_t
from mfubench.config import ConfigError
from mfubench.machine import describe_cards
from mfubench.run_log import write_text_atomically

DEFAULT_ARMS = ("mfubench:ddp", "mfubench:zero1", "mfubench:fsdp", "torchtitan:fsdp", "nanogpt:ddp")
ALONE = "none"  # parallelism of the one-GPU jobs
JOINT = ("ddp", "zero1", "fsdp")  # parallelisms of an arm
TRIAL = "trial"


@dataclass(frozen=True)
class Setting:
    """One comparison's work: model, batch and number of cards."""

    model: str
    seq_len: int
    accumulation: int
    cards: int
    micro_batch_size: int | None  # null: the first candidate of the model's case

    @property
    def label(self) -> str:
        return f"{self.model}-accumulation{self.accumulation}"

    @property
    def for_trial(self) -> Setting:
        """One card and one micro-step: what of a model and a system need be tried only once."""
        return dataclasses.replace(self, accumulation=1, cards=1)


class Scaling:
    """The arms (system and parallelism) of one setting."""

    def __init__(self, setting: Setting, arms: Sequence[str], runner: Runner, repeats: int):
        self.setting, self.arms, self.runner, self.repeats = setting, arms, runner, repeats
        self.systems = list(dict.fromkeys(arm.partition(":")[0] for arm in arms))
        self.lost: dict[str, Record] = {}  # system or arm -> why it cannot be had

    def check(self) -> None:
        """Raises ConfigError for an arm or settings that would be refused, before anything runs."""
        if self.repeats < 1:
            raise ConfigError("--repeats: at least 1")
        for arm in self.arms:
            system, _, parallelism = arm.partition(":")
            if system not in self.runner.cases.systems:
                raise ConfigError(f"--arms: {arm}: no such system in benchmarks/cases.yaml")
            if parallelism not in JOINT:
                raise ConfigError(f"--arms: {arm}: write SYSTEM:PARALLELISM, the latter one of {', '.join(JOINT)}")
            for job in (self.trial_job(system), self.job(system, parallelism, self.setting, "checked")):
                if job.driver == "mfubench_engine":
                    run_config(job)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def job(self, system: str, parallelism: str, setting: Setting, name: str, step_time_s: float | None = None) -> Job:
        runner = self.runner
        case = runner.cases.cases.get(setting.model)
        size = setting.micro_batch_size or (case.candidates(system)[0] if case else 8)
        cards = "1-card" if setting.cards == 1 else f"{setting.cards}-cards"
        folder = runner.plan.work / "scaling" / setting.label / cards / f"{system}-{parallelism}" / name
        more = {"world_size": 1 if parallelism == ALONE else setting.cards, "parallelism": parallelism}
        run = make_run(setting.model, setting.seq_len, size, setting.accumulation, runner.plan.device, **more)
        job = job_of(runner.plan, runner.cases, system, run, folder, trial=name == TRIAL)
        return dataclasses.replace(job, step_time_s=step_time_s)

    def trial_job(self, system: str) -> Job:
        return self.job(system, ALONE, self.setting.for_trial, TRIAL)

    def trial(self, system: str) -> Record:
        """A short run on one card: whether the system is to be had, how long its step takes, and its compile cache."""
        label = f"{self.setting.model}: {system}, trial"
        return self.runner.run([self.trial_job(system)], label, self.runner.first_run_s, [[0]])[0]

    def step_time(self, trial: Record | None) -> float | None:
        """Seconds of a step, at most: micro-steps share one optimizer update, which each step of the trial has."""
        return statistics.median(trial.step_times_s) * self.setting.accumulation if trial is not None else None

    def alone(self, system: str, trial: Record | None, number: int) -> list[Job]:
        step = self.step_time(trial)
        names = [f"repeat-{number}-card-{i}-of-{self.setting.cards}" for i in range(self.setting.cards)]
        return [self.job(system, ALONE, self.setting, name, step) for name in names]

    def joint(self, arm: str, trial: Record | None, number: int) -> Job:
        system, _, parallelism = arm.partition(":")
        return self.job(system, parallelism, self.setting, f"repeat-{number}", self.step_time(trial))

    def everything(self) -> None:
        """All repeats in turn: the cards alone, then each parallelism of the system; raises OutOfTime."""
        trials = {system: self.trial(system) for system in self.systems}
        self.lost = {system: record for system, record in trials.items() if record.status != "ok"}
        cards = range(self.setting.cards)
        for number in range(self.repeats):
            for system in self.systems:
                if system in self.lost:
                    continue
                trial, plan = trials[system], self.runner.plan
                expected = RERUN_MARGIN * (trial.wall_s + plan.preheat_s + plan.measure_s)
                label = f"{self.setting.label}, {self.setting.cards} cards, repeat {number}: {system}"
                self.runner.run(
                    self.alone(system, trial, number), f"{label} alone", expected, [[card] for card in cards]
                )
                for arm in self.arms:
                    if arm.partition(":")[0] == system and arm not in self.lost:
                        found = self.runner.run([self.joint(arm, trial, number)], f"{label} {arm}", expected, [cards])
                        if found[0].status != "ok":
                            self.lost[arm] = found[0]

    def runs_left(self) -> list[list[Job]]:
        """Jobs of the runs that the same command would still make, at most: a trial that fails leaves others out."""
        runs: list[list[Job]] = []
        for system in self.systems:
            runs.append([self.trial_job(system)])
            trial = self.runner.settled(runs[-1])
            if trial is not None and trial[0].status != "ok":
                continue
            arms = [arm for arm in self.arms if arm.partition(":")[0] == system and arm not in self.lost]
            for number in range(self.repeats):
                runs.append(self.alone(system, None, number))
                runs += [[self.joint(arm, None, number)] for arm in arms]
        return [jobs for jobs in runs if self.runner.settled(jobs) is None]

    # --- results ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """One row an arm, from what is finished."""
        found = []
        for arm in self.arms:
            system, _, parallelism = arm.partition(":")
            trial = self.runner.done([self.trial_job(system)])
            if trial is None:
                continue
            if trial[0].status != "ok":
                row = rows.row_of(self.job(system, parallelism, self.setting, "-"), trial)
                if row["status"] != "missing":  # the arm itself was not tried
                    row["reason"] = f"trial on one card: {row['reason']}"
                found.append(row)
                continue
            pairs = [
                (alone, joint[0])
                for number in range(self.repeats)
                if (alone := self.runner.done(self.alone(system, trial[0], number)))
                and (joint := self.runner.done([self.joint(arm, trial[0], number)]))
            ]
            if pairs:
                found.append(self.row(arm, self.joint(arm, trial[0], 0), pairs))
        return found

    def row(self, arm: str, job: Job, pairs: Sequence[tuple[list[Record], Record]]) -> dict[str, Any]:
        row = rows.row_of(job, [joint for _, joint in pairs]) | {"arm": arm}
        good = [
            (statistics.mean(single.rate or 0.0 for single in alone), joint.rate, alone)
            for alone, joint in pairs
            if joint.rate and all(single.rate for single in alone)
        ]
        if failed := [single for alone, _ in pairs for single in alone if single.status != "ok"]:
            row["alone_failed"] = f"{failed[0].status}: {failed[0].reason}"  # status and reason are the arm's own
        if not good:
            return row
        q1, median, q3 = rows.quartiles([alone for alone, _, _ in good])
        row["alone_tokens_per_s_per_gpu"] = {"median": median, "q1": q1, "q3": q3, "repeats": len(good)}
        row["alone_by_card"] = [[single.rate for single in singles] for _, _, singles in good]
        row["alone_overlap"] = [overlap(singles) for _, _, singles in good]
        row["efficiency"] = interval([joint / alone for alone, joint, _ in good])
        # each step ends with the slowest card: what cards of unlike speed lose together, no engine can win back
        row["efficiency_of_slowest"] = interval(
            [joint / min(s.rate or 0.0 for s in singles) for _, joint, singles in good]
        )
        return row


def interval(ratios: Sequence[float]) -> dict[str, Any]:
    """Median, and mean with its 95 % interval by Student's t; no interval of a single repeat."""
    found: dict[str, Any] = {"median": statistics.median(ratios), "repeats": len(ratios), "by_repeat": list(ratios)}
    found["mean"] = statistics.mean(ratios)
    if len(ratios) > 1:
        half = student_t(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
        found["low"], found["high"] = found["mean"] - half, found["mean"] + half
    return found


def overlap(records: Sequence[Record]) -> float | None:
    """Share of the longest measured window in which all of the single jobs were measuring."""
    windows = [(r.started_at, r.started_at + r.seconds) for r in records if r.started_at is not None and r.seconds]
    if len(windows) < len(records):
        return None
    together = min(end for _, end in windows) - max(begin for begin, _ in windows)
    return max(0.0, together / max(end - begin for begin, end in windows))


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in found:
        name = row.get("arm") or f"{row['system']}:{row['parallelism']}"
        batch = f"{row['micro_batch_size']} × {row['gradient_accumulation_steps']}"
        rate, efficiency = row["tokens_per_s_per_gpu"], row.get("efficiency")
        together = f"{rate['median']:,.0f}" if rate else f"{row['status']}: {row['reason']}"
        if efficiency is None:
            lines.append([name, f"{row['world_size']}", batch, row.get("alone_failed", ""), together, "", "", ""])
            continue
        alone = row["alone_tokens_per_s_per_gpu"]
        bounds = f"{efficiency['low']:.1%} to {efficiency['high']:.1%}" if "low" in efficiency else ""
        shares = [share for share in row["alone_overlap"] if share is not None]
        lines.append(
            [
                name,
                f"{row['world_size']}",
                batch,
                f"{alone['median']:,.0f}",
                together,
                f"{efficiency['median']:.1%} ({bounds})" if bounds else f"{efficiency['median']:.1%}",
                f"{row['efficiency_of_slowest']['median']:.1%}",
                f"{min(shares):.0%}" if shares else "",
            ]
        )
    header = [
        "arm",
        "GPUs",
        "batch",
        "alone, tokens/s/GPU",
        "together",
        "efficiency (95 %)",
        "of the slowest's",
        "alone at once",
    ]
    return rows.markdown_table(header, lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Scaling of mfubench and its peers over this machine's GPUs.")
    parser.add_argument("--model", nargs="+", default=["llama2-1.36b"])
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), metavar="SYSTEM:PARALLELISM")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of cards; left out: 2, 4, … all")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--micro-batch-size", type=int, help="left out: the first of the model's case in cases.yaml")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--results", type=Path, help="left out: benchmarks/results, with --tiny below --work")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--preheat", type=float, default=10.0)
    parser.add_argument("--measure", type=float, default=15.0)
    parser.add_argument("--minutes", type=float, help="stop in time; the same command goes on where it ended")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="mfubench's, over cases.yaml")
    parser.add_argument("--tiny", action="store_true", help="two processes on a CPU")
    for name in CHECKOUTS.values():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help="its source tree")
    return parser


def prepare(arguments: argparse.Namespace) -> tuple[Cases, Plan, list[Setting], list[str]]:
    """Raises ConfigError."""
    cases = own_settings(read_cases(), arguments.set)
    checkouts = {system: path for system, name in CHECKOUTS.items() if (path := getattr(arguments, name))}
    data = check_data(arguments.data, arguments.tiny)
    if arguments.tiny:
        plan = Plan(data, arguments.work, "cpu", 0.2, 0.5, 0.2, min_steps=3, checkouts=checkouts)
        settings = [Setting("llama2-tiny", 64, accumulation, 2, 2) for accumulation in arguments.accumulation]
        return cases, plan, settings, arguments.arms
    plan = Plan(data, arguments.work, "cuda", arguments.preheat, arguments.measure, checkouts=checkouts)
    here = len(describe_cards()[0])
    counts = arguments.gpus or [2**power for power in range(1, here.bit_length()) if 2**power <= here]
    if here < 2 or max(counts) > here:
        raise ConfigError(f"--gpus: this machine has {here} cards, and {max(counts, default=2)} are needed")
    settings = [
        Setting(model, 2048, accumulation, count, arguments.micro_batch_size)
        for model in arguments.model
        for accumulation in arguments.accumulation
        for count in counts
    ]
    return cases, plan, settings, arguments.arms


@errors_in_one_line
def main(argv: Sequence[str] | None = None) -> int:
    """0: all was run; 75: --minutes are over, the same command goes on; 1: bad input, or a run failed."""
    arguments = make_parser().parse_args(argv)
    deadline = deadline_after(arguments.minutes)
    cases, plan, settings, arms = prepare(arguments)
    runner = Runner(plan, cases, deadline)
    scalings = [Scaling(setting, arms, runner, arguments.repeats) for setting in settings]
    for scaling in scalings:
        scaling.check()
    check_machine(plan.work)
    results = results_folder(arguments.results, arguments.work, arguments.tiny)
    left: set[str] = set()  # first outputs of the runs that are left: settings share their trials
    found: dict[str, list[dict[str, Any]]] = {}
    for setting, scaling in zip(settings, scalings, strict=True):
        try:
            scaling.everything()
        except OutOfTime:
            left |= {jobs[0].output for jobs in scaling.runs_left()}
        found.setdefault(setting.label, []).extend(scaling.rows())
        results.mkdir(parents=True, exist_ok=True)
        of_setting = found[setting.label]
        rows.write_rows(results / f"scaling-{setting.label}.json", of_setting)
        write_text_atomically(results / f"scaling-{setting.label}.md", table(of_setting))
        print(f"\n{setting.label}\n{table(of_setting)}", flush=True)
    for model in dict.fromkeys(setting.model for setting in settings):
        of_model = [row for of_setting in found.values() for row in of_setting if row["model"] == model]
        figure.draw_scaling(results / f"scaling-{model}.png", of_model)
    return runner.exit_code(len(left))


if __name__ == "__main__":
    sys.exit(main())
