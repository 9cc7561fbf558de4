"""The profiled step of real runs on a CPU: it disturbs nothing, adds up, and names what ran."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.train_runs import losses, run_here, run_many, tiny_config

from mfubench.profiling.breakdown import Breakdown, break_down
from mfubench.profiling.trace_file import read_trace
from mfubench.train import timeline
from mfubench.train.checkpoint_folders import find_latest, latest

TIMELINE = {"profile": "timeline", "warmup_steps": 1}


def breakdown_of(work: Path) -> Breakdown:
    found = break_down(read_trace(work / "trace.json.gz"))
    assert found is not None
    for rank in found.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s, rel=1e-6)
        assert sum(kernel.total_s for kernel in rank.kernels) >= 0.99 * rank.step_s  # a CPU's thread is never idle
    return found


@pytest.fixture(scope="module")
def profiled(data, tmp_path_factory):
    """A run with a profile and all that could be disturbed, and the same without."""
    options = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "sample_tokens": 8, "max_iters": 8}
    options |= {"evaluation": {"at_end": True, "iters": 2}, "checkpoint": {"at_end": True}}
    work = tmp_path_factory.mktemp("profiled")
    log = run_here(tiny_config(**options, measurement=TIMELINE), data, work)
    plain = run_here(tiny_config(**options), data, tmp_path_factory.mktemp("plain"))
    return log, plain, work


def test_a_profile_changes_nothing_of_the_run(profiled):
    log, plain, _ = profiled
    assert losses(log) == losses(plain)
    assert log.evaluations == plain.evaluations and log.sample == plain.sample
    assert len(log.steps) == 8
    assert {phase.after_step for phase in log.phases if phase.kind == "profile"} == {1, 8}


def test_the_step_is_taken_apart_by_operator(profiled):
    _, _, work = profiled
    (rank,) = breakdown_of(work).ranks
    for category in ("matmul", "attention", "norm", "activation", "loss", "optimizer", "gradient accumulation", "host"):
        assert rank.parts[category] > 0, category
    assert rank.parts["communication"] == 0
    assert rank.directions["matmul"].keys() == {"forward", "backward"}
    # two layers, two micro-steps: q/k/v of 64 tokens, 32 -> 64, once forward a layer and micro-step
    assert [one.count for one in rank.matmuls if one.shape == (64, 32, 64) and one.direction == "forward"] == [4]


def test_a_run_without_a_finished_step_says_why_there_is_no_profile(data, tmp_path):
    config = tiny_config(max_iters=4, checkpoint={"at_end": True}, measurement=TIMELINE)
    run_here(config, data, tmp_path)
    run_here(config, data, tmp_path)  # all steps are done
    assert "an earlier process had done all steps" in (read_trace(tmp_path / "trace.json.gz").reason or "")


def test_a_profile_that_cannot_be_read_costs_the_trace_and_not_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "cut_step", lambda trace, rank: trace["no such key"])
    log = run_here(tiny_config(max_iters=3, measurement=TIMELINE), data, tmp_path)
    assert log.status == "ok"
    assert "rank 0: what the profiler wrote cannot be read (KeyError" in read_trace(tmp_path / "trace.json.gz").reason


def test_a_step_that_is_too_long_to_keep_is_refused_before_it_runs():
    with pytest.raises(ValueError, match="65 micro-steps is too long"):
        tiny_config(gradient_accumulation_steps=65, measurement=TIMELINE)


@pytest.mark.slow
def test_all_ranks_are_profiled_at_once(data, tmp_path):
    options = {"world_size": 2, "micro_batch_size": 4, "max_iters": 6, "measurement": TIMELINE}
    configs = {parallelism: tiny_config(parallelism=parallelism, **options) for parallelism in ("ddp", "zero1", "fsdp")}
    run_many(configs, data, tmp_path)
    for parallelism in configs:
        found = breakdown_of(tmp_path / parallelism)
        assert [rank.rank for rank in found.ranks] == [0, 1]
        for rank in found.ranks:
            assert rank.collectives_s, parallelism
            assert rank.parts["communication"] + rank.hidden_communication_s > 0
        assert found.ranks[0].waiting_s is not None and min(rank.waiting_s for rank in found.ranks) >= 0


# --- runs that continue another ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    work = tmp_path_factory.mktemp("trained")
    config = tiny_config(max_iters=6, evaluation={"at_end": True, "iters": 2}, checkpoint={"at_end": True})
    return run_here(config.model_copy(update={"name": "training/pretrain"}), data, work), work / "checkpoints"


def continuing(**overrides):
    return tiny_config(name="training/more", continues="training/pretrain", **overrides)


def test_a_run_that_only_evaluates_another_runs_checkpoint(trained, data, tmp_path):
    before, checkpoints = trained
    config = continuing(max_iters=6, evaluation={"only": True, "iters": 2}, micro_batch_size=8)
    log = run_here(config, data, tmp_path, "--start-from", str(checkpoints))
    assert log.status == "ok" and log.steps == []
    assert [resume.step for resume in log.resumes] == [6]
    assert log.evaluations == before.evaluations
    assert list(checkpoints.iterdir())  # the other's checkpoint is where it was


def test_a_run_that_trains_on_equals_one_that_was_not_interrupted(trained, data, tmp_path):
    _, checkpoints = trained
    whole = run_here(tiny_config(max_iters=10), data, tmp_path / "whole")
    log = run_here(continuing(max_iters=10), data, tmp_path / "more", "--start-from", str(checkpoints))
    assert [step.step for step in log.steps] == [6, 7, 8, 9]  # the other run's steps are not its own
    assert losses(log) == losses(whole)[6:]


def test_a_run_that_continues_another_is_evaluated_at_its_start_and_not_when_it_goes_on(trained, data, tmp_path):
    before, checkpoints = trained
    evaluation, keeps = {"at_start": True, "iters": 2}, {"at_end": True}
    first = continuing(max_iters=8, evaluation=evaluation, checkpoint=keeps)
    log = run_here(first, data, tmp_path, "--start-from", str(checkpoints))
    assert log.evaluations == before.evaluations and log.evaluations[0].step == 6
    further = continuing(max_iters=10, evaluation=evaluation)
    log = run_here(further, data, tmp_path, "--start-from", str(checkpoints), "--resume", "auto")
    assert [step.step for step in log.steps] == [6, 7, 8, 9] and [resume.step for resume in log.resumes] == [6, 8]
    assert log.evaluations == before.evaluations


def test_a_checkpoint_that_is_not_there_is_told(data, tmp_path):
    only = {"only": True, "iters": 1}
    with pytest.raises(AssertionError, match="say where its checkpoints are"):
        run_here(continuing(evaluation=only), data, tmp_path / "a")
    with pytest.raises(AssertionError, match=r"no checkpoint of training/pretrain found"):
        run_here(continuing(evaluation=only), data, tmp_path / "b", "--start-from", str(tmp_path / "none"))


def test_a_checkpoint_of_a_run_of_another_name_is_no_start(trained, data, tmp_path):
    _, checkpoints = trained
    config = tiny_config(name="training/more", continues="training/other", max_iters=10)
    with pytest.raises(AssertionError, match=r"continues: training/other: .* is a checkpoint of training/pretrain"):
        run_here(config, data, tmp_path, "--start-from", str(checkpoints))


def test_a_work_folder_stands_for_the_checkpoints_in_it(trained, tmp_path):
    _, checkpoints = trained
    last = latest(checkpoints)
    attempt = tmp_path / "pretrain" / "0123abcd"
    attempt.mkdir(parents=True)
    (attempt / "checkpoints").symlink_to(checkpoints)
    for folder, inside in ((checkpoints, checkpoints), (attempt, attempt), (attempt.parent, attempt)):
        found = find_latest(folder)
        assert last is not None and found is not None and found.name == last.name and found.is_relative_to(inside)
    assert find_latest(tmp_path) is None


def test_another_runs_settings_must_fit(trained, data, tmp_path):
    _, checkpoints = trained
    with pytest.raises(AssertionError, match="is a checkpoint of another run"):
        config = continuing(evaluation={"only": True, "iters": 1}, seq_len=8)
        run_here(config, data, tmp_path, "--start-from", str(checkpoints))
    with pytest.raises(ValueError, match="cannot start from its own checkpoint"):
        tiny_config(name="training/pretrain", continues="training/pretrain")
