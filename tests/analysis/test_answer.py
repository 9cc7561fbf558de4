from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import numpy as np
import pytest
from analysis.example_study import declare, disturb_ceilings
from factories import make_model, make_run_config

from mfubench.analysis.answer import answers, command_for
from mfubench.analysis.extrapolation import extrapolate
from mfubench.analysis.findings import Findings
from mfubench.analysis.report.answer_section import answer_section, fastest_note
from mfubench.analysis.report.blocks import Cards, Command, Notice, Section, Table, Text
from mfubench.analysis.report.closing_sections import extrapolation_section
from mfubench.analysis.statistics import Quartiles
from mfubench.analysis.summary import summarize
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
    assert answer.most_stable is not None and answer.most_stable.case != "tiers/tier3"
    assert answer.fastest.stability is not None and answer.fastest.stability.outliers == 10


def titles_of(found: Findings) -> list[str]:
    (cards,) = [block for block in answer_section(found).blocks if isinstance(block, Cards)]
    return [card.title for card in cards.cards]


def test_the_only_setting_near_the_fastest_is_not_called_stable(found: Findings, changed_study: Path):
    assert titles_of(found)[0] in ("Fastest", "Fastest and most stable") and "table" in "".join(titles_of(found))
    slow_down(changed_study / "runs" / "tiers" / "tier3.json", 1 / 1.3)
    alone = Findings.of(changed_study)
    (answer,) = answers(alone)
    assert answer.fastest.case == "tiers/tier3" and answer.most_stable is None
    assert titles_of(alone) == ["Fastest"]


def test_one_setting_under_two_names_is_not_the_more_stable_of_two(changed_study: Path):
    slow_down(changed_study / "runs" / "tiers" / "tier3.json", 1 / 1.3)
    log = read_run_log(changed_study / "runs" / "tiers" / "tier3.json")
    config = log.config.model_copy(update={"name": "tiers/tier4"})
    write_run_log(
        changed_study / "runs" / "tiers" / "tier4.json", log.model_copy(update={"name": config.name, "config": config})
    )
    declare(changed_study, config.name)
    (answer,) = answers(Findings.of(changed_study))
    assert len([item for item in answer.candidates if item.tokens_per_s > 0.9 * answer.fastest.tokens_per_s]) == 2
    assert answer.most_stable is None


def test_settings_that_cannot_be_told_apart_are_named(changed_study: Path):
    for case in ("tiers/tier3", "ablations/4.3-accumulation16"):
        (changed_study / "runs" / f"{case}.json").unlink()
    (answer,) = answers(Findings.of(changed_study))
    together = {answer.fastest.case, *(candidate.case for candidate in answer.as_fast)}
    assert {"tiers/tier1", "tiers/tier2", "scaling/2.2-compile-gpus8", "memory/5.2-micro-batch24"} <= together


def make_noisy(study: Path, busy: bool) -> None:
    """Steps of every run that take from a quarter of their time to four times of it; busy: since others worked."""
    random = np.random.default_rng(1)
    host = {"cpu_percent": {"median": 100.0}, "run_cores": {"median": 0.2}}
    for path in (study / "runs").glob("*/*.json"):
        log = read_run_log(path)
        for step in log.steps:
            step.step_time_s *= 4 ** random.uniform(-1, 1)
        write_run_log(path, log.model_copy(update={"telemetry": {"host": host} if busy else None}))


def words_of(section: Section) -> str:
    return "\n".join(block.text for block in section.blocks if isinstance(block, Notice | Text))


@pytest.mark.parametrize("busy", [True, False])
def test_no_setting_is_named_where_all_are_too_noisy(cpu_study: Path, tmp_path: Path, busy: bool, monkeypatch):
    study = Path(shutil.copytree(cpu_study, tmp_path / "results" / "study"))
    (study / "work").mkdir()
    make_noisy(study, busy)
    monkeypatch.chdir(tmp_path)
    found = Findings.of(study)
    (answer,) = answers(found)
    others = len(answer.candidates) - 1
    assert answer.doubt is not None
    assert f"is not told apart from any of the {others} other settings (3 of 3 comparisons too noisy to tell)" in (
        answer.doubt
    )
    section = answer_section(found)
    assert not any(isinstance(block, Cards | Command) for block in section.blocks)
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert len(table.rows) == others + 1
    words = words_of(section)
    assert f"**No setting can be named:** `{answer.fastest.case}` has the highest rate, " in words
    assert ("The machine was busy during 7 of 7 runs: measure again, with the command above" in words) == busy
    anew = "`rm -r results/study/runs results/study/work results/study/ceilings.json && snakemake --cores all "
    assert (anew in words) == busy
    assert ("Raise `repeats` in the study" in words) != busy
    told = extrapolation_section(found)
    assert not any(isinstance(block, Table) for block in told.blocks) and "no setting can be named" in words_of(told)
    assert summarize(found)["recommended"][answer.model]["doubt"] == answer.doubt


def test_a_quiet_machine_leaves_no_doubt(found: Findings):
    (answer,) = answers(found)
    assert answer.doubt is None and summarize(found)["recommended"][answer.model]["doubt"] is None
    assert any(isinstance(block, Cards) for block in answer_section(found).blocks)
    assert any(isinstance(block, Table) for block in extrapolation_section(found).blocks)


def test_settings_that_are_all_about_as_fast_leave_no_doubt(changed_study: Path):
    for path in (changed_study / "runs").glob("*/*.json"):
        if not path.stem.startswith(("tier1", "tier2")):
            path.unlink()
    (answer,) = answers(Findings.of(changed_study))
    assert [candidate.case for candidate in answer.as_fast] == [candidate.case for candidate in answer.candidates[1:]]
    assert answer.as_fast and answer.doubt is None


def test_a_rate_above_the_peak_is_not_recommended(cpu_study: Path, tmp_path: Path):
    """On a CPU, whose peak is measured, by the palm convention; on a card by what causal kernels execute."""
    study = Path(shutil.copytree(cpu_study, tmp_path / "study"))
    for path in (study / "runs").glob("*/*.json"):
        slow_down(path, 0.4)
    (answer,) = answers(Findings.of(study))
    mfu = answer.fastest.runs[0].headline_mfu
    assert mfu is not None and mfu > 1
    assert f"has an MFU of {100 * mfu:.1f} %, above the matmul measured here" in (answer.doubt or "")
    assert "Raise `repeats` in the study" in words_of(answer_section(Findings.of(study)))
    disturb_ceilings(study)
    words = words_of(answer_section(Findings.of(study)))
    assert "Measure the ceilings anew first" in words and "Raise `repeats`" not in words


@pytest.mark.parametrize(("causal", "possible"), [(0.8, True), (1.1, False)])
def test_a_long_context_may_have_more_than_the_peak_by_the_palm_convention(
    found: Findings, causal: float, possible: bool
):
    (answer,) = answers(found)
    run = answer.fastest.runs[0]
    mfu = {**run.mfu, "palm": Quartiles(1.2, 1.2, 1.2, 76), "causal": Quartiles(causal, causal, causal, 76)}
    candidate = replace(answer.fastest, runs=(replace(run, mfu=mfu),))
    assert (candidate.impossible_mfu is None) == possible


def test_settings_that_are_as_fast_are_counted_where_not_all_are_named(found: Findings):
    (answer,) = answers(found)
    others = [replace(candidate, against_fastest=None) for candidate in answer.candidates[1:7]]
    note = fastest_note(replace(answer, candidates=(answer.fastest, *others)))
    assert note.count("`") == 8 and f"`{others[3].case}` and 2 more: take" in note
    assert "more:" not in fastest_note(replace(answer, candidates=(answer.fastest, *others[:4])))


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
        make_run_config(model=make_model("qwen3-1.8b", name="mine", hidden_size=1024)),
        make_run_config(device="cpu"),
        make_run_config(kernels={"swiglu": "fused"}, communication={"bucket_mb": 50.0}),
    ],
    ids=["plain", "dataloader", "changed-model", "named-model", "cpu", "kernels"],
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


def test_extrapolation_is_by_all_processes_of_the_case(found: Findings):
    (answer,) = answers(found)
    repeated = next(candidate for candidate in answer.candidates if candidate.case == "tiers/tier1")
    assert len(repeated.runs) == 3
    hours = [row.hours for row in extrapolate(found, replace(answer, fastest=repeated))]
    alone = [
        extrapolate(found, replace(answer, fastest=replace(repeated, runs=(run,))))[0].hours for run in repeated.runs
    ]
    assert hours[0] == pytest.approx(geometric_mean(alone)) and len(set(alone)) == 3


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
