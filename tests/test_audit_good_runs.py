"""No false alarm: whatever is consistent passes, however unusual, and studies are judged as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import make_ceilings, make_model, make_run_config, make_run_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfubench.audit import audit_logs, audit_main, audit_paths, audit_run
from mfubench.audit.counting import count_micro_batches
from mfubench.audit.main import check
from mfubench.ceilings import Ceilings
from mfubench.config import ConfigError, EvaluationConfig
from mfubench.flops import executed_flops_per_token, flop_terms, flops_per_token
from mfubench.prediction.measured_runs import REFERENCE
from mfubench.run_log import Choice, Resume, RunLog, write_json, write_run_log

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
quick = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(
    world_size=SIZES,
    accumulation=SIZES,
    micro_batch=SIZES,
    seq_len=st.sampled_from([512, 2048, 8192]),
    preset=st.sampled_from(["llama2-1.36b", "gpt2-1.36b", "llama3-1.5b", "qwen3-1.8b"]),
    arithmetic=st.sampled_from(["bfloat16", "float16", "float32", "tf32", "fp8"]),
    first_step=st.sampled_from([0, 7]),
    slowness=st.floats(0.97, 30.0),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_consistent_gpu_runs_pass(
    world_size: int,
    accumulation: int,
    micro_batch: int,
    seq_len: int,
    preset: str,
    arithmetic: str,
    first_step: int,
    slowness: float,
    recompute: str,
) -> None:
    model = make_model(preset, max_position_embeddings=8192)
    overrides = {
        "world_size": world_size,
        "gradient_accumulation_steps": accumulation,
        "micro_batch_size": micro_batch,
        "seq_len": seq_len,
        "model": model,
        "dtype": {"tf32": "float32", "fp8": "bfloat16"}.get(arithmetic, arithmetic),
        "tf32": arithmetic == "tf32",
        "fp8": arithmetic == "fp8",
        "activation_checkpointing": recompute,
    }
    usual = make_run_log(first_step=first_step, **overrides)
    step_time_s = usual.measured_steps()[0].step_time_s * slowness * 1.34
    log = make_run_log(first_step=first_step, step_time_s=step_time_s, **overrides)
    assert audit_run(log) == []
    assert audit_run(RunLog.model_validate_json(log.model_dump_json())) == []


@quick
@given(world_size=st.sampled_from([1, 2]), accumulation=SIZES, dtype=st.sampled_from(["float32", "bfloat16"]))
def test_consistent_cpu_runs_pass(world_size: int, accumulation: int, dtype: str) -> None:
    log = make_run_log(
        device="cpu", world_size=world_size, gradient_accumulation_steps=accumulation, dtype=dtype, attention="sdpa"
    )
    assert audit_run(log) == []
    assert audit_run(log, make_ceilings("cpu", "fp32" if dtype == "float32" else "bf16", 0.4)) == []


@quick
@given(st.integers(1, 16), st.integers(1, 64), st.floats(0.999, 1.001), st.booleans())
def test_a_true_rate_is_never_called_false(world_size: int, accumulation: int, rounding: float, others: bool) -> None:
    count = count_micro_batches(
        world_size * accumulation * rounding, world_size, accumulation, others_are_one_rank=others
    )
    assert count.findings == ()
    assert (count.micro_steps_per_gpu, count.factor) == (accumulation, 1.0)


@quick
@given(st.integers(2, 16), st.integers(2, 64))
def test_every_miscount_gives_the_true_rate(world_size: int, accumulation: int) -> None:
    """Whatever factor a rate leaves out or counts twice, the truth comes back (but where two factors are equal)."""
    true = world_size * accumulation
    for counted in (accumulation, world_size, 1, true * world_size):
        count = count_micro_batches(counted, world_size, accumulation)
        if count.findings and count.findings[0].code != "accumulation_differs_from_banner":
            assert counted * count.factor == pytest.approx(true)


def test_long_sequences_may_exceed_the_peak_by_palm() -> None:
    """Full attention is not executed: only causal FLOPs can be impossible."""
    config = {"seq_len": 65_536, "micro_batch_size": 1, "model": make_model(max_position_embeddings=65_536)}
    terms = flop_terms(config["model"], 65_536)
    tokens = 65_536 * 4
    step_time_s = tokens * flops_per_token(terms, "causal") / (0.75 * 989.4e12)
    log = make_run_log(step_time_s=step_time_s, **config)
    palm = tokens * flops_per_token(terms, "palm") / step_time_s / 989.4e12
    assert palm > 1.15
    assert audit_run(log) == []
    assert {f.code for f in audit_run(make_run_log(step_time_s=step_time_s * 0.6, **config))} == {"above_ceiling"}


def test_the_margin_of_the_ceiling_is_what_it_says() -> None:
    """10 % above the datasheet, for cards that boost; 5 % above the card's own fastest matmul, where it is measured."""
    tflop = 65_536 * executed_flops_per_token(flop_terms(make_model(), 2048), make_run_config()) / 1e12

    def codes(tflops: float, ceilings: Ceilings | None = None) -> set[str]:
        return {finding.code for finding in audit_run(make_run_log(step_time_s=tflop / tflops), ceilings)}

    assert codes(989.4 * 1.08) == set()
    assert codes(989.4 * 1.12) == {"above_ceiling"}
    ceilings = make_ceilings("cuda", "bf16", 768)
    assert codes(768 * 1.03, ceilings) == set()
    assert codes(768 * 1.07, ceilings) == {"above_ceiling"}
    assert codes(768 * 1.07, make_ceilings("cuda", "tf32", 400)) == set(), "ceilings of other arithmetic say nothing"


@pytest.mark.parametrize("status", ["oom", "skipped", "failed"])
def test_runs_without_numbers_pass(status: str) -> None:
    log = make_run_log(
        status=status,
        reason="no memory",
        steps=[],
        rank_step_times_s=[],
        memory=[],
        wall=None,
        phases=[],
        evaluations=[],
    )
    assert audit_run(log) == []
    bare = log.model_copy(update={"parameters": None, "flop_terms": None, "dataset": None, "kernels": None})
    assert audit_run(bare) == []


def test_a_run_that_only_evaluates_another_runs_checkpoint_passes() -> None:
    """It has done none of the steps that it evaluates, and its max_iters says nothing of them."""
    config = {"continues": "training/pretrain", "evaluation": EvaluationConfig(only=True), "max_iters": 14}
    log = make_run_log(name="training/evaluate", **config).model_copy(
        update={"steps": [], "rank_step_times_s": [], "resumes": [Resume(step=300, at="2026-03-02T09:00:00+00:00")]}
    )
    assert log.wall is not None
    log.wall.training_s, log.wall.training_tokens = 0.0, 0
    assert audit_run(log) == []


def test_a_diverged_run_passes() -> None:
    log = make_run_log(status="diverged", reason="the loss of step 21 is not finite")
    steps = [step.model_copy(update={"loss": None}) if step.step == 21 else step for step in log.steps[:22]]
    times_s = [[step.step_time_s for step in steps]]
    assert audit_run(make_run_log(status="diverged", steps=steps, wall=None, rank_step_times_s=times_s)) == []


def test_shipped_runs_pass() -> None:
    """All of them, but for two whose attention `auto` ended in what another one asked for."""
    runs = audit_paths([REFERENCE]).runs
    assert len(runs) > 100
    objections = {run.name.split("reference/h100/")[-1]: run.codes for run in runs if run.findings}
    assert objections == {f"engine-checks/llama2-{attention}": ["no_contrast"] for attention in ("auto", "fa4")}


def test_a_busy_cpu_is_no_fault() -> None:
    """One slow step, early or late, on a machine with other work."""
    log = make_run_log(device="cpu")
    for position in (5, 15, 28):
        steps = list(log.steps)
        steps[position] = steps[position].model_copy(update={"step_time_s": 4.5 * steps[position].step_time_s})
        times_s = [[step.step_time_s for step in steps]]
        slow = log.model_copy(update={"steps": steps, "rank_step_times_s": times_s, "wall": None})
        assert audit_run(slow) == []


# --- a study as a whole -----------------------------------------------------------------------------------------------


def write_study(folder: Path, logs: list[RunLog]) -> None:
    for log in logs:
        write_run_log(folder / "runs" / f"{log.name}.json", log)


def test_a_good_study_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [make_run_log(name=f"scaling/gpus-{size}", world_size=size, parallelism="ddp") for size in (1, 2, 4)]
    logs += [make_run_log(name=f"ablations/attention-{name}", attention=name) for name in ("cudnn", "sdpa", "fa2")]
    write_study(tmp_path, logs)
    assert audit_main(["--study-dir", str(tmp_path), "--output", str(tmp_path / "audit.json")]) == 0
    answer = json.loads((tmp_path / "audit.json").read_text())
    assert check([str(tmp_path / "audit.json")]) == 0
    assert [run["findings"] for run in answer["runs"]] == [[]] * 6
    assert answer["weak_scaling_efficiency"] == pytest.approx(1.0, abs=0.001)
    assert "nothing to object to" in capsys.readouterr().out


def test_an_impossible_number_fails_the_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = make_run_log(name="tiers/one"), make_run_log(name="tiers/two", step_time_s=0.1)
    write_study(tmp_path, [good, bad])
    assert audit_main(["--study-dir", str(tmp_path), "--output", str(tmp_path / "audit.json")]) == 0
    assert check([str(tmp_path / "audit.json")]) == 1
    answer = json.loads((tmp_path / "audit.json").read_text())
    assert answer["impossible"] is True
    assert {run["name"]: run["findings"] for run in answer["runs"]} == {"tiers/one": [], "tiers/two": ["above_ceiling"]}
    said = capsys.readouterr()
    assert "IMPOSSIBLE numbers in tiers/two" in said.out and "impossible numbers in tiers/two. The report" in said.err


def test_objections_do_not_fail_a_study(tmp_path: Path) -> None:
    arms = [make_run_log(name=f"ablations/{name}", attention=name) for name in ("cudnn", "sdpa")]
    fell_back = arms[0].used["attention"].model_copy(update={"requested": "sdpa", "reason": "missing"})
    used = {**arms[1].used, "attention": fell_back}
    arms[1] = arms[1].model_copy(update={"kernels": arms[0].kernels, "used": used})
    write_study(tmp_path, arms)
    assert audit_main(["--study-dir", str(tmp_path), "--output", str(tmp_path / "audit.json")]) == 0
    assert [run.codes for run in audit_logs(arms).runs] == [["no_contrast"]] * 2


def test_bad_files_are_told(tmp_path: Path) -> None:
    write_study(tmp_path, [make_run_log()])
    (tmp_path / "ceilings.json").write_text('{"device": "cuda"}')
    with pytest.raises(ConfigError, match=r"ceilings\.json"):
        audit_main(["--study-dir", str(tmp_path), "--output", str(tmp_path / "audit.json")])


def test_weak_scaling_compares_like_with_like() -> None:
    one = make_run_log(name="scaling/one")
    four = make_run_log(name="scaling/four", world_size=4, step_time_s=one.measured_steps()[0].step_time_s / 0.9)
    strong = make_run_log(name="scaling/strong", world_size=4, gradient_accumulation_steps=1)
    report = audit_logs([one, four, strong])
    assert len(report.weak_scaling) == 1
    assert report.weak_scaling[0]["from"] == "scaling/one" and report.weak_scaling[0]["to"] == "scaling/four"
    assert report.weak_scaling_efficiency == pytest.approx(0.9, abs=0.002)


def test_one_process_is_compared_with_each_parallelism_by_itself() -> None:
    one = make_run_log(name="scaling/one")
    one.used["reduction"] = Choice(requested="auto", used="collective")
    step_time_s = one.measured_steps()[0].step_time_s
    logs = [one]
    for parallelism, slower, reduction in (("ddp", 0.8, "exchange"), ("fsdp", 0.5, "collective")):
        more = {"world_size": 4, "parallelism": parallelism, "step_time_s": step_time_s / slower}
        logs.append(make_run_log(name=f"scaling/{parallelism}", **more))
        logs[-1].used["reduction"] = Choice(requested="auto", used=reduction)
    found = {series["to"]: series["efficiency"] for series in audit_logs(logs).weak_scaling}
    assert found == {"scaling/ddp": pytest.approx(0.8, rel=0.01), "scaling/fsdp": pytest.approx(0.5, rel=0.01)}


def test_weak_scaling_of_busy_or_impossible_runs_is_objected_to() -> None:
    step_time_s = make_run_log().measured_steps()[0].step_time_s
    busy = {"host": {"cpu_percent": {"median": 100.0}, "run_cores": {"median": 0.2}}, "host_limited": None}
    alone = make_run_log(name="scaling/one", device="cpu")
    disturbed = make_run_log(name="scaling/four", device="cpu", world_size=4, telemetry=busy)
    report = audit_logs([alone, disturbed])
    objection = "no figure of scaling: scaling/four shared the machine with other work"
    assert report.weak_scaling[0]["objection"] == objection and objection in report.to_text()
    one = make_run_log(name="scaling/one")
    swift = make_run_log(name="scaling/four", world_size=4, step_time_s=step_time_s / 5)
    (series,) = audit_logs([one, swift]).weak_scaling
    assert series["efficiency"] == pytest.approx(5, rel=0.01) and "more than 105%" in series["objection"]


@pytest.mark.parametrize(("threads", "cores", "shared"), [((2, 1), 2, True), ((1, 1), 2, False), ((2, 2), 2, True)])
def test_processes_that_share_cores_are_no_scaling_of_hardware(
    threads: tuple[int, int], cores: int, shared: bool
) -> None:
    """Two of one thread each have no more cores than one of two had; nor have two of two, where there are two."""
    logs = []
    for name, world_size, own in (("scaling/one", 1, threads[0]), ("scaling/two", 2, threads[1])):
        log = make_run_log(
            name=name, device="cpu", world_size=world_size, parallelism="ddp" if world_size > 1 else "none"
        )
        log.environment.cpu_threads, log.environment.cpu_count = own, cores
        logs.append(log)
    report = audit_logs(logs)
    words = f"the processes share the same cores (threads a process: {threads[0]}, {threads[1]})"
    assert report.weak_scaling[0]["objection"] == (f"no scaling of hardware: {words}" if shared else None)
    assert (words in report.to_text()) == shared


def test_a_run_that_is_named_twice_is_judged_once(tmp_path: Path) -> None:
    write_study(tmp_path, [make_run_log()])
    (file,) = (tmp_path / "runs").glob("*/*.json")
    assert len(audit_paths([tmp_path, tmp_path / "runs", file, file]).runs) == 1


def test_runs_that_their_study_no_longer_declares_are_left_alone_unless_they_are_given(tmp_path: Path) -> None:
    kept, gone = make_run_log(name="tiers/tier1"), make_run_log(name="tiers/tier2")
    for log in (kept, gone):
        write_run_log(tmp_path / "runs" / f"{log.name}.json", log)
    write_json(tmp_path / "study.json", {"study": "x", "cases": {"tiers/tier1": {}}, "skipped": {}})
    report = audit_paths([tmp_path])
    assert [run.name for run in report.runs] == ["tiers/tier1"]
    assert any("no longer declares them: tiers/tier2" in note for note in report.notes)
    assert [run.name for run in audit_paths([tmp_path / "runs" / "tiers" / "tier2.json"]).runs] == ["tiers/tier2"]
    (tmp_path / "runs" / "tiers" / "tier1.json").unlink()
    with pytest.raises(ConfigError, match="no longer declares them: tiers/tier2; there is no other run"):
        audit_paths([tmp_path])


def test_an_out_of_memory_after_steps_has_the_record_of_one_process() -> None:
    """Nothing was gathered from the ranks: no times of theirs, no peaks, or those up to the last resume."""
    log = make_run_log(world_size=2)
    lost = {"status": "oom", "reason": "CUDA out of memory", "memory": [], "wall": None}
    for times in ([], [times[:7] for times in log.rank_step_times_s]):
        assert audit_run(log.model_copy(update={**lost, "rank_step_times_s": times})) == []
