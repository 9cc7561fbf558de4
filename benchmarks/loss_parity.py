"""Whether speed changes the mathematics: `python -m benchmarks.loss_parity`, the fast settings against the plain ones.

The reference is the engine without compiler and own kernels, with float32 masters. Each seed gives initial weights and
order of the text; the reference runs each seed once and the first one twice. Two things can be called its run-to-run
spread: what the same seed gives twice (the order of sums on a GPU is not fixed, and training amplifies it), and what
other seeds give. An arm is held against the reference of its own seed, so that only the mathematics differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figure, rows
from benchmarks.cases import WORK, Cases, Plan, check_data, job_of, make_run, read_cases, results_folder
from benchmarks.compare import own_settings
from benchmarks.peers.job import Job
from benchmarks.peers.mfubench_engine import run_config
from benchmarks.runner import (
    FIRST_RUN_ON_CPU_S,
    RERUN_MARGIN,
    OutOfTime,
    Runner,
    check_machine,
    deadline_after,
    errors_in_one_line,
)
from mfubench.config import ConfigError
from mfubench.data.meta import DatasetMeta, read_meta
from mfubench.run_log import read_run_log, write_json, write_text_atomically

REFERENCE = "mfubench-eager"
AGAIN = "again"  # label of the second run of the reference's first seed
FIRST_SEED = 1234
USUAL_RUN_S = 90.0  # where no other run of its system tells how long one takes
TINY_STEP_S = 0.05  # of a tiny run, which takes as long as its steps
TAIL = 0.25  # share of the steps, at the end, whose mean loss is compared


@dataclasses.dataclass(frozen=True)
class Work:
    model: str
    seq_len: int
    micro_batch_size: int
    accumulation: int
    steps: int
    seeds: int


class Parity:
    """Runs of the reference and of each arm, seed by seed, and the curves of those that are done."""

    def __init__(self, work: Work, arms: Sequence[str], runner: Runner):
        self.work, self.arms, self.runner = work, list(dict.fromkeys(arms)), runner
        self.dataset = dataset_key(runner.plan.data)

    def check(self) -> None:
        """Raises ConfigError where mfubench would refuse the work or an arm's settings, before anything runs."""
        for system, seed, label in self.plan():
            run_config(self.job(system, seed, label))

    # --- runs ---------------------------------------------------------------------------------------------------------

    def job(self, system: str, seed: int, label: str = "first") -> Job:
        work, plan = self.work, self.runner.plan
        more = {"dataset": self.dataset, "seed": FIRST_SEED + seed, "measurement": {"profile": "none"}}
        run = make_run(work.model, work.seq_len, work.micro_batch_size, work.accumulation, plan.device, **more)
        folder = plan.work / "loss-parity" / work.model / f"{system}-seed{seed}-{label}"
        job = job_of(plan, self.runner.cases, system, run, folder)
        return dataclasses.replace(job, preheat_s=0.0, measure_s=0.0, warmup_steps=0, min_steps=work.steps - 1)

    def plan(self) -> list[tuple[str, int, str]]:
        """(system, seed, label) of every run, in the order in which they are made."""
        found = []
        for seed in range(self.work.seeds):
            found += [(system, seed, "first") for system in (REFERENCE, *self.arms)]
            if seed == 0:
                found.append((REFERENCE, 0, AGAIN))
        return found

    def everything(self, first_run_s: float) -> None:
        """All runs in turn; `first_run_s` is what one may take of whose system none is done. Raises OutOfTime."""
        expected_s: dict[str, float] = {}
        for system, seed, label in self.plan():
            job = self.job(system, seed, label)
            expected = expected_s.get(system, first_run_s)
            (record,) = self.runner.run([job], f"loss of {self.work.model}: {job.folder.name}", expected, [[0]])
            if record.status == "ok":
                expected_s[system] = RERUN_MARGIN * record.wall_s

    def runs_left(self) -> int:
        """Runs that the same command would still make."""
        return sum(self.runner.settled([self.job(*run)]) is None for run in self.plan())

    # --- results ------------------------------------------------------------------------------------------------------

    def curve(self, system: str, seed: int, label: str) -> list[float] | str | None:
        """Loss of each step, or why a finished run has no curve; None where the run is not done."""
        job = self.job(system, seed, label)
        if (records := self.runner.done([job])) is None:
            return None
        losses = (
            [step.loss for step in read_run_log(job.folder / "run.json").steps] if records[0].status == "ok" else []
        )
        known = [loss for loss in losses if loss is not None]
        return known if known and len(known) == len(losses) else f"{records[0].status}: {records[0].reason}"

    def result(self) -> dict[str, Any]:
        """Curves, why others are not there, spreads of the reference, and each arm's differences from it."""
        seeds = range(self.work.seeds)
        curves: dict[str, list[float]] = {}
        lost: dict[str, str] = {}
        for run in self.plan():
            name = "{} {} {}".format(*run)
            curve = self.curve(*run)
            if isinstance(curve, list):
                curves[name] = curve
            elif curve is not None:
                lost[name] = curve
        references = {
            seed: curves[f"{REFERENCE} {seed} first"] for seed in seeds if f"{REFERENCE} {seed} first" in curves
        }
        again = curves.get(f"{REFERENCE} 0 {AGAIN}")
        tails = [tail(curve) for curve in references.values()]
        record = self.runner.done([self.job(REFERENCE, 0)])
        return {
            **dataclasses.asdict(self.work),
            "card": record[0].card if record else None,
            "torch": record[0].torch if record else None,
            "reference": {
                "system": REFERENCE,
                "settings": self.runner.cases.systems[REFERENCE].settings,
                "tail_loss_by_seed": tails,
                "between_seeds_stdev": statistics.stdev(tails) if len(tails) > 1 else None,
                "same_seed_again": difference(references[0], again) if again and 0 in references else None,
            },
            "arms": {
                arm: {
                    "settings": self.runner.cases.systems[arm].settings,
                    "by_seed": [
                        difference(references[seed], curves[f"{arm} {seed} first"])
                        for seed in references
                        if f"{arm} {seed} first" in curves
                    ],
                }
                for arm in self.arms
            },
            "curves": curves,
            "lost": lost,
        }


def dataset_key(folder: Path) -> str:
    """A key of the tokens themselves: losses of other tokens are another run's, wherever they lie."""
    splits = read_meta(DatasetMeta, folder).splits
    content = [shard.sha256 for split in ("train", "val") if split in splits for shard in splits[split].shards]
    return f"tokens-{hashlib.sha256(' '.join(content).encode()).hexdigest()[:16]}"


def tail(curve: Sequence[float]) -> float:
    """Mean loss of the last quarter of the steps."""
    return statistics.mean(curve[-max(1, round(len(curve) * TAIL)) :])


def difference(reference: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How far a curve is from the reference's, in nats: at the end (tail minus tail) and step by step."""
    apart = [a - b for a, b in zip(other, reference, strict=True)]
    return {
        "tail": tail(other) - tail(reference),
        "root_mean_square": statistics.mean(d * d for d in apart) ** 0.5,
        "largest": max(map(abs, apart)),
    }


def table(result: dict[str, Any]) -> str:
    """Differences in nats: the reference against itself, then each arm; and the verdict over all seeds."""
    reference = result["reference"]
    between = reference["between_seeds_stdev"]
    again = reference["same_seed_again"]
    lines = []
    if again:
        lines.append(
            [f"{REFERENCE}, same seed again", "1", f"{again['tail']:+.4f}", f"{again['root_mean_square']:.4f}", ""]
        )
    if between is not None:
        lines.append(
            [
                f"{REFERENCE}, other seeds (standard deviation)",
                f"{len(reference['tail_loss_by_seed'])}",
                f"{between:.4f}",
                "",
                "",
            ]
        )
    for arm, found in result["arms"].items():
        apart = found["by_seed"]
        if not apart:
            own = [why for name, why in result["lost"].items() if name.split()[0] == arm]
            references = [f"{REFERENCE}: {why}" for name, why in result["lost"].items() if name.split()[0] == REFERENCE]
            lines.append([arm, "0", "", "", "; ".join(own[:1] + references[:1]) or "not measured"])
            continue
        tails = ", ".join(f"{one['tail']:+.4f}" for one in apart)
        squares = ", ".join(f"{one['root_mean_square']:.4f}" for one in apart)
        lines.append([arm, f"{len(apart)}", tails, squares, verdict(apart, between)])
    last = max(1, round(result["steps"] * TAIL))
    return rows.markdown_table(
        ["", "seeds", f"loss of the last {last} steps, difference", "difference a step, rms", ""], lines
    )


def verdict(apart: Sequence[dict[str, float]], between: float | None) -> str:
    """Within the spread: no seed's end is further from the reference than other seeds are from each other."""
    if between is None:
        return "one seed: no spread to hold it against"
    furthest = max(abs(one["tail"]) for one in apart)
    return "within the spread" if furthest <= between else f"beyond the spread ({furthest / between:.1f} times)"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Loss curves of mfubench's fast settings against its plain ones.")
    parser.add_argument("--model", default="llama2-1.36b")
    parser.add_argument("--arms", nargs="+", default=["mfubench"], metavar="SYSTEM", help="of cases.yaml, our own")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder of a prepared dataset (resources/datasets/NAME)")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--results", type=Path, help="left out: benchmarks/results, with --tiny below --work")
    parser.add_argument("--minutes", type=float, help="stop in time; the same command goes on where it ended")
    parser.add_argument("--expected", type=float, help="seconds that a system's first run may take, for --minutes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="over the arms' settings")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    return parser


def prepare(arguments: argparse.Namespace) -> tuple[Cases, Plan, Work]:
    """Raises ConfigError."""
    cases = read_cases()
    for arm in arguments.arms:
        if arm not in cases.systems or cases.systems[arm].driver != "mfubench_engine":
            own = ", ".join(name for name, system in cases.systems.items() if system.driver == "mfubench_engine")
            raise ConfigError(f"--arms: {arm}: is none of mfubench's own systems in benchmarks/cases.yaml: {own}")
    if min(arguments.steps, arguments.seeds) < 1 or arguments.steps < 2:
        raise ConfigError("--steps: at least 2, and --seeds: at least 1")
    plain = cases.systems[REFERENCE]
    cases = own_settings(cases, arguments.set)
    cases = cases.model_copy(update={"systems": cases.systems | {REFERENCE: plain}})
    work = Work(
        arguments.model, 2048, arguments.micro_batch_size, arguments.accumulation, arguments.steps, arguments.seeds
    )
    data = check_data(arguments.data, arguments.tiny)
    if arguments.tiny:
        return cases, Plan(data, arguments.work, "cpu"), dataclasses.replace(work, model="llama2-tiny", seq_len=64)
    return cases, Plan(data, arguments.work, "cuda"), work


@errors_in_one_line
def main(argv: Sequence[str] | None = None) -> int:
    """0: all was run; 75: --minutes are over, the same command goes on; 1: bad input, or a run failed."""
    arguments = make_parser().parse_args(argv)
    deadline = deadline_after(arguments.minutes)
    cases, plan, work = prepare(arguments)
    runner = Runner(plan, cases, deadline)
    parity = Parity(work, arguments.arms, runner)
    parity.check()
    check_machine(plan.work)
    results = results_folder(arguments.results, arguments.work, arguments.tiny)
    runs_left = 0
    usual_s = FIRST_RUN_ON_CPU_S + TINY_STEP_S * work.steps if arguments.tiny else USUAL_RUN_S
    try:
        parity.everything(usual_s if arguments.expected is None else arguments.expected)
    except OutOfTime:
        runs_left = parity.runs_left()
    result = parity.result()
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"loss-parity-{work.model}"
    write_json(path.with_name(f"{path.name}.json"), result)
    write_text_atomically(path.with_name(f"{path.name}.md"), table(result))
    figure.draw_losses(path.with_name(f"{path.name}.png"), result)
    print(f"\n{table(result)}", flush=True)
    return runner.exit_code(runs_left)


if __name__ == "__main__":
    sys.exit(main())
