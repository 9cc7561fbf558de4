"""Run JSONs that no run can have written are refused when read; what contradicts itself beyond that is found."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_ceilings, make_run_config, make_run_log
from typer.testing import CliRunner

from mfubench.audit import Finding, audit_paths, audit_run
from mfubench.cli import app
from mfubench.config import ConfigError, EvaluationConfig, MeasurementConfig
from mfubench.flops import executed_flops_per_token, flop_terms
from mfubench.host_load import contention, contention_of_ceilings, contention_of_run
from mfubench.prediction.measured_runs import REFERENCE
from mfubench.run_log import Resume, RunLog, Step, read_run_log, write_json, write_run_log
from mfubench.run_plot import plot_run

Damage = Callable[[dict[str, Any]], None]


def change_steps(**values: Any) -> Damage:
    def damage(run: dict[str, Any]) -> None:
        for step in run["steps"]:
            step.update(values)

    return damage


def set_at(*path: Any, value: Any) -> Damage:
    def damage(run: dict[str, Any]) -> None:
        *above, key = path
        place: Any = run
        for part in above:
            place = place[part]
        place[key] = value

    return damage


def negate_times(run: dict[str, Any]) -> None:
    for step in run["steps"]:
        step["step_time_s"] *= -1


def forget_dtype(run: dict[str, Any]) -> None:
    del run["used"]["dtype"]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "negative times": (negate_times, "step_time_s"),
    "times of nothing": (change_steps(step_time_s=0), "step_time_s"),
    "times that are no number": (change_steps(step_time_s=float("nan")), "step_time_s"),
    "endless times": (change_steps(step_time_s=float("inf")), "step_time_s"),
    "other ranks' times of nothing": (set_at("rank_step_times_s", value=[[0.0] * 30]), "rank_step_times_s"),
    "steps without tokens": (change_steps(tokens=0), "tokens"),
    "tokens beyond counting": (change_steps(tokens=10**400), "tokens"),
    "a resume before the beginning": (
        set_at("resumes", value=[{"step": -5, "at": "2026-03-02T09:00:00+00:00"}]),
        "resumes.0.step",
    ),
    "negative time of training": (set_at("wall", "training_s", value=-1.0), "wall.training_s"),
    "no threads": (set_at("environment", "cpu_threads", value=0), "environment.cpu_threads"),
    "steps beyond counting": (set_at("config", "max_iters", value=10**400), "64 bits"),
    "nothing used": (set_at("used", value={}), "used: lacks attention, compile"),
    "no dtype used": (forget_dtype, "used: lacks dtype"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_refused_where_it_is_read(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGES[damage]
    path = write_damaged(tmp_path / "run.json", change)
    with pytest.raises(ConfigError, match=message) as refusal:
        read_run_log(path)
    assert str(path) in str(refusal.value)
    for words in (["audit", str(path)], ["plot", str(path)]):
        assert isinstance(CliRunner().invoke(app, words).exception, ConfigError)


def write_damaged(path: Path, change: Damage) -> Path:
    values = make_run_log().model_dump(mode="json")
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_a_number_too_large_for_a_float_is_refused(tmp_path: Path) -> None:
    path = write_damaged(tmp_path / "run.json", change_steps(step_time_s=7.5))
    path.write_text(path.read_text().replace('"step_time_s": 7.5', '"step_time_s": 1e400'))
    with pytest.raises(ConfigError, match="step_time_s"):
        read_run_log(path)


def test_what_the_engine_writes_of_a_diverged_run_stays_readable(tmp_path: Path) -> None:
    lost = Step(
        step=3, phase="measured", step_time_s=0.5, data_time_s=0.0, tokens=4096, loss=float("nan"),
        learning_rate=0.0, grad_norm=float("inf"),
    )  # fmt: skip
    assert (lost.loss, lost.grad_norm) == (None, None)
    log = make_run_log(status="diverged", reason="the loss of step 3 is not finite", steps=[lost])
    write_run_log(tmp_path / "run.json", log)
    assert read_run_log(tmp_path / "run.json").steps == [lost]
    text = (tmp_path / "run.json").read_text().replace('"loss": null', '"loss": NaN')
    (tmp_path / "run.json").write_text(text)
    assert read_run_log(tmp_path / "run.json").steps == [lost]


def test_times_of_another_run_are_found_and_break_no_picture(tmp_path: Path) -> None:
    log = make_run_log(rank_step_times_s=[[1.0] * 7])
    assert [finding.code for finding in audit_run(log)] == ["ranks_disagree"]
    plot_run(log, tmp_path / "run.png")
    assert (tmp_path / "run.png").exists()


# --- what a run says of its end ---------------------------------------------------------------------------------------


def without_steps(**changes: Any) -> RunLog:
    return make_run_log(steps=[], rank_step_times_s=[], **changes)


def one_finding(log: RunLog) -> Finding:
    (finding,) = audit_run(log)
    return finding


def test_a_run_that_went_well_without_steps_is_impossible() -> None:
    wall = make_run_log().wall
    finding = one_finding(without_steps(wall=wall))
    assert (finding.code, finding.impossible, finding.certainty) == ("status_contradicts_steps", True, "certain")
    assert f"{wall.training_tokens:,} tokens" in finding.sentence
    assert one_finding(without_steps(wall=None)).impossible
    assert audit_run(without_steps(wall=None, evaluation=EvaluationConfig(only=True), continues="training/a")) == []


def test_a_failed_run_with_rates_is_impossible() -> None:
    finding = one_finding(make_run_log(status="failed", reason="did not finish"))
    assert (finding.code, finding.impossible) == ("status_contradicts_steps", True)
    beginning = make_run_log(status="failed", reason="did not finish", wall=None)
    assert audit_run(beginning) == [], "the beginning of a resumed run has the steps of before"


def test_a_run_too_short_to_measure_is_told_and_possible() -> None:
    log = make_run_log(max_iters=3, measurement=MeasurementConfig(warmup_steps=3))
    finding = one_finding(log)
    assert (finding.code, finding.impossible, finding.certainty) == ("nothing_measured", False, "certain")


# --- a CPU against its measured ceiling -------------------------------------------------------------------------------


def cpu_run_at(share: float, fastest: float | None = None) -> RunLog:
    """A CPU run whose steps execute `share` times the FLOP/s of a ceiling of 0.1 TFLOP/s, one of them `fastest`."""
    config = make_run_config("cpu")
    tokens = config.micro_batch_size * config.seq_len * config.gradient_accumulation_steps
    seconds = tokens * executed_flops_per_token(flop_terms(config.model, config.seq_len), config) / 0.1e12
    log = make_run_log(device="cpu", step_time_s=seconds / share)
    if fastest is not None:
        log.steps[20].step_time_s = log.rank_step_times_s[0][20] = seconds / fastest
    return log


CEILINGS = make_ceilings("cpu", "fp32", 0.1)


@pytest.mark.parametrize(
    ("log", "certainty", "impossible"),
    [
        (cpu_run_at(24.94), "certain", True),
        (cpu_run_at(3.2), "certain", True),
        (cpu_run_at(2.0), "very likely", False),
        (cpu_run_at(1.1), "possible", False),
        (cpu_run_at(0.5, fastest=0.95), "possible", False),
        (cpu_run_at(0.5, fastest=100.0), "certain", True),
    ],
)
def test_beyond_a_measured_ceiling(log: RunLog, certainty: str, impossible: bool) -> None:
    (finding,) = audit_run(log, CEILINGS)
    assert (finding.code, finding.certainty, finding.impossible) == ("above_ceiling", certainty, impossible)
    assert "measure the ceilings again on a quiet machine" in finding.sentence


def test_below_a_measured_ceiling() -> None:
    assert audit_run(cpu_run_at(0.5), CEILINGS) == []


def test_steps_above_the_ceiling_are_named() -> None:
    (finding,) = audit_run(cpu_run_at(0.5, fastest=0.95), CEILINGS)
    assert "1 of 26 measured steps are above 100 %" in finding.sentence and "step 20 of" in finding.sentence


def test_a_ceiling_of_more_threads_bounds_by_what_they_reach_together() -> None:
    """0.1 TFLOP/s of 32 threads are 0.00625 for the two of a rank only where threads are worth the same."""
    many = CEILINGS.model_copy(update={"threads": 32})
    (finding,) = audit_run(cpu_run_at(1.5), many)
    assert not finding.impossible and "scaled to the 2 of a rank" in finding.sentence
    (finding,) = audit_run(cpu_run_at(3.2), many)
    assert finding.impossible


def test_a_ceiling_that_others_disturbed_is_the_one_to_doubt() -> None:
    disturbed = CEILINGS.model_copy(update={"telemetry": load(100.0, 0.6)})
    (finding,) = audit_run(cpu_run_at(2.0), disturbed)
    assert "doubt the ceiling: other processes took 1.4 of 2 cores" in finding.sentence
    assert "delete the study's ceilings.json and call snakemake again" in finding.sentence
    assert finding.true_value is None  # what the doubted ceiling gives is not the truth
    (undisturbed,) = audit_run(cpu_run_at(2.0), CEILINGS)
    assert str(undisturbed.true_value).endswith(" s a step, if the ceiling is right")


def test_ceilings_of_a_card_do_not_wait_for_cores() -> None:
    on_cpu, on_card = (make_ceilings(device, "fp32", 0.1) for device in ("cpu", "cuda"))
    disturbed = {"telemetry": load(100.0, 0.6)}
    taken = contention_of_ceilings(on_cpu.model_copy(update=disturbed), 2)
    assert taken is not None and taken.others == pytest.approx(1.4)
    assert contention_of_ceilings(on_cpu, 2) is None
    assert contention_of_ceilings(on_card.model_copy(update=disturbed), 2) is None


def test_a_cpu_run_without_ceilings_says_what_was_not_checked(tmp_path: Path) -> None:
    write_run_log(tmp_path / "run.json", cpu_run_at(24.94))
    text = audit_paths([tmp_path / "run.json"]).to_text()
    assert "nothing to object to in what could be checked" in text and "needs its ceilings.json" in text


# --- a machine with other work ----------------------------------------------------------------------------------------


def load(cpu_percent: float, run_cores: float) -> dict[str, Any]:
    return {"host": {"cpu_percent": {"median": cpu_percent}, "run_cores": {"median": run_cores}}, "host_limited": None}


@pytest.mark.parametrize(
    ("cpu_percent", "run_cores", "busy"),
    [
        (100.0, 0.19, True),
        (97.0, 1.2, True),
        (100.0, 1.96, False),  # the load is the run's own
        (100.0, 1.6, False),
        (12.0, 0.19, False),  # cores were idle: the run wanted no more
        (60.0, 1.0, False),
    ],
)
def test_a_busy_machine_is_told(cpu_percent: float, run_cores: float, busy: bool) -> None:
    log = make_run_log(device="cpu", telemetry=load(cpu_percent, run_cores))
    assert [finding.code for finding in audit_run(log)] == ["machine_was_busy"] * busy
    assert (contention_of_run(log) is not None) == busy


def test_a_run_is_disturbed_where_any_process_of_its_steps_was() -> None:
    """But not by what disturbed steps that no longer count."""
    resumed = Resume(step=12, at="2026-03-02T08:59:50+00:00", telemetry=load(100.0, 0.19))
    log = make_run_log(device="cpu", telemetry=load(100.0, 1.96)).model_copy(update={"resumes": [resumed]})
    taken = contention_of_run(log)
    assert taken is not None and taken.others == pytest.approx(1.81)
    demoted = resumed.model_copy(update={"changed": ["seq_len: 256 there, 512 here"]})
    assert contention_of_run(log.model_copy(update={"resumes": [demoted]})) is None


def test_what_others_took_is_counted() -> None:
    finding = one_finding(make_run_log(device="cpu", telemetry=load(100.0, 0.19)))
    assert "other processes took 1.8 of 2 cores while this ran" in finding.sentence
    assert "not a measurement of this machine" in finding.sentence and not finding.impossible


def test_a_gpu_run_waits_for_its_card_not_for_cores() -> None:
    assert audit_run(make_run_log(telemetry=load(100.0, 1.1))) == []


def test_a_load_that_nobody_sampled_says_nothing() -> None:
    for telemetry in (None, {}, {"host": {}}, {"host": {"cpu_percent": {"median": 100.0}, "run_cores": None}}):
        assert contention(telemetry, 2, 2) is None


@pytest.mark.parametrize(
    ("telemetry", "key"),
    [
        ({"host": 1}, "telemetry.host: "),
        ({"host": {"cpu_percent": {"mean": 3}, "run_cores": {"mean": 1}}}, "telemetry.host.cpu_percent.median: "),
        ({"host": {"cpu_percent": -1, "run_cores": {"median": 1.0}}}, "telemetry.host.cpu_percent: "),
        ({"host": {"cpu_percent": {"median": None}}}, "telemetry.host.cpu_percent.median: "),
        ({"host": {"cpu_percent": {"median": -1.0}}}, "telemetry.host.cpu_percent.median: "),
        ({"gpus": -1}, "telemetry.gpus: "),
        ({"gpus": [{"power_w": 640.0}]}, "telemetry.gpus.0.power_w: "),
        ({"throttled": {"power_cap": {"steps": 1}}}, "telemetry.throttled.power_cap.share: "),
        ({"hosts": {}}, "telemetry.hosts: "),
    ],
    ids=str,
)
def test_a_summary_of_samples_that_is_none_is_refused_by_its_key(tmp_path: Path, telemetry: object, key: str) -> None:
    path = tmp_path / "run.json"
    write_json(path, make_run_log(device="cpu").model_dump(mode="json") | {"telemetry": telemetry})
    with pytest.raises(ConfigError, match=f"run.json: is not a run JSON of this version: {re.escape(key)}"):
        read_run_log(path)


def test_tensors_that_lie_in_nothing_are_refused(tmp_path: Path) -> None:
    values = make_run_log().model_dump(mode="json")
    values["memory"][0]["peak_reserved_gib"] = None
    write_json(tmp_path / "run.json", values)
    with pytest.raises(ConfigError, match=r"memory\.0: peak_reserved_gib: null, where peak_allocated_gib is known"):
        read_run_log(tmp_path / "run.json")


# --- several folders --------------------------------------------------------------------------------------------------


def test_runs_of_several_studies_are_told_apart_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: a short name would seem to be of the study above it."""
    monkeypatch.chdir(tmp_path)
    for study in ("one", "two"):
        write_run_log(tmp_path / "results" / study / "runs" / "tiers" / "tier1.json", make_run_log(name="tiers/tier1"))
    write_run_log(tmp_path / "results" / "two" / "runs" / "tiers" / "tier2.json", make_run_log(name="tiers/tier2"))
    names = [run.name for run in audit_paths(["results"]).runs]
    assert names == [
        f"results/{case}" for case in ("one/runs/tiers/tier1", "two/runs/tiers/tier1", "two/runs/tiers/tier2")
    ]
    assert [run.name for run in audit_paths(["results/two"]).runs] == ["tiers/tier1", "tiers/tier2"]


def test_a_run_that_is_named_by_its_path_keeps_its_own_name(tmp_path: Path) -> None:
    for study in ("one", "two"):
        write_run_log(tmp_path / study / "runs" / "tiers" / "tier1.json", make_run_log(name="tiers/tier1"))
    renamed = make_run_log(name="tiers/tier1").model_copy(update={"name": "tiers/tier3"})
    write_run_log(tmp_path / "three" / "runs" / "tiers" / "tier3.json", renamed)
    codes = {Path(run.name).parts[-4]: run.codes for run in audit_paths([tmp_path]).runs}
    assert codes == {"one": [], "two": [], "three": ["not_what_ran"]}


def test_studies_are_not_held_against_each_other(tmp_path: Path) -> None:
    for case, gpu in (("tier1", "NVIDIA H200"), ("tier2", "NVIDIA H100 80GB HBM3")):
        log = make_run_log(name=f"tiers/{case}", gpu_name=gpu, step_time_s=1.5)
        write_run_log(tmp_path / case / "runs" / "tiers" / f"{case}.json", log)
    assert [run.codes for run in audit_paths([tmp_path]).runs] == [[], []]


def scaling_logs() -> tuple[RunLog, RunLog]:
    one = make_run_log(name="scaling/one", parallelism="ddp")
    return one, make_run_log(name="scaling/two", world_size=2, parallelism="ddp")


def test_weak_scaling_is_of_one_study(tmp_path: Path) -> None:
    """Equal settings of two studies are two studies still: their single-GPU runs are no basis for each other."""
    for study in ("a", "b"):
        for log in scaling_logs():
            write_run_log(tmp_path / study / "runs" / f"{log.name}.json", log)
    series = audit_paths([tmp_path / "a", tmp_path / "b"]).weak_scaling
    assert [[Path(one[end]).parts[-4] for end in ("from", "to")] for one in series] == [["a", "a"], ["b", "b"]]
    (tmp_path / "a" / "runs" / "scaling" / "two.json").unlink()
    (tmp_path / "b" / "runs" / "scaling" / "one.json").unlink()
    assert audit_paths([tmp_path / "a", tmp_path / "b"]).weak_scaling == []


def test_shipped_studies_with_the_same_stages_are_not_mixed() -> None:
    studies = [REFERENCE / "h200" / f"{model}-2x80gb" for model in ("llama2-1.36b", "qwen3-1.8b")]
    together, apart = audit_paths(studies), [audit_paths([study]) for study in studies]
    assert [run.codes for run in together.runs] == [run.codes for report in apart for run in report.runs]
    ends = [[one["efficiency"] for one in report.weak_scaling] for report in (together, *apart)]
    assert ends[0] == ends[1] + ends[2] and ends[1]
    assert all(any(f"/{study.name}/runs/" in run.name for study in studies) for run in together.runs)


def test_runs_that_lie_in_no_study_are_held_together_by_folder_or_as_they_are_given(tmp_path: Path) -> None:
    files = []
    for folder, gpu in (("one", "NVIDIA H200"), ("two", "NVIDIA H100 80GB HBM3")):
        files.append(tmp_path / folder / "run.json")
        write_run_log(files[-1], make_run_log(name=f"tiers/{folder}", gpu_name=gpu, step_time_s=1.5))
    assert [run.codes for run in audit_paths([tmp_path]).runs] == [[], []]
    assert [run.codes for run in audit_paths([tmp_path / "one", tmp_path / "two"]).runs] == [[], []]
    assert [run.codes for run in audit_paths(files).runs] == [["workloads_differ"], ["workloads_differ"]]


def test_ceilings_of_the_study_are_used_and_said(tmp_path: Path) -> None:
    run = tmp_path / "study" / "runs" / "tiers" / "tier1.json"
    write_run_log(run, cpu_run_at(24.94))
    write_json(tmp_path / "study" / "ceilings.json", CEILINGS.model_dump(mode="json"))
    report = audit_paths([run])
    assert report.impossible and "study/ceilings.json were used" in report.to_text()
    other = CEILINGS.model_copy(update={"device_name": "another CPU"})
    given = audit_paths([run], other)
    assert given.impossible, "those of another device switch none off"
    assert given.notes[0] == "the ceilings given are another device's (another CPU) and were left alone"
    assert "study/ceilings.json were used" in given.notes[1]
    assert audit_paths([run], CEILINGS).impossible and audit_paths([run], CEILINGS).notes == []
    other_card = make_ceilings("cuda", "bf16", 768)
    assert audit_paths([run], other_card).impossible, "nor do a card's"


def test_given_ceilings_are_those_of_the_runs_that_they_fit(tmp_path: Path) -> None:
    """Of a study on two devices: the card's own bound one run, the other has none."""
    tflop = 65_536 * executed_flops_per_token(flop_terms(make_run_config().model, 2048), make_run_config()) / 1e12
    for name, gpu in (("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")):
        log = make_run_log(name=f"tiers/{name}", gpu_name=gpu, step_time_s=tflop / (768 * 1.07))
        write_run_log(tmp_path / name / "runs" / "tiers" / f"{name}.json", log)
    report = audit_paths([tmp_path], make_ceilings("cuda", "bf16", 768))
    assert [run.codes for run in report.runs] == [["above_ceiling"], []]
    assert report.notes == ["the ceilings given are another device's (NVIDIA H100 80GB HBM3) and were left alone"]


def test_ceilings_of_another_device_are_left_alone(tmp_path: Path) -> None:
    write_run_log(tmp_path / "runs" / "tiers" / "tier1.json", cpu_run_at(24.94))
    other = CEILINGS.model_copy(update={"device_name": "another CPU"})
    write_json(tmp_path / "ceilings.json", other.model_dump(mode="json"))
    report = audit_paths([tmp_path])
    assert not report.impossible and "another CPU) and were left alone" in report.to_text()


def test_a_cpu_run_has_processes(tmp_path: Path) -> None:
    one = make_run_log(device="cpu", name="scaling/one")
    two = make_run_log(device="cpu", name="scaling/two", world_size=2)
    for log in (one, two):
        write_run_log(tmp_path / f"{log.config.world_size}.json", log)
    text = audit_paths([tmp_path]).to_text()
    assert "2 micro-steps per process" in text and "GPU" not in text
    wrong = two.model_copy(deep=True)
    for step in wrong.steps:
        step.tokens //= 2
    assert "one process's 2 micro-steps" in " ".join(finding.sentence for finding in audit_run(wrong))


# --- files that hold anything -----------------------------------------------------------------------------------------


def test_files_of_any_kind_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "long.json").write_text('{"tokens_per_s": ' + "9" * 5000 + "}")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "none.json").write_text('{"runs": []}')
    os.mkfifo(tmp_path / "pipe.json")
    for name, message in [
        ("deep.json", "nested too deeply"),
        ("long.json", "no valid JSON"),
        ("empty.json", "holds no figures that can be audited"),
        ("none.json", "holds no figures that can be audited"),
        ("pipe.json", "is a pipe or device"),
    ]:
        with pytest.raises(ConfigError, match=message) as refusal:
            audit_paths([tmp_path / name])
        assert name in str(refusal.value)


def test_pipes_links_and_what_is_unfinished_are_no_runs_of_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere.json")
    (tmp_path / "round").symlink_to(tmp_path)
    write_run_log(tmp_path / "run-work" / "partial.json", make_run_log(status="failed"))
    write_run_log(tmp_path / "study" / "runs" / "tiers" / "tier1.json", make_run_log())
    write_run_log(tmp_path / "study" / "work" / "tiers" / "tier1.json", make_run_log())
    assert len(audit_paths([tmp_path]).runs) == 1
