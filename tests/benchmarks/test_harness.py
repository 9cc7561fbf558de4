"""The benchmark harness: what is planned, what is kept, what is written; and, slowly, all of it on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from matplotlib.figure import Figure

from benchmarks import compare, figure, loss_parity, rows, scaling
from benchmarks.cases import RESULTS, WORK, Cases, Plan, System, job_of, make_job, make_run, read_cases
from benchmarks.compare import Bench, make_parser, prepare
from benchmarks.peers.clock import Finished, StepClock
from benchmarks.peers.driving import outcome
from benchmarks.peers.job import Job, MissingPeer, Record, read_job, read_record, write_job
from benchmarks.peers.torchtitan import mlp_width
from benchmarks.runner import OutOfTime, Runner
from benchmarks.tiny_data import write_tiny_dataset
from mfubench.config import ConfigError
from mfubench.presets import load_model

ROOT = Path(__file__).parents[2]
KEYS = {
    *("system", "version", "model", "world_size", "micro_batch_size", "gradient_accumulation_steps"),
    *("master_weights", "card", "torch", "tokens_per_s_per_gpu"),
}


def make_plan(work: Path, **more) -> Plan:
    return Plan(work / "data", work, "cpu", 0.1, 0.2, 0.1, min_steps=2, **more)


def record_at(rate: float, status: str = "ok") -> Record:
    """A run of ten steps at `rate` tokens a second on one GPU."""
    seconds = 10 * 128 / rate
    telemetry = {
        "samples": 3,
        "gpus": [{"power_w": {"median": 650.0}, "sm_clock_mhz": {"median": 1700.0}, "temperature_c": None}],
        "throttled": {"power_cap": {"steps": 4, "share": 0.4, "positions": [0, 1, 2, 3]}},
    }
    record = Record(status, version="1.0", torch="2.11.0", card="NVIDIA H100 80GB HBM3", master_weights="float32")
    return dataclasses.replace(
        record, steps=10, tokens=1280, seconds=seconds, step_times_s=[seconds / 10] * 10, telemetry=telemetry
    )


class FakeRunner(Runner):
    """Records by system and micro-batch instead of processes."""

    def __init__(self, plan: Plan, known: dict[tuple[str, int], Record], runs_left: int = 1000):
        super().__init__(plan, read_cases(), math.inf)
        self.known, self.runs_left, self.ran, self.expected = known, runs_left, [], []

    def run(self, jobs, label, expected_s, cards):
        if (found := self.settled(jobs)) is not None:
            return found
        if self.runs_left == 0:
            raise OutOfTime
        self.runs_left -= 1
        self.expected.append(expected_s)
        records = []
        for job in jobs:
            self.ran.append(f"{job.system} {job.folder.name}")
            known = self.known[job.system, job.run.micro_batch_size]
            record = dataclasses.replace(known, job=job.identity, world_size=job.run.world_size)
            record.write(job.output)
            self.failed_here.add(record.job)
            records.append(record)
        return records


def test_every_case_is_well_formed_and_its_jobs_travel(tmp_path):
    cases = read_cases()
    for name, case in cases.cases.items():
        for system in case.systems:
            for size in case.candidates(system):
                job = make_job(make_plan(tmp_path), cases, name, system, size, "trial", trial=True)
                assert job.run.global_batch_size == case.sequences_per_step
                write_job(tmp_path / "job.json", job)
                assert read_job(tmp_path / "job.json") == job
                assert (ROOT / "benchmarks" / "peers" / f"{job.driver}.py").is_file()


def test_another_file_of_cases_takes_the_place_of_the_shipped_one(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "systems:\n  mine: {driver: mfubench_engine, settings: {compile: none}}\n"
        "cases:\n  small: {model: llama2-tiny, sequences_per_step: 2, micro_batch_sizes: [1], systems: [mine]}\n"
    )
    options = ["--cases", str(own), "--data", str(tmp_path), "--set", "seed=7"]
    with pytest.raises(ConfigError, match=r"--data: .* is no prepared dataset: it has no meta\.json"):
        prepare(make_parser().parse_args([*options, "--case", "all"]))
    (tmp_path / "meta.json").write_text("{}")
    cases, _, names = prepare(make_parser().parse_args([*options, "--case", "all"]))
    assert names == ["small"]
    assert cases.systems["mine"].settings == {"compile": "none", "seed": 7}
    for option, complaint in (
        ("--repeats=0", "at least 1"),
        ("--tiny", "leave out --case"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            prepare(make_parser().parse_args([*options, "--case", "all", option]))
    with pytest.raises(ConfigError, match=r"no case 'llama2-1\.36b' in .*own\.yaml: small"):
        prepare(make_parser().parse_args(options))
    with pytest.raises(ConfigError, match=r"missing\.yaml: no such file; --cases names one in the form of cases\.yaml"):
        prepare(make_parser().parse_args([*options, "--cases", str(tmp_path / "missing.yaml")]))
    with pytest.raises(ConfigError, match=r"settings of mine\.foo: unknown key"):
        prepare(make_parser().parse_args([*options, "foo=1", "--case", "all"]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("micro_batch_sizes: [1]", "micro_batch_sizes: [1"), r"own\.yaml: is no valid YAML"),
        (("micro_batch_sizes: [1]", "micro_batch_sizes: [0]"), r"micro_batch_sizes.*greater than or equal to 1"),
        (("mfubench_engine", "other_engine"), r"systems\.mine\.driver: no driver 'other_engine'"),
        (("llama2-tiny", "llama9-tiny"), r"no model preset 'llama9-tiny'"),
        (("driver:", "drver:"), r"drver: unknown key"),
    ],
)
def test_a_broken_file_of_cases_is_told_before_anything_runs(tmp_path, change, complaint):
    own = tmp_path / "own.yaml"
    text = (
        "systems:\n  mine: {driver: mfubench_engine}\n"
        "cases:\n  small: {model: llama2-tiny, sequences_per_step: 2, micro_batch_sizes: [1], systems: [mine]}\n"
    )
    own.write_text(text)
    assert list(read_cases(own).cases) == ["small"]
    own.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=complaint):
        read_cases(own)


def test_repeats_take_turns_with_the_best_micro_batch_and_go_on_where_they_ended(tmp_path):
    known = {
        ("mfubench", 8): record_at(3000.0),
        ("mfubench", 4): record_at(2000.0),
        ("mfubench", 16): Record("oom", reason="out of memory"),
        ("torchtitan", 4): Record("missing", reason="the package torchtitan is not installed"),
        ("transformers", 4): Record("oom", reason="out of memory"),
        ("transformers", 2): record_at(1500.0),
    }
    systems = ["mfubench", "torchtitan", "transformers"]
    first = FakeRunner(make_plan(tmp_path), known, runs_left=8)
    broken_off = Bench("llama3-1.5b", systems, first, 3)
    assert broken_off.runs_left() == (3 + 3 + 2) + 3 * len(systems)  # nothing is known of what a failure leaves out
    with pytest.raises(OutOfTime):
        broken_off.everything()
    assert broken_off.runs_left() == 4
    second = FakeRunner(make_plan(tmp_path), known)
    bench = Bench("llama3-1.5b", systems, second, 3)
    bench.everything()
    assert bench.runs_left() == 0
    trials = ["mfubench trial-mb8", "mfubench trial-mb4", "mfubench trial-mb16", "torchtitan trial-mb4"]
    trials += ["transformers trial-mb4", "transformers trial-mb2"]
    turns = [
        f"{system} mb{size}-repeat-{n}" for n in range(3) for system, size in zip(systems[::2], (8, 2), strict=True)
    ]
    runs = trials + turns
    # what was not installed may be by now
    assert first.ran == runs[:8] and second.ran == ["torchtitan trial-mb4", *runs[8:]]
    found = {row["system"]: row for row in bench.rows()}
    assert all(row.keys() >= KEYS for row in found.values())
    assert found["mfubench"]["tokens_per_s_per_gpu"]["repeats"] == 3
    assert found["mfubench"]["tokens_per_s_per_gpu"]["median"] == pytest.approx(3000.0)
    assert found["mfubench"]["micro_batch_sizes_tried"]["16"] == "oom"
    assert found["torchtitan"]["tokens_per_s_per_gpu"] is None
    assert found["torchtitan"]["reason"] == "the package torchtitan is not installed"
    table = bench.publish(tmp_path / "results")
    assert "missing: the package torchtitan is not installed" in table
    assert "| 2.000" in table  # to the best peer
    written = json.loads((tmp_path / "results" / "peers-llama3-1.5b.json").read_text())
    conditions = {"samples": 3, "power_w": 650.0, "sm_clock_mhz": 1700.0, "temperature_c": None}
    assert written[0]["clock_and_power"] == [conditions | {"throttled_steps": {"power_cap": 4}}] * 3
    assert (tmp_path / "results" / "peers-llama3-1.5b.png").stat().st_size > 1000


def test_one_micro_batch_needs_no_trial_and_what_failed_is_not_repeated(tmp_path):
    known = {("mfubench", 8): record_at(3000.0), ("torchtitan", 8): Record("missing", reason="not installed")}
    runner = FakeRunner(make_plan(tmp_path), known)
    bench = Bench("llama2-1.36b", ["mfubench", "torchtitan"], runner, 2)
    bench.everything()
    assert runner.ran == ["mfubench mb8-repeat-0", "torchtitan mb8-repeat-0", "mfubench mb8-repeat-1"]
    ours, theirs = bench.rows()
    assert ours["tokens_per_s_per_gpu"]["repeats"] == 2 and "micro_batch_sizes_tried" not in ours
    assert (theirs["status"], theirs["reason"]) == ("missing", "not installed")
    Path(bench.repeat("mfubench", 8, 1).output).unlink()
    known["mfubench", 8] = Record("failed", reason="a card fell off")
    after = Bench("llama2-1.36b", ["mfubench"], FakeRunner(make_plan(tmp_path), known), 3)
    after.everything()
    (row,) = after.rows()
    assert row["tokens_per_s_per_gpu"]["repeats"] == 1 and len(row["failed_repeats"]) == 2
    assert "| 1, 2 failed |" in rows.peers_table([row], {})
    assert bench.repeat("mfubench", 8, 1).step_time_s == pytest.approx(128 / 3000)  # of the first, for as many seconds


def test_a_job_that_changed_is_run_again(tmp_path):
    cases = read_cases()
    job = make_job(make_plan(tmp_path), cases, "tiny", "transformers", 2, "trial", trial=True)
    record = dataclasses.replace(record_at(10.0), job=job.identity)
    record.write(job.output)
    path = Path(job.output)
    assert read_record(path, job) == record
    assert read_record(path, dataclasses.replace(job, step_time_s=1.0)) == record  # what is expected is no part of it
    assert read_record(path, dataclasses.replace(job, settings={"compile": True})) is None
    assert read_record(path, dataclasses.replace(job, code="another")) is None


def test_mlp_widths_are_torchtitans():
    for name in ("llama2-1.36b", "llama3-1.5b", "llama3-2.2b", "llama3-8b", "llama2-tiny"):
        model = load_model(name)
        multiple, factor = mlp_width(model)
        width = int(factor * int(2 * 4 * model.hidden_size / 3))
        assert multiple * ((width + multiple - 1) // multiple) == model.intermediate_size


def test_the_clock_counts_optimizer_steps_and_ends_the_loop():
    run = make_run("llama2-tiny", 8, 1, 1, "cpu")
    job = Job("x", "x", run, "data", "work", "out", warmup_steps=2, preheat_s=0.0, measure_s=0.0, min_steps=3)
    clock = StepClock(job, torch.device("cpu"))
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    container = torch.optim.SGD([parameter], lr=0.0)  # not what is counted
    taken = 0
    try:
        with pytest.raises(Finished):
            while taken < 100:
                taken += 1
                parameter.grad = torch.ones(2)
                container.step()
                optimizer.step()
    finally:
        clock.hook.remove()
    assert taken == 2 + 4 + 3  # warm-up, probe, measured
    assert len(clock.step_times_s()) == 3
    assert all(seconds > 0 for seconds in clock.step_times_s())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Finished(), "ok"),
        (MissingPeer("install it"), "missing"),
        (ImportError("No module named 'x'"), "missing"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (ValueError("bad"), "failed"),
    ],
)
def test_every_end_is_a_status_with_its_reason(error, status):
    def run() -> None:
        raise error

    found, reason = outcome(run)
    assert found == status
    assert (reason is None) == (status == "ok")
    assert outcome(lambda: None)[0] == "failed"  # it ended by itself


def test_quartiles_and_efficiency():
    assert rows.quartiles([3.0, 1.0, 2.0]) == (1.5, 2.0, 2.5)
    assert rows.quartiles([7.0]) == (7.0, 7.0, 7.0)
    found = scaling.interval([0.98, 0.99, 0.97])
    assert found["median"] == 0.98
    assert found["low"] < 0.97 and found["high"] > 0.99  # t of two degrees of freedom is wide
    assert "low" not in scaling.interval([0.98])
    together = [dataclasses.replace(record_at(128.0), started_at=start) for start in (0.0, 1.0)]
    assert scaling.overlap(together) == pytest.approx(0.9)


def drawn(monkeypatch: pytest.MonkeyPatch, draw: Callable[[Path], None]) -> Figure:
    """The figure that `draw` saves, before it is saved."""
    saved: list[Figure] = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
        draw(Path("unsaved.png"))
    (figure,) = saved
    return figure


def test_scaling_compares_with_the_same_cards_alone(tmp_path, monkeypatch):
    known = {("mfubench", 8): record_at(1000.0), ("torchtitan", 8): Record("missing", reason="not installed")}
    runner = FakeRunner(make_plan(tmp_path), known)
    setting = scaling.Setting("llama2-1.36b", 2048, 4, 2, 8)
    bench = scaling.Scaling(setting, ["mfubench:ddp", "mfubench:zero1", "torchtitan:fsdp"], runner, 2)
    bench.everything()
    alone = ["mfubench repeat-{}-card-0-of-2", "mfubench repeat-{}-card-1-of-2"]
    turn = [*alone, "mfubench repeat-{}", "mfubench repeat-{}"]
    expected = ["mfubench trial", "torchtitan trial", *[name.format(n) for n in range(2) for name in turn]]
    assert runner.ran == expected
    ddp, zero1, torchtitan = bench.rows()
    assert (ddp["arm"], zero1["arm"]) == ("mfubench:ddp", "mfubench:zero1")
    assert ddp["efficiency"]["repeats"] == 2
    assert ddp["efficiency"]["median"] == pytest.approx(0.5)  # the fake record is of one GPU, the row of two
    assert ddp["efficiency_of_slowest"] == ddp["efficiency"]  # its cards are alike
    assert torchtitan["status"] == "missing"
    assert "missing: not installed" in scaling.table([ddp, zero1, torchtitan])
    (panel,) = drawn(monkeypatch, lambda path: figure.draw_scaling(path, [ddp, zero1, torchtitan])).axes
    assert {label.get_text() for label in panel.get_yticklabels()} >= {"mfubench, ddp", "mfubench, zero1"}
    (panel,) = drawn(monkeypatch, lambda path: figure.draw_scaling(path, [ddp, zero1 | {"micro_batch_size": 4}])).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == [
        "mfubench, zero1, micro-batch 4",
        "mfubench, ddp, micro-batch 8",
    ]
    figure.draw_scaling(tmp_path / "none.png", [torchtitan])
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_no_interval_or_dot_runs_through_a_number(tmp_path, monkeypatch):
    """Of scaling, beyond the left end of the interval; of rates, beyond the fastest repeat."""
    found = {"median": 0.95, "by_repeat": [0.945, 0.955], "low": 0.92, "high": 0.98}
    row = {"efficiency": found, "gradient_accumulation_steps": 1, "world_size": 2, "model": "m", "card": "c"}
    row |= {"arm": "mfubench:ddp", "system": "mfubench", "micro_batch_size": 8, "status": "ok"}
    shown = drawn(monkeypatch, lambda path: figure.draw_scaling(path, [row]))
    shown.draw_without_rendering()
    (panel,) = shown.axes
    (number,) = panel.texts
    assert number.get_text().strip() == "95.0 %"
    assert number.get_window_extent().x1 <= panel.transData.transform((92.0, 0))[0]
    assert panel.get_xlabel() == "% of the cards' own rate (axis does not start at 0)"
    assert "lines: 95 % intervals" in shown.texts[1].get_text()
    row["tokens_per_s_per_gpu"] = {"median": 100.0, "by_repeat": [90.0, 100.0, 120.0]}
    (axes,) = drawn(monkeypatch, lambda path: figure.draw(path, [row], "title", "subtitle")).axes
    assert axes.texts[0].get_position()[0] == 120.0


def test_figures_of_one_model_are_told_apart_by_their_titles(tmp_path, monkeypatch):
    plan, known = make_plan(tmp_path), read_cases()
    row = rows.row_of(make_job(plan, known, "tiny", "mfubench", 2, "trial", trial=True), [record_at(1000.0)])
    titles = []
    for name in ("llama2-1.36b", "llama2-1.36b-mb16", "fp8-llama2-1.36b", "fp8-wide"):
        draw = functools.partial(compare.draw, name=name, case=known.cases[name], plan=plan, found=[row])
        titles.append(drawn(monkeypatch, draw).texts[0].get_text().partition(":")[0])
    assert titles == ["llama2-1.36b", "llama2-1.36b, mb16", "llama2-1.36b, fp8", "llama2-7b-6layers, fp8-wide"]


def test_a_job_that_fails_alone_is_the_reason_of_an_efficiency_that_is_missing(tmp_path):
    """The trial is one micro-step: the one-GPU jobs of more of them may need memory that it did not."""
    runner = FakeRunner(make_plan(tmp_path), {})
    bench = scaling.Scaling(scaling.Setting("llama2-1.36b", 2048, 4, 2, 8), ["mfubench:ddp"], runner, 1)
    good = record_at(1000.0)
    alone = [good, Record("oom", reason="out of memory")]
    row = bench.row("mfubench:ddp", bench.joint("mfubench:ddp", good, 0), [(alone, good)])
    assert (row["status"], row["reason"]) == ("ok", None)  # the arm itself ran well
    cells = [cell.strip() for cell in scaling.table([row]).splitlines()[2].split("|")]
    assert cells[4:7] == ["oom: out of memory", "1,000", ""]  # alone, together, efficiency


def test_a_trial_that_fails_is_not_taken_for_an_arm_that_does(tmp_path):
    """One card may be too small for what several share."""
    runner = FakeRunner(make_plan(tmp_path), {("mfubench", 8): Record("oom", reason="out of memory")})
    bench = scaling.Scaling(scaling.Setting("llama2-1.36b", 2048, 4, 2, 8), ["mfubench:fsdp"], runner, 1)
    bench.everything()
    assert "| oom: trial on one card: out of memory |" in scaling.table(bench.rows())


def test_a_batch_that_is_broken_is_blamed_and_not_one_that_needs_too_much_memory(tmp_path):
    known = {
        ("transformers", 4): Record("oom", reason="out of memory"),
        ("transformers", 2): Record("failed", reason="ValueError: bad"),
    }
    bench = Bench("llama3-1.5b", ["transformers"], FakeRunner(make_plan(tmp_path), known), 1)
    bench.everything()
    (row,) = bench.rows()
    assert (row["micro_batch_size"], row["status"], row["reason"]) == (2, "failed", "ValueError: bad")
    assert row["micro_batch_sizes_tried"] == {"4": "oom", "2": "failed"}


def test_what_was_missing_in_an_earlier_call_is_a_row_of_one_that_came_no_further(tmp_path):
    known = {("mfubench", 8): record_at(1000.0), ("torchtitan", 8): Record("missing", reason="not installed")}
    setting, arms = scaling.Setting("llama2-1.36b", 2048, 4, 2, 8), ["torchtitan:fsdp"]
    scaling.Scaling(setting, arms, FakeRunner(make_plan(tmp_path), known), 1).everything()
    later = scaling.Scaling(setting, arms, FakeRunner(make_plan(tmp_path), known, runs_left=0), 1)
    with pytest.raises(OutOfTime):
        later.everything()
    (row,) = later.rows()
    assert (row["system"], row["status"], row["reason"]) == ("torchtitan", "missing", "not installed")


def test_one_trial_serves_all_accumulations_and_numbers_of_cards(tmp_path):
    runner = FakeRunner(make_plan(tmp_path), {("mfubench", 8): record_at(1000.0)})
    for accumulation, cards in ((4, 2), (1, 4)):
        setting = scaling.Setting("llama2-1.36b", 2048, accumulation, cards, 8)
        bench = scaling.Scaling(setting, ["mfubench:ddp"], runner, 1)
        bench.everything()
        trial = bench.trial("mfubench")
        assert bench.joint("mfubench:ddp", trial, 0).step_time_s == pytest.approx(accumulation * trial.step_times_s[0])
    assert runner.ran.count("mfubench trial") == 1


def test_losses_are_held_against_the_same_seed_and_the_spread_of_others():
    reference, apart = [3.0, 2.0, 1.0, 1.0], [3.0, 2.0, 1.0, 1.2]
    found = loss_parity.difference(reference, apart)
    assert found["tail"] == pytest.approx(0.2)  # a quarter of four steps is the last
    assert found["root_mean_square"] == pytest.approx(0.1) and found["largest"] == pytest.approx(0.2)
    assert loss_parity.verdict([found], 0.3) == "within the spread"
    assert loss_parity.verdict([found, {"tail": -0.6}], 0.3) == "beyond the spread (2.0 times)"
    assert "no spread" in loss_parity.verdict([found], None)


def parity_of(work: Path, seeds: int = 1, **known: Record) -> loss_parity.Parity:
    plan = make_plan(work)
    if not plan.data.exists():
        write_tiny_dataset(plan.data)
    runner = FakeRunner(plan, {(system.replace("_", "-"), 2): record for system, record in known.items()})
    return loss_parity.Parity(loss_parity.Work("llama2-tiny", 64, 2, 1, 4, seeds), ["mfubench"], runner)


def test_a_loss_curve_that_is_not_there_says_why(tmp_path):
    failed = Record("failed", reason="the loss of step 2 is not finite")
    parity = parity_of(tmp_path, mfubench_eager=record_at(1.0, "oom"), mfubench=failed)
    assert parity.result()["lost"] == {}
    assert "not measured" in loss_parity.table(parity.result())
    parity.everything(1.0)
    result = parity.result()
    assert result["lost"]["mfubench 0 first"] == "failed: the loss of step 2 is not finite"
    assert set(result["lost"]) == {"mfubench 0 first", "mfubench-eager 0 first", "mfubench-eager 0 again"}
    # each reason stands with what it is of: the arm's row has its own first
    assert "| failed: the loss of step 2 is not finite; mfubench-eager: oom: None |" in loss_parity.table(result)
    figure.draw_losses(tmp_path / "none.png", result)
    assert (tmp_path / "none.png").stat().st_size > 1000


def test_the_legend_of_losses_covers_no_curve(tmp_path, monkeypatch):
    """Curves that stay where they began lie along the upper edge."""
    flat = [10.4, 10.5, 10.4, 10.5]
    result = parity_of(tmp_path).result()
    curves = {f"{system} 0 first": flat for system in ("mfubench-eager", "mfubench")}
    shown = drawn(monkeypatch, lambda path: figure.draw_losses(path, result | {"curves": curves}))
    shown.draw_without_rendering()
    axes, _ = shown.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["mfubench-eager", "mfubench"]
    assert axes.get_legend().get_window_extent().y0 > axes.get_window_extent().y1 - 1e-6


def test_a_run_is_expected_to_take_as_long_as_the_one_before_it(tmp_path):
    eager, fast = (dataclasses.replace(record_at(1.0), wall_s=seconds) for seconds in (40.0, 8.0))
    parity = parity_of(tmp_path, seeds=2, mfubench_eager=eager, mfubench=fast)
    parity.everything(90.0)
    assert parity.runner.expected == [90.0, 90.0, 50.0, 50.0, 10.0]  # eager, fast, eager again; eager, fast
    one_more = parity_of(tmp_path, seeds=3, mfubench_eager=eager, mfubench=fast)
    one_more.everything(90.0)
    assert one_more.runner.expected == [50.0, 10.0]  # runs of an earlier call tell it too


def test_losses_of_other_tokens_are_another_run(tmp_path):
    parity = parity_of(tmp_path, mfubench_eager=record_at(1.0), mfubench=record_at(1.0))
    parity.everything(1.0)
    same = parity_of(tmp_path, mfubench_eager=record_at(1.0), mfubench=record_at(1.0))
    assert same.runner.done([same.job("mfubench", 0)]) is not None
    meta = tmp_path / "data" / "meta.json"
    meta.write_text(meta.read_text().replace("0" * 64, "1" * 64))
    other = parity_of(tmp_path, mfubench_eager=record_at(1.0), mfubench=record_at(1.0))
    assert other.runner.done([other.job("mfubench", 0)]) is None


def test_loss_parity_takes_own_systems_alone(tmp_path, capsys):
    assert loss_parity.main(["--tiny", "--arms", "torchtitan", "--work", str(tmp_path)]) == 1
    assert "is none of mfubench's own systems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("harness", "arguments", "said"),
    [
        (loss_parity, ["--set", "kernels.nope=plain"], "settings of mfubench.kernels.nope: unknown key"),
        (loss_parity, ["--accumulation", "0"], "gradient_accumulation_steps: found 0"),
        (loss_parity, ["--data", "/nowhere"], "--data: /nowhere is no prepared dataset"),
        (scaling, ["--set", "nope=1"], "settings of mfubench.nope: unknown key"),
        (scaling, ["--accumulation", "1", "0"], "gradient_accumulation_steps: found 0"),
        (scaling, ["--data", "/nowhere"], "--data: /nowhere is no prepared dataset"),
        (scaling, ["--arms", "mfubench"], "--arms: mfubench: write SYSTEM:PARALLELISM"),
        (scaling, ["--repeats", "0"], "--repeats: at least 1"),
        (compare, ["--repeats", "0"], "--repeats: found 0; at least 1"),
        *(
            (harness, ["--minutes", "0"], "--minutes: found 0; a positive")
            for harness in (compare, loss_parity, scaling)
        ),
    ],
)
def test_bad_input_is_told_before_anything_runs(tmp_path, capsys, harness, arguments, said):
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert harness.main(["--tiny", *places, *arguments]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("harness", "arguments", "left"),
    [
        (compare, ["--systems", "mfubench", "--repeats", "2"], 4),  # two cases
        (scaling, ["--arms", "mfubench:ddp", "mfubench:fsdp", "--repeats", "2"], 1 + 2 * 2 * 3),  # two accumulations
        (loss_parity, ["--seeds", "2"], 5),
    ],
)
def test_a_harness_out_of_time_says_how_to_go_on_and_what_is_left(
    tmp_path, capsys, monkeypatch, harness, arguments, left
):
    monkeypatch.setattr(harness, "Runner", functools.partial(Runner, kept_s=600.0))  # other runs took the time
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert harness.main(["--tiny", *places, *arguments, "--minutes", "0.001"]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"the time was up and at most {left} runs are left; the same command goes on where it ended"


@pytest.mark.parametrize(
    ("harness", "arguments", "length"), [(compare, [], 5), (scaling, [], 5), (loss_parity, ["--steps", "40"], 7)]
)
def test_a_call_too_short_for_one_run_is_bad_input(tmp_path, capsys, harness, arguments, length):
    """It would never come further: the same command has no more time."""
    before = set(RESULTS.iterdir())
    assert harness.main(["--tiny", "--work", str(tmp_path), *arguments, "--minutes", "0.001"]) == 1
    assert capsys.readouterr().err == f"error: one run takes about {length} s: raise --minutes\n"
    # what a tiny run writes is no result
    assert set(RESULTS.iterdir()) == before and list((tmp_path / "results").glob("*.md"))
    assert WORK.is_relative_to(ROOT / "build")


TOLD = """
import sys, time
from pathlib import Path
from benchmarks.peers.job import Record, read_job

job = read_job(Path(sys.argv[2]))
time.sleep(job.settings["sleep_s"])
if job.settings["status"] == "none":
    sys.exit(3)
Record(job.settings["status"], reason="it was told to", job=job.identity).write(job.output)
"""
ENDLESS = """
import time
from benchmarks.peers.driving import drive, rank

def train(job, device):
    (job.folder / f"training-{rank()}").touch()
    time.sleep(600)

drive(lambda job: "1.0", train)
"""


@pytest.fixture
def drivers(tmp_path, monkeypatch) -> Path:
    """A folder whose drivers the harness finds beside its own."""
    folder = tmp_path / "drivers" / "benchmarks" / "peers"
    folder.mkdir(parents=True)
    (folder / "told.py").write_text(TOLD)
    (folder / "endless.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "drivers"))
    return tmp_path / "drivers"


class Told:
    """A runner of jobs that end as told, within `seconds`."""

    def __init__(self, work: Path, seconds: float):
        self.plan = make_plan(work)
        self.plan.data.mkdir(exist_ok=True)
        self.runner = Runner(self.plan, Cases(systems={}, cases={}), time.monotonic() + seconds)

    def run(self, name: str, status: str, sleep_s: float = 0.0, expected_s: float = 1.0) -> Record:
        system = System(driver="told", settings={"status": status, "sleep_s": sleep_s})
        self.runner.cases.systems[name] = system
        job = job_of(self.plan, self.runner.cases, name, make_run("llama2-tiny", 8, 1, 1, "cpu"), self.plan.work / name)
        return self.runner.run([job], name, expected_s, [[0]])[0]


def test_a_run_that_fits_a_fresh_call_is_left_to_it(tmp_path, drivers, capsys):
    first = Told(tmp_path, 600)
    assert first.run("quick", "ok").status == "ok"
    assert 0 < first.runner.kept_s < 60
    with pytest.raises(OutOfTime):
        first.run("long", "ok", expected_s=600 - first.runner.kept_s / 2)
    assert first.runner.exit_code(1) == 75
    assert capsys.readouterr().err == "the time was up and 1 run is left; the same command goes on where it ended\n"
    second = Told(tmp_path, 600)
    second.run("quick", "ok")
    assert second.runner.kept_s == 0  # it was taken from its file
    with pytest.raises(OutOfTime):
        second.run("long", "ok", expected_s=601)
    assert second.runner.exit_code(1) == 1
    assert capsys.readouterr().err == "error: one run takes about 601 s: raise --minutes\n"


def test_what_every_call_runs_anew_leaves_no_more_time_to_the_next(tmp_path, drivers):
    told = Told(tmp_path, 600)
    told.run("absent", "missing", sleep_s=1.0)
    with pytest.raises(OutOfTime):
        told.run("long", "ok", expected_s=599.9)
    assert told.runner.too_long == "about 600 s" and told.runner.exit_code(1) == 1


def test_a_run_that_the_whole_call_was_too_short_for_is_not_tried_for_ever(tmp_path, drivers, capsys):
    told = Told(tmp_path, 2)
    with pytest.raises(OutOfTime):
        told.run("long", "ok", sleep_s=600)
    assert told.runner.exit_code(1) == 1
    assert capsys.readouterr().err == "error: one run takes more than 2 s: raise --minutes\n"


def test_what_failed_is_named_at_the_end_and_what_cannot_be_had_is_no_failure(tmp_path, drivers, capsys):
    told = Told(tmp_path, math.inf)
    for name, status in (("absent", "missing"), ("large", "oom"), ("good", "ok")):
        told.run(name, status)
    assert told.runner.exit_code(0) == 0 and capsys.readouterr().err == ""
    told.run("broken", "failed")
    told.run("dead", "none")
    assert told.runner.exit_code(0) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"failed: broken: it was told to; log: {tmp_path / 'broken' / 'log.txt'}",
        f"failed: dead: ended with code 3 and no record; log: {tmp_path / 'dead' / 'log.txt'}",
    ]
    assert told.runner.exit_code(2) == 75  # the others are still to be run, and these are run again


def test_a_harness_whose_run_failed_says_so_by_its_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MFUBENCH_TIMEOUT_S", "soon")  # which the engine refuses
    arguments = ["--tiny", "--work", str(tmp_path), "--arms", "mfubench:ddp", "--accumulation", "1", "--repeats", "1"]
    assert scaling.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    log = tmp_path / "scaling" / "llama2-tiny-accumulation1" / "1-card" / "mfubench-none" / "trial" / "log.txt"
    assert line == f"failed: llama2-tiny: mfubench, trial: the run failed: its log says why; log: {log}"
    assert "MFUBENCH_TIMEOUT_S is 'soon'" in log.read_text()


def test_the_engines_own_words_are_the_reason_of_its_failure(tmp_path):
    plan = make_plan(tmp_path / "work")
    runner = Runner(plan, read_cases(), math.inf)
    job = make_job(plan, runner.cases, "tiny", "mfubench", 2, "trial", trial=True)  # its dataset does not exist
    (record,) = runner.run([job], "tiny", 1.0, [[0]])
    words = json.loads((job.folder / "failure.json").read_text())["reason"]
    assert (record.status, record.reason) == ("failed", f"the run failed: {words}")


def test_runs_that_are_done_or_lost_are_not_left(tmp_path):
    known = {("mfubench", 8): record_at(1000.0), ("torchtitan", 8): Record("missing", reason="not installed")}
    setting = scaling.Setting("llama2-1.36b", 2048, 4, 2, 8)
    arms = ["mfubench:ddp", "mfubench:zero1", "torchtitan:fsdp"]
    bench = scaling.Scaling(setting, arms, FakeRunner(make_plan(tmp_path), known, runs_left=4), 2)
    assert len(bench.runs_left()) == 2 + 2 * 3 + 2 * 2  # trials; each repeat alone and in every arm
    with pytest.raises(OutOfTime):
        bench.everything()
    assert [jobs[0].folder.name for jobs in bench.runs_left()] == [
        "repeat-0",
        "repeat-1-card-0-of-2",
        "repeat-1",
        "repeat-1",
    ]
    parity = parity_of(tmp_path, mfubench_eager=record_at(1.0), mfubench=Record("failed", reason="not finite"))
    parity.runner.runs_left = 2
    with pytest.raises(OutOfTime):
        parity.everything(1.0)
    assert parity.runs_left() == 1  # what failed here would fail again


@pytest.mark.parametrize("harness", [compare, loss_parity, scaling])
def test_a_damaged_work_folder_is_told_in_a_line(tmp_path, capsys, harness):
    (tmp_path / "machine.json").write_text('{"cards":')
    assert harness.main(["--tiny", "--work", str(tmp_path), "--results", str(tmp_path / "results")]) == 1
    assert "machine.json: is no valid JSON" in capsys.readouterr().err


def test_a_record_of_another_form_is_told(tmp_path):
    job = make_job(make_plan(tmp_path), read_cases(), "tiny", "transformers", 2, "trial", trial=True)
    record_at(1.0).write(job.output)
    path = Path(job.output)
    path.write_text(path.read_text().replace('"status"', '"state"'))
    with pytest.raises(ConfigError, match=r"is no record of this version .*delete it and run again"):
        read_record(path, job)


def test_figure_names_systems_and_what_is_missing(tmp_path, monkeypatch):
    cases = read_cases()
    found = []
    for system, record in (("transformers", record_at(1000.0)), ("litgpt", Record("missing", reason="not installed"))):
        job = make_job(make_plan(tmp_path), cases, "tiny", system, 2, "trial", trial=True)
        found.append(rows.row_of(job, [record]))
    shown = drawn(monkeypatch, lambda path: figure.draw(path, found, "title", "subtitle"))
    (axes,) = shown.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["transformers (2 × 2)"]
    assert "Not measured: litgpt (2 × 2): missing." in " ".join(
        text.get_text().replace("\n", " ") for text in shown.texts
    )
    figure.draw(tmp_path / "empty.png", found[1:], "title", "subtitle")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def run_module(module: str, *arguments: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
def test_the_whole_harness_on_a_cpu(tmp_path):
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"), "--repeats", "2"]
    arguments = ["--tiny", *places]
    done = run_module("benchmarks.compare", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["system"]: row for row in json.loads((tmp_path / "results" / "peers-tiny.json").read_text())}
    for system in ("mfubench", "transformers"):
        assert found[system]["tokens_per_s_per_gpu"]["repeats"] == 2, done.stdout
        assert found[system]["parameters"] == found["mfubench"]["parameters"]
        assert found[system]["command"]
    for system in ("torchtitan", "transformers-liger"):
        assert found[system]["status"] == "missing"
        assert found[system]["reason"]
    again = run_module("benchmarks.compare", *arguments)
    assert "tiny: transformers," not in again.stdout  # not run a second time (mfubench is, where its code has changed)


@pytest.mark.slow
def test_scaling_on_a_cpu(tmp_path):
    arms = ["mfubench:zero1", "transformers:ddp"]
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"), "--repeats", "1"]
    done = run_module("benchmarks.scaling", "--tiny", "--arms", *arms, "--accumulation", "2", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results" / "scaling-llama2-tiny-accumulation2.json").read_text())
    assert [row.get("arm") for row in found] == arms, done.stdout
    assert (tmp_path / "results" / "scaling-llama2-tiny.png").stat().st_size > 1000
    for row in found:
        assert row["world_size"] == 2
        assert 0 < row["efficiency"]["median"] < 5


def test_a_stopped_harness_takes_its_job_with_it(tmp_path):
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "benchmarks.loss_parity", "--tiny", "--steps", "5000", "--seeds", "1", *places]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (jobs := psutil.Process(process.pid).children(recursive=True)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert not psutil.wait_procs(jobs, timeout=10)[1]
    finally:
        process.kill()
    assert not list((tmp_path / "work").rglob("record.json"))


def test_an_engine_ends_with_a_harness_that_was_killed(tmp_path):
    """Nobody can hand a SIGKILL on, and the engine would hold its card until it was done."""
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "benchmarks.loss_parity", "--tiny", "--steps", "5000", "--seeds", "1", *places]
    end_after_kill(command, lambda: list((tmp_path / "work").rglob("steps.jsonl")))


def test_a_peers_ranks_end_with_a_harness_that_was_killed(tmp_path, drivers):
    """Their parent is torchrun, which outlives the harness too."""
    run = make_run("llama2-tiny", 8, 1, 1, "cpu", world_size=2, parallelism="ddp")
    folder = tmp_path / "work"
    job = Job("endless", "endless", run, "data", str(folder), str(folder / "record.json"))
    write_job(tmp_path / "job.json", job)
    harness = (
        "import sys, time; from pathlib import Path; from benchmarks.peers.job import read_job; "
        "from benchmarks.processes import start; "
        "start(read_job(Path(sys.argv[1])), Path(sys.argv[2])); time.sleep(600)"
    )
    command = [sys.executable, "-c", harness, str(tmp_path / "job.json"), str(tmp_path / "cache")]
    end_after_kill(command, lambda: len(list(folder.glob("training-*"))) == 2)


def end_after_kill(command: list[str], trains: Callable[[], object]) -> None:
    """Kill a harness once its job trains, and see that nothing it started outlives it for long."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.DEVNULL)
    jobs: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 120
        while not trains():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        jobs = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert jobs and not psutil.wait_procs(jobs, timeout=20)[1]
    finally:
        process.kill()
        for one in psutil.wait_procs(jobs, timeout=0)[1]:
            one.kill()


@pytest.mark.slow
def test_loss_parity_on_a_cpu(tmp_path):
    """The plain run made twice is the same to the bit there, and so is the arm, whose kernels need a card."""
    places = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    done = run_module("benchmarks.loss_parity", "--tiny", "--steps", "4", "--seeds", "2", *places)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results" / "loss-parity-llama2-tiny.json").read_text())
    assert {len(curve) for curve in found["curves"].values()} == {4} and len(found["curves"]) == 5
    assert found["reference"]["same_seed_again"] == {"tail": 0.0, "root_mean_square": 0.0, "largest": 0.0}
    assert found["reference"]["between_seeds_stdev"] > 0
    assert [one["tail"] for one in found["arms"]["mfubench"]["by_seed"]] == pytest.approx([0.0, 0.0], abs=1e-5)
    assert "within the spread" in done.stdout
    assert (tmp_path / "results" / "loss-parity-llama2-tiny.png").stat().st_size > 1000
