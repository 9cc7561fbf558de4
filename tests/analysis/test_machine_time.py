from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from factories import make_run_config, make_run_log, make_steps

from mfubench.analysis.machine_time import ENDS, PARTS, machine_time, parts_of_run
from mfubench.audit.run_numbers import own_phases
from mfubench.run_log import Phase, RunLog

TIMES = Path(__file__).with_name("times_2xh200.json")


def log_with_times(run: dict[str, Any]) -> RunLog:
    """A run log with the clock, steps and phases of a run of the fixture."""
    config = make_run_config(name=run["name"], world_size=run["world_size"])
    steps = [
        step.model_copy(update={"phase": phase, "step_time_s": time_s})
        for step, (phase, time_s) in zip(make_steps(config, 1.0, count=len(run["steps"])), run["steps"], strict=True)
    ]
    phases = [Phase(kind=kind, after_step=after_step, time_s=time_s) for kind, after_step, time_s in run["phases"]]
    log = make_run_log(config=config, steps=steps, phases=phases)
    assert log.wall is not None
    return log.model_copy(update={"wall": log.wall.model_copy(update={"total_s": run["total_s"]})})


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return json.loads(TIMES.read_text(encoding="utf-8"))["runs"]


@pytest.fixture(scope="module")
def logs(runs: list[dict[str, Any]]) -> list[RunLog]:
    return [log_with_times(run) for run in runs]


def test_parts_of_real_runs_are_the_total(logs: list[RunLog], runs: list[dict[str, Any]]):
    time = machine_time(logs)
    assert time.left_out == {} and time.total.runs == len(runs) == 14
    for spent in (time.total, *time.stages.values()):
        assert sum(spent.parts_ns.values()) == spent.total_ns
        assert sum(spent.gpu_parts_ns.values()) == spent.gpu_total_ns
    for part in PARTS:
        assert sum(spent.parts_ns[part] for spent in time.stages.values()) == time.total.parts_ns[part]
        assert sum(spent.gpu_parts_ns[part] for spent in time.stages.values()) == time.total.gpu_parts_ns[part]
    clock = math.fsum(run["total_s"] for run in runs)
    gpu_clock = math.fsum(run["total_s"] * run["world_size"] for run in runs)
    assert time.total.total_ns / 1e9 == pytest.approx(clock, abs=1e-7)  # half a nanosecond a run
    assert time.total.gpu_total_ns / 1e9 == pytest.approx(gpu_clock, abs=1e-7)


def test_each_part_holds_what_its_name_says(logs: list[RunLog], runs: list[dict[str, Any]]):
    parts = machine_time(logs).total.parts_ns
    steps = [(phase, time_s) for run in runs for phase, time_s in run["steps"]]
    phases = [(kind, time_s) for run in runs for kind, _, time_s in run["phases"]]
    measured = math.fsum(time_s for phase, time_s in steps if phase == "measured")
    assert parts["measured"] / 1e9 == pytest.approx(measured, abs=1e-6)
    others = math.fsum(time_s for phase, time_s in steps if phase in ("compile", "warmup"))
    assert parts["first_steps"] / 1e9 == pytest.approx(others, abs=1e-6)
    for part, kinds in (("preheat", ["preheat"]), ("profile", ["profile"]), ("setup", ["setup"])):
        assert parts[part] / 1e9 == pytest.approx(math.fsum(t for kind, t in phases if kind in kinds), abs=1e-6)
    assert parts["between"] / 1e9 == pytest.approx(math.fsum(t for kind, t in phases if kind == "logging"), abs=1e-6)


def test_the_largest_part_beside_the_measured_steps(logs: list[RunLog]):
    time = machine_time(logs)
    assert time.total.largest_overhead == ENDS
    assert time.total.share(ENDS) == pytest.approx(0.274, abs=0.001)
    assert time.total.share("measured") == pytest.approx(0.300, abs=0.001)
    assert list(time.stages) == ["ablations", "baseline", "scaling", "smoke", "tiers"]  # the order of the logs


def test_runs_without_a_clock_or_with_an_impossible_one_are_named():
    good, no_clock = make_run_log(name="tiers/a"), make_run_log(name="tiers/b", wall=None)
    short = make_run_log(name="tiers/c")
    assert short.wall is not None
    short = short.model_copy(update={"wall": short.wall.model_copy(update={"total_s": 1.0})})
    time = machine_time([good, no_clock, short])
    assert time.total.runs == 1
    assert time.left_out == {"tiers/b": "no clock", "tiers/c": "steps and phases take longer than the clock says"}


def test_no_runs_take_no_time():
    time = machine_time([])
    assert time.total.total_ns == 0 and time.total.share("measured") == 0.0 and time.stages == {}


def test_a_resumed_run_counts_its_last_process_alone():
    """Steps and phases before the resume are another process's, whose clock is gone."""
    log = make_run_log(first_step=20, step_count=10)
    earlier = make_run_log(step_count=21)  # did one step more than its last checkpoint holds
    own = parts_of_run(log)
    history = {"steps": earlier.steps + log.steps, "phases": earlier.phases + log.phases}
    resumed = log.model_copy(update=history)
    assert own_phases(resumed) == log.phases
    assert parts_of_run(resumed) == own
    assert sum(own.values()) == round((log.wall.total_s if log.wall else 0) * 1e9)


def test_the_start_of_a_process_has_parts_of_its_own(logs: list[RunLog]):
    """In what the others leave of the clock, which earlier versions did not take apart."""
    log = logs[0]
    assert log.wall is not None
    before = parts_of_run(log)
    wall = log.wall.model_copy(update={"joined_s": 4.5, "chosen_s": 1.25})
    after = parts_of_run(log.model_copy(update={"wall": wall}))
    assert (after["joining"], after["choosing"]) == (4_500_000_000, 1_250_000_000)
    assert before["joining"] == before["choosing"] == 0 and before[ENDS] - after[ENDS] == 5_750_000_000
