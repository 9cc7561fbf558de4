"""A run killed at any instant and resumed gives the losses of one that never was."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import time

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from train.train_runs import (
    finish_run,
    grad_norms,
    losses,
    run,
    run_arguments,
    run_here,
    start_run,
    tiny_config,
    write_dataset,
)

from mfubench.audit import audit_paths
from mfubench.config import ConfigError, EvaluationConfig
from mfubench.run_log import read_run_log, read_steps
from mfubench.train import choices, loop, training
from mfubench.train.checkpoint_folders import complete, latest, prepare_folder
from mfubench.train.launch import main

EVERY_5 = {"interval": 5}


def ranks_of(launcher_pid: int) -> list[int]:
    """Process ids of the ranks that a launcher has started."""
    with open(f"/proc/{launcher_pid}/task/{launcher_pid}/children") as children:
        return [int(pid) for pid in children.read().split()]


def runs(pid: int) -> bool:
    """Whether a process has not ended (nor waits for somebody to ask how)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_step(work, step: int, process, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        lines = (work / "steps.jsonl").read_text().splitlines() if (work / "steps.jsonl").exists() else []
        if len(lines) > step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.stderr.read() if process.poll() is not None else ''}")


@pytest.fixture(scope="session")
def two_ranks(data, tmp_path_factory):
    """Losses of an uninterrupted run of two ranks: bit for bit what a resumed one must give."""

    @functools.cache
    def losses_of(parallelism: str) -> list[float]:
        config = tiny_config(world_size=2, micro_batch_size=4, parallelism=parallelism)
        return losses(run(config, data, tmp_path_factory.mktemp("whole")))

    return losses_of


def test_one_process_stopped_and_resumed_is_bit_for_bit_the_same(data, tmp_path):
    whole = run_here(tiny_config(parallelism="none"), data, tmp_path / "whole")
    work = tmp_path / "parts"
    first = run_here(tiny_config(parallelism="none", max_iters=7, checkpoint={"at_end": True}), data, work)
    rest = run_here(tiny_config(parallelism="none"), data, work)
    assert losses(first) == losses(whole)[:7]
    assert losses(rest) == losses(whole)
    assert [step.grad_norm for step in rest.steps] == [step.grad_norm for step in whole.steps]
    assert [resume.step for resume in rest.resumes] == [7]
    assert rest.wall.training_tokens == 13 * 8 * 16  # of this process alone
    assert len(rest.rank_step_times_s[0]) == 20


def objections(work) -> set[str]:
    """Codes of what the audit says against a run, but for what other processes do to a clock."""
    (judged,) = audit_paths([work / "run.json"]).runs
    return {*judged.codes} - {"machine_was_busy"}


def test_the_same_batch_may_be_split_in_another_way_and_the_rate_is_the_new_ones(data, tmp_path):
    whole = run_here(tiny_config(), data, tmp_path / "whole")
    work = tmp_path / "parts"
    two = tiny_config(micro_batch_size=4, gradient_accumulation_steps=2, max_iters=8, checkpoint={"at_end": True})
    run_here(two, data, work)
    assert "2 micro-steps per process" in audit_paths([work / "run.json"]).to_text()
    log = run_here(tiny_config(), data, work)
    assert losses(log) == pytest.approx(losses(whole), rel=1e-5)
    assert [step.phase for step in log.steps] == ["warmup"] * 10 + ["measured"] * 10
    assert objections(work) == set()
    assert "1 micro-step per process" in audit_paths([work / "run.json"]).to_text()


@pytest.fixture
def set_threads():
    """Sets the threads of torch, which make a CPU another machine."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.faults
def test_steps_of_another_machine_are_warm_up_and_the_run_says_so(set_threads, data, tmp_path, capfd):
    set_threads(2)
    run_here(tiny_config(max_iters=8, checkpoint={"at_end": True}), data, tmp_path)
    set_threads(1)
    log = run_here(tiny_config(), data, tmp_path)
    assert [step.phase for step in log.steps] == ["warmup"] * 10 + ["measured"] * 10
    assert log.resumes[0].changed == ["cpu_threads: 2 there, 1 here"]
    told = "the steps before step 8 are warm-up, they ran otherwise: cpu_threads: 2 there, 1 here"
    assert told in capfd.readouterr().err
    assert objections(tmp_path) == set()


@pytest.mark.faults
@pytest.mark.parametrize("captured_before", [True, False])
def test_steps_with_another_use_of_cuda_graphs_are_warm_up(captured_before, monkeypatch, data, tmp_path):
    """Whether a step can be captured turns out after the first one; on a CPU the step itself stands for its graph."""

    def fail(step, inputs, labels):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def train(captured, **changes):
        monkeypatch.setattr(training, "GraphedStep", (lambda step, inputs, labels: step) if captured else fail)
        return run_here(tiny_config(cuda_graphs=True, **changes), data, tmp_path)

    monkeypatch.setattr(choices, "resolve_cuda_graphs", lambda config, *_: choices.switch(config.cuda_graphs, None))
    monkeypatch.setattr(loop, "stream_of_the_run", lambda resolved: contextlib.nullcontext())
    before, after = str(captured_before).lower(), str(not captured_before).lower()
    first = train(captured_before, max_iters=6, checkpoint={"at_end": True})
    assert first.used["cuda_graphs"].used == before
    same = train(captured_before, max_iters=9, checkpoint={"at_end": True})
    assert same.resumes[0].changed == [] and {step.step for step in same.measured_steps()} == {2, 3, 4, 5, 8}
    other = train(not captured_before)
    assert other.resumes[1].changed == [f"used.cuda_graphs: {before} there, {after} here"]
    assert [step.phase for step in other.steps] == ["warmup"] * 11 + ["measured"] * 9
    assert [step.phase for step in read_steps(tmp_path / "steps.jsonl")] == [step.phase for step in other.steps]
    assert read_run_log(tmp_path / "partial.json").used["cuda_graphs"].used == after
    assert objections(tmp_path) == set()


def test_no_rate_is_left_where_all_measured_steps_are_of_another_machine(set_threads, data, tmp_path, capfd):
    set_threads(2)
    run_here(tiny_config(max_iters=8, checkpoint={"at_end": True}), data, tmp_path)
    set_threads(1)
    log = run_here(tiny_config(max_iters=10), data, tmp_path)
    assert log.measured_steps() == []
    assert "no step was measured: the steps before step 8 are warm-up" in capfd.readouterr().err
    assert (
        "no step counts, so that the run has no rate: the steps before step 8"
        in audit_paths([tmp_path / "run.json"]).to_text()
    )


def test_an_evaluation_with_other_settings_is_of_this_machine_and_leaves_no_rate(set_threads, data, tmp_path, capfd):
    set_threads(2)
    run_here(tiny_config(max_iters=8, checkpoint={"at_end": True}), data, tmp_path)
    set_threads(1)
    log = run_here(tiny_config(attention="eager", evaluation={"only": True, "iters": 1}), data, tmp_path)
    assert log.environment.cpu_threads == 1 and log.used["attention"].used == "eager"
    assert log.measured_steps() == [] and log.resumes[0].changed == ["attention: auto there, eager here"]
    assert "raise max_iters" not in capfd.readouterr().err
    assert objections(tmp_path) == set()


@pytest.mark.parametrize("only", [False, True])
def test_where_nothing_is_left_to_train_the_log_tells_of_the_machine_that_trained(only, set_threads, data, tmp_path):
    set_threads(2)
    config = tiny_config(checkpoint={"at_end": True}, measurement={"warmup_steps": 1})
    first = run_here(config, data, tmp_path)
    set_threads(1)
    evaluation = {"only": only, "iters": 1}
    again = run_here(config.model_copy(update={"evaluation": EvaluationConfig(**evaluation)}), data, tmp_path)
    assert again.environment == first.environment and again.environment.cpu_threads == 2
    assert [step.phase for step in again.steps] == [step.phase for step in first.steps]
    assert (again.used, again.kernels) == (first.used, first.kernels) and first.kernels
    assert len(again.evaluations) == int(only) and again.resumes[0].changed == []
    assert objections(tmp_path) == set()


def test_what_was_sampled_beside_the_steps_stays_with_them(data, tmp_path):
    """Else steps that other load disturbed would be clean once another process has gone on from their checkpoint."""
    first, all_of_it = (tiny_config(max_iters=steps, checkpoint={"at_end": True}) for steps in (8, 20))
    run_here(first, data, tmp_path)
    resumed = run_here(all_of_it, data, tmp_path)
    again = run_here(all_of_it, data, tmp_path)
    assert [telemetry["steps"] for telemetry in resumed.telemetry_of_measured()] == [10, 6]
    assert [telemetry["steps"] for telemetry in again.telemetry_of_measured()] == [10, 6]
    assert len(again.measured_steps()) == 16 and [resume.step for resume in again.resumes] == [8, 20]


def test_what_was_sampled_beside_steps_that_no_longer_count_is_left_out(set_threads, data, tmp_path):
    set_threads(2)
    run_here(tiny_config(max_iters=8, checkpoint={"at_end": True}), data, tmp_path)
    set_threads(1)
    log = run_here(tiny_config(), data, tmp_path)
    assert [telemetry["steps"] for telemetry in log.telemetry_of_measured()] == [len(log.measured_steps())] == [10]


def test_keep_last_and_keep_all(data, tmp_path):
    run_here(tiny_config(checkpoint={"interval": 5, "keep": "all"}), data, tmp_path / "all")
    names = [path.name for path in complete(tmp_path / "all" / "checkpoints")]
    assert names == ["step-000005", "step-000010", "step-000015", "step-000020"]
    run_here(tiny_config(checkpoint={"interval": 5}), data, tmp_path / "last")
    assert [path.name for path in (tmp_path / "last" / "checkpoints").iterdir()] == ["step-000020"]
    saved = json.loads((tmp_path / "last" / "checkpoints" / "step-000020" / "config.json").read_text())
    assert saved["max_iters"] == 20


def test_a_run_that_is_complete_trains_no_further_and_says_so(data, tmp_path, capfd):
    config = tiny_config(checkpoint={"at_end": True})
    first = run_here(config, data, tmp_path)
    told = capfd.readouterr().err
    assert "test/tiny: ok\n" in told and "starts anew" not in told
    again = run_here(config, data, tmp_path)
    assert "test/tiny: ok (all 20 steps were done before; nothing was trained)\n" in capfd.readouterr().err
    assert losses(again) == losses(first)
    assert again.wall.training_tokens == 0


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [{}, {"world_size": 2, "micro_batch_size": 4}])
def test_other_data_of_the_same_size_are_trained_on_anew(ranks, tmp_path):
    """Whether steps are left to do or not: none of those that were done is of these data."""
    data, other, work = (tmp_path / name for name in ("data", "other", "work"))
    short = tiny_config(max_iters=8, checkpoint={"interval": 4}, **ranks)
    before = run(short, write_dataset(data), work)
    shutil.rmtree(data)
    write_dataset(data, seed=1).rename(other)
    code, told = finish_run(start_run(short, other, work))
    assert code == 0, told
    last = work / "checkpoints" / "step-000008"
    known = before.dataset.sha256[:12]
    assert f"starting anew: {last}, trained on other data (data.sha256: {known} there, " in told
    log = read_run_log(work / "run.json")
    assert log.resumes == [] and losses(log) != losses(before)
    assert losses(log) == losses(run(short, other, tmp_path / "anew"))
    longer = run(tiny_config(checkpoint={"interval": 4}, **ranks), other, work)  # these data are known now
    assert [resume.step for resume in longer.resumes] == [8] and losses(longer)[:8] == losses(log)


@pytest.mark.faults
def test_a_run_continues_none_of_other_data(tmp_path, capfd):
    data = write_dataset(tmp_path / "data")
    run_here(tiny_config(name="test/first", max_iters=4, checkpoint={"at_end": True}), data, tmp_path / "first")
    write_dataset(data, seed=1)
    more = tiny_config(name="test/more", continues="test/first")
    assert main(run_arguments(more, data, tmp_path / "more", "--start-from", str(tmp_path / "first"))) == 1
    told = capfd.readouterr().err
    assert "is a checkpoint of another run than this one: data.sha256: " in told and "take `continues` away" in told


def test_never_starts_anew_and_says_what_is_lost(data, tmp_path, capfd):
    run_here(tiny_config(max_iters=5, checkpoint={"at_end": True}), data, tmp_path)
    log = run_here(tiny_config(max_iters=6), data, tmp_path, "--resume", "never")
    assert f"starting anew: {tmp_path / 'checkpoints' / 'step-000005'}, an" in capfd.readouterr().err
    assert latest(tmp_path / "checkpoints") is None
    assert log.resumes == []
    assert [step.step for step in log.steps] == list(range(6))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 8, "seed": 5}, "seq_len: 16 there, 8 here; seed: 1234 there, 5 here"),
        ({"model": {"num_hidden_layers": 3}}, "model.num_hidden_layers: 2 there, 3 here"),
        ({"micro_batch_size": 4}, "micro_batch_size: 8 there, 4 here; global_batch_size: 8 there, 4 here"),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: 1 there, 2 here; global_batch_size: 8 there, 16 here",
        ),
        ({"world_size": 2}, "world_size: 1 there, 2 here; global_batch_size: 8 there, 16 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_in_one_line(change, message, data, tmp_path, capfd):
    run_here(tiny_config(max_iters=2, checkpoint={"at_end": True}), data, tmp_path)
    assert main(run_arguments(tiny_config(**change), data, tmp_path)) == 1
    folder = tmp_path / "checkpoints"
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("error: "))
    told = f"{folder / 'step-000002'}: is a checkpoint of another run than this one: {message}. "
    if "world_size" in change:
        assert re.match(f"error: rank [01]: {re.escape(told)}", line)
    else:  # the one rank there is needs no number
        assert line.startswith(f"error: {told}")
    assert line.endswith(f"or remove {folder} (by hand: --anew) to start anew")
    shutil.rmtree(folder)
    assert run_here(tiny_config(**change), data, tmp_path).resumes == []


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "victim"), [("ddp", 0), ("zero1", 1)])
def test_sigkill_of_a_rank_at_a_random_instant(parallelism, victim, two_ranks, data, tmp_path):
    config = tiny_config(world_size=2, micro_batch_size=4, parallelism=parallelism, checkpoint=EVERY_5)
    process = start_run(config, data, tmp_path, script="planted.py", PLANT="slow")
    wait_for_step(tmp_path, 0, process)
    time.sleep(random.uniform(0, 2.5))  # the 20 steps take 4 s at least
    os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
    code, _ = finish_run(process)
    assert code == 1
    assert json.loads((tmp_path / "failure.json").read_text())["kind"] == "died"
    assert not (tmp_path / "run.json").exists()
    resumed = run(config, data, tmp_path)
    assert losses(resumed) == two_ranks(parallelism)


@pytest.mark.faults
def test_sigkill_of_a_rank_is_told_with_the_checkpoint_to_go_on_from(data, tmp_path):
    config = tiny_config(world_size=2, micro_batch_size=4, checkpoint=EVERY_5)
    planted = {"PLANT": "kill", "PLANT_RANK": "1", "PLANT_STEP": "8"}
    code, stderr = finish_run(start_run(config, data, tmp_path, script="planted.py", **planted))
    assert code == 1 and "rank 1: the process was killed by SIGKILL" in stderr
    assert f"checkpoint: {tmp_path / 'checkpoints' / 'step-000005'}; " in stderr and "--resume" in stderr


def stop_again_and_again(process, pids) -> int:
    """SIGTERM to each of the processes until the first one has ended; its exit code."""
    while process.poll() is None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)
    return finish_run(process)[0]


@pytest.mark.faults
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_changes_nothing_once_the_run_json_is_whole(world_size, data, tmp_path):
    process = start_run(tiny_config(world_size=world_size, micro_batch_size=4), data, tmp_path)
    ranks = []
    while not (tmp_path / "run.json").exists():
        assert process.poll() is None
        ranks = ranks_of(process.pid) if world_size > 1 else []
        time.sleep(0.01)
    assert stop_again_and_again(process, [process.pid, *ranks]) == 0
    assert read_run_log(tmp_path / "run.json").status == "ok"


@pytest.mark.faults
@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_that_comes_again_and_again_is_one_stop(world_size, data, tmp_path):
    process = start_run(tiny_config(max_iters=100_000, world_size=world_size, micro_batch_size=4), data, tmp_path)
    wait_for_step(tmp_path, 10, process)
    ranks = ranks_of(process.pid) if world_size > 1 else []
    assert stop_again_and_again(process, [process.pid, *ranks]) == 75
    assert (tmp_path / "stopped.json").exists() and latest(tmp_path / "checkpoints") is not None


@pytest.mark.faults
@pytest.mark.slow
def test_sigkill_of_the_launcher_ends_its_ranks(two_ranks, data, tmp_path):
    config = tiny_config(world_size=2, micro_batch_size=4, checkpoint=EVERY_5)
    process = start_run(config, data, tmp_path, script="planted.py", PLANT="slow", PLANT_SECONDS="0.8")
    wait_for_step(tmp_path, 5, process)
    ranks = ranks_of(process.pid)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while any(runs(rank) for rank in ranks):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.1)
    assert not (tmp_path / "run.json").exists()
    kinds = [json.loads(path.read_text())["kind"] for path in (tmp_path / "ranks").glob("failure-*.json")]
    assert "lost" in kinds
    resumed = run(config, data, tmp_path)
    assert [resume.step for resume in resumed.resumes] in ([5], [10], [15])
    assert losses(resumed) == two_ranks("ddp")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "config.json", "history.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(name, damage, data, tmp_path):
    whole = run_here(tiny_config(max_iters=12), data, tmp_path / "whole")
    work = tmp_path / "parts"
    run_here(tiny_config(max_iters=10, checkpoint={"interval": 5, "keep": "all"}), data, work)
    result = (work / "run.json").read_bytes()
    damaged = work / "checkpoints" / "step-000010"
    if damage == "missing":
        (damaged / name).unlink()
    else:
        os.truncate(damaged / name, (damaged / name).stat().st_size // 2)
    with pytest.raises(AssertionError, match=r"step-000010.*this checkpoint is damaged .* Remove its folder"):
        run_here(tiny_config(max_iters=12), data, work)
    assert (work / "run.json").read_bytes() == result
    shutil.rmtree(damaged)
    resumed = run_here(tiny_config(max_iters=12), data, work)
    assert [resume.step for resume in resumed.resumes] == [5]
    assert losses(resumed) == losses(whole)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_sigkill_during_a_checkpoint_write_leaves_the_previous_one(victim, two_ranks, data, tmp_path):
    config = tiny_config(world_size=2, micro_batch_size=4, checkpoint=EVERY_5)
    process = start_run(config, data, tmp_path, script="killed_while_writing.py", KILL_AT="10", KILL_RANK=str(victim))
    code, _ = finish_run(process)
    assert code == 1
    assert latest(tmp_path / "checkpoints").name == "step-000005"
    resumed = run(config, data, tmp_path)
    assert [resume.step for resume in resumed.resumes] == [5]
    assert losses(resumed) == two_ranks("ddp")


@pytest.mark.faults
def test_sigterm_writes_a_checkpoint_and_says_resume(data, tmp_path, two_ranks):
    config = tiny_config(world_size=2, micro_batch_size=4)
    process = start_run(config, data, tmp_path, script="planted.py", PLANT="slow")
    wait_for_step(tmp_path, 0, process)
    process.send_signal(signal.SIGTERM)
    code, stderr = finish_run(process)
    assert code == 75, stderr
    assert "stopped on request" in stderr and "snakemake" not in stderr  # the launcher does not know who started it
    assert not (tmp_path / "run.json").exists()
    done = json.loads((tmp_path / "stopped.json").read_text())["step"]
    assert 1 < done < 20
    resumed = run(config, data, tmp_path)
    assert [resume.step for resume in resumed.resumes] == [done]
    assert losses(resumed) == two_ranks("ddp")


@pytest.mark.slow
def test_sigterm_of_a_single_process(data, tmp_path):
    whole = run_here(tiny_config(), data, tmp_path / "whole")
    process = start_run(tiny_config(), data, tmp_path, script="planted.py", PLANT="slow")
    wait_for_step(tmp_path, 0, process)
    process.send_signal(signal.SIGTERM)
    assert finish_run(process)[0] == 75
    assert losses(run_here(tiny_config(), data, tmp_path)) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero1", 2), ("none", 1)),
        (("none", 1), ("zero1", 4)),
        (("fsdp", 2), ("ddp", 2)),
        (("ddp", 2), ("fsdp", 4)),
        (("zero1", 4), ("fsdp", 2)),
        (("fsdp", 4), ("zero1", 2)),
    ],
    ids=str,
)
def test_a_checkpoint_loads_at_another_world_size_and_parallelism(before, after, data, tmp_path):
    def config(place, **options):
        parallelism, world_size = place
        return tiny_config(parallelism=parallelism, world_size=world_size, micro_batch_size=8 // world_size, **options)

    whole = run_here(tiny_config(), data, tmp_path / "whole")
    run(config(before, max_iters=8, checkpoint={"at_end": True}), data, tmp_path)
    log = run(config(after), data, tmp_path)
    assert [resume.step for resume in log.resumes] == [8]
    assert losses(log) == pytest.approx(losses(whole), rel=1e-5)
    assert len(log.rank_step_times_s) == after[1]
    assert {len(times) for times in log.rank_step_times_s} == {20}
    assert {step.step for step in log.measured_steps()} == set(range(10, 20))
    assert objections(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_resumes_exactly(dtype, data, tmp_path):
    whole = run_here(tiny_config(dtype=dtype), data, tmp_path / "whole")
    run_here(tiny_config(dtype=dtype, max_iters=9, checkpoint={"at_end": True}), data, tmp_path)
    assert losses(run_here(tiny_config(dtype=dtype), data, tmp_path)) == losses(whole)


@pytest.mark.parametrize(("before", "after"), [("float16", "float32"), ("float32", "float16")])
def test_a_loss_scale_is_float16s_alone(before, after, data, tmp_path):
    """Taken over by a run that does not scale its loss it would divide the gradients by 65,536."""
    whole = run_here(tiny_config(), data, tmp_path / "whole")
    run_here(tiny_config(dtype=before, max_iters=9, checkpoint={"at_end": True}), data, tmp_path)
    log = run_here(tiny_config(dtype=after, checkpoint={"at_end": True}), data, tmp_path)
    assert grad_norms(log) == pytest.approx(grad_norms(whole), rel=0.05)
    assert losses(log) == pytest.approx(losses(whole), rel=0.01)
    scale = {"loss_scale": torch.zeros(())}
    dcp.load(scale, checkpoint_id=latest(tmp_path / "checkpoints"), no_dist=True)
    assert scale["loss_scale"] == (1.0 if after == "float32" else 65536.0)


@pytest.mark.faults
def test_a_disk_that_is_too_full_is_told_before_training(tmp_path):
    with pytest.raises(ConfigError, match="the disk has"):
        prepare_folder(tmp_path, True, tiny_config(checkpoint=EVERY_5), parameters=10**15)


def test_evaluation_only_needs_and_uses_a_checkpoint(data, tmp_path):
    only = tiny_config(evaluation={"only": True, "iters": 2})
    with pytest.raises(AssertionError, match=r"evaluation\.only needs a checkpoint"):
        run_here(only, data, tmp_path)
    trained = run_here(
        tiny_config(evaluation={"at_end": True, "iters": 2}, checkpoint={"at_end": True}), data, tmp_path
    )
    log = run_here(only, data, tmp_path)
    assert log.status == "ok"
    assert log.evaluations[-1].loss == trained.evaluations[-1].loss
    assert log.wall.training_tokens == 0
    assert read_run_log(tmp_path / "run.json").steps == trained.steps


def test_a_complete_run_is_not_passed_off_as_one_with_other_settings(data, tmp_path):
    run_here(tiny_config(max_iters=3, checkpoint={"at_end": True}), data, tmp_path)
    with pytest.raises(AssertionError, match="all 3 steps are done, but with other settings"):
        run_here(tiny_config(max_iters=3, gradient_accumulation_steps=2, micro_batch_size=4), data, tmp_path)
