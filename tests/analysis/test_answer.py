from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from factories import make_model, make_run_config

from mfubench.analysis.answer import answers, command_for
from mfubench.analysis.extrapolation import extrapolate
from mfubench.analysis.findings import Findings
from mfubench.config import RunConfig
from mfubench.experiments import build_run, parse_overrides
from mfubench.run_log import read_run_log, write_run_log


@pytest.fixture(scope="module")
def found(gpu_study: Path) -> Findings:
    return Findings.of(gpu_study)


def test_the_fastest_has_the_highest_rate_over_all_gpus(found: Findings):
    (answer,) = answers(found)
    assert answer.fastest.case == "tiers/tier3"  # 1.2-compile is faster per GPU, on two of them
    assert answer.fastest.tokens_per_s == pytest.approx(8 * 68_900, rel=0.003)
    assert answer.as_fast == []
    rates = [candidate.tokens_per_s for candidate in answer.candidates]
    assert rates == sorted(rates, reverse=True)


def test_least_memory_stays_near_the_fastest(found: Findings):
    (answer,) = answers(found)
    assert answer.least_memory is not None
    assert answer.least_memory.case == "ablations/4.4-micro-batch8"  # 7 % slower, 40.4 GiB
    assert answer.least_memory.peak_memory_gib == pytest.approx(40.4)


def test_repeats_belong_to_their_case(found: Findings):
    (answer,) = answers(found)
    tier1 = next(candidate for candidate in answer.candidates if candidate.case == "tiers/tier1")
    assert len(tier1.runs) == 3
    assert not any("repeat" in candidate.case for candidate in answer.candidates)


def test_hiccups_and_failures_make_a_setting_unstable(changed_study: Path):
    path = changed_study / "runs" / "tiers" / "tier3.json"
    log = read_run_log(path)
    for step in log.steps[40:50]:
        step.step_time_s *= 1.3
    write_run_log(path, log)
    (answer,) = answers(Findings.of(changed_study))
    assert answer.fastest.case == "tiers/tier3"
    assert answer.most_stable.case != "tiers/tier3"
    assert answer.fastest.stability is not None and answer.fastest.stability.outliers == 10


def test_settings_that_cannot_be_told_apart_are_named(changed_study: Path):
    for case in ("tiers/tier3", "ablations/4.3-accumulation16"):
        (changed_study / "runs" / f"{case}.json").unlink()
    (answer,) = answers(Findings.of(changed_study))
    together = {answer.fastest.case, *(candidate.case for candidate in answer.as_fast)}
    assert {"tiers/tier1", "tiers/tier2", "scaling/2.2-compile-gpus8", "memory/5.2-micro-batch24"} <= together


def test_no_answer_from_smoke_tests(changed_study: Path):
    for path in (changed_study / "runs").glob("*/*.json"):
        if path.parent.name != "smoke":
            path.unlink()
    assert answers(Findings.of(changed_study)) == []


@pytest.mark.parametrize(
    "config",
    [
        make_run_config(),
        make_run_config(loader={"kind": "dataloader", "num_workers": 2}, cuda_graphs=True, world_size=4),
        make_run_config(model=make_model("llama2-1.36b", num_hidden_layers=4), tf32=False, dtype="float32"),
        make_run_config(device="cpu"),
        make_run_config(kernels={"swiglu": "fused"}, communication={"bucket_mb": 50.0}),
    ],
    ids=["plain", "dataloader", "changed-model", "cpu", "kernels"],
)
def test_the_command_gives_the_same_settings(config: RunConfig):
    """What `mfubench train` builds from the command is the run that was measured."""
    program, verb, model, data_option, data, *settings = shlex.split(command_for(config))
    assert (program, verb, data_option) == ("mfubench", "train", "--data")
    defaults = {"name": "by-hand/run", "model": model, "dataset": data.rpartition("/")[2], "seq_len": 256}
    built = build_run((defaults, parse_overrides(settings)), "test")
    left = built.model_dump(exclude={"name", "device"})
    assert left == config.model_dump(exclude={"name", "device"})


def test_extrapolation_of_the_example(found: Findings):
    (answer,) = answers(found)
    rows = extrapolate(found, answer)
    assert [row.target.tokens for row in rows] == [6_000_000_000, 85_000_000_000]
    row = rows[1]
    assert row.hours == pytest.approx(85e9 / (8 * 68_900) / 3600, rel=0.005)
    assert row.iterations == pytest.approx(85e9 / (24 * 8 * 8 * 2048))
    assert row.gpu_hours == pytest.approx(8 * row.hours)
    assert row.energy_kwh == pytest.approx(0.640 * row.gpu_hours)
    assert row.money == pytest.approx(2.9 * row.gpu_hours)
    assert row.hours_interval is not None and row.hours_interval.low < row.hours < row.hours_interval.high


def test_extrapolation_without_expectations_power_or_price(cpu_study: Path):
    found = Findings.of(cpu_study)
    (answer,) = answers(found)
    rows = extrapolate(found, answer)
    parameters = answer.fastest.runs[0].log.parameters
    assert parameters is not None
    assert [row.target.tokens for row in rows] == [6_000_000_000, 85_000_000_000, 20 * parameters.total]
    assert all(row.money is None and row.energy_kwh is None for row in rows)


def test_the_interval_of_hours_is_of_a_factor(changed_study: Path):
    """However much the processes differ, no training takes less than no time."""
    for path, factor in (("tier1-repeat1", 20.0), ("tier1-repeat2", 0.05)):
        slow_down(changed_study / "runs" / "tiers" / f"{path}.json", factor)
    found = Findings.of(changed_study)
    (answer,) = answers(found)
    row = extrapolate(found, answer)[0]
    assert row.hours_interval is not None and 0 < row.hours_interval.low < row.hours < row.hours_interval.high
    assert row.hours_interval.low * row.hours_interval.high == pytest.approx(row.hours**2)


def slow_down(path: Path, factor: float) -> None:
    log = read_run_log(path)
    for step in log.steps:
        step.step_time_s *= factor
    write_run_log(path, log)
