"""How runs end badly: every end leaves a record, no rank is left hanging."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from train.test_resume import ranks_of
from train.train_runs import (
    environment,
    finish_run,
    run,
    run_arguments,
    run_here,
    start_run,
    tiny_config,
    write_dataset,
)

from mfubench.config import ConfigError
from mfubench.run_log import read_run_log
from mfubench.train import checkpoint_folders, failures
from mfubench.train import ranks as ranks_module
from mfubench.train.launch import main
from mfubench.train.lock import sole_writer
from mfubench.training_job import start_training

# The launcher in one process with its rank, whose data stop coming
HANG = """
import sys, time
from mfubench.train import launch, loader
def prefetch(self):
    time.sleep(3600)
loader.Batches.prefetch = prefetch
sys.exit(launch.main(sys.argv[1:]))
"""
# The job around a launcher
JOB = """
import json, sys
from pathlib import Path
from mfubench.training_job import start_training
sys.exit(start_training(sys.argv[1], resume="never", **{k: Path(v) for k, v in json.loads(sys.argv[2]).items()}))
"""
TWO_RANKS = {"world_size": 2, "micro_batch_size": 4}


def failure(work) -> dict:
    return json.loads((work / "failure.json").read_text())


@pytest.mark.faults
@pytest.mark.parametrize("plant", ["oom", pytest.param("cudnn", marks=pytest.mark.slow)])
def test_out_of_memory_of_one_rank_ends_all_with_status_oom(plant, data, tmp_path):
    process = start_run(
        tiny_config(**TWO_RANKS), data, tmp_path, script="planted.py", PLANT=plant, PLANT_RANK="1", PLANT_STEP="4"
    )
    code, stderr = finish_run(process)
    assert code == 0, stderr
    log = read_run_log(tmp_path / "run.json")
    assert log.status == "oom"
    assert log.reason.startswith("rank 1: ")
    records = failures.read_failures(tmp_path)
    assert [record.rank for record in records if record.kind == "oom"] == [1]
    assert log.environment.torch == torch.__version__
    assert log.parameters.total > 0


@pytest.mark.faults
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no rank has a compiler")
@pytest.mark.parametrize("requires", [(), ("compile",)])
def test_ranks_that_would_not_compute_alike_are_refused(requires, data, tmp_path):
    config = tiny_config(**TWO_RANKS, compile="block", requires=requires)
    process = start_run(config, data, tmp_path, script="planted.py", PLANT="no compiler", PLANT_RANK="1")
    code, stderr = finish_run(process)
    assert code == 1
    told = "the ranks would not compute alike: compile: block on rank 0 (as asked), none on rank 1 (torch.compile on a"
    assert told in stderr
    assert failure(tmp_path)["kind"] == "refused"
    assert not (tmp_path / "run.json").exists()


@pytest.mark.faults
def test_an_error_of_one_rank_is_the_cause_and_not_what_follows_from_it(data, tmp_path):
    process = start_run(tiny_config(**TWO_RANKS), data, tmp_path, script="planted.py", PLANT="error", PLANT_RANK="1")
    code, stderr = finish_run(process)
    assert code == 1
    assert "rank 1: ValueError: planted error" in stderr
    assert failure(tmp_path)["kind"] == "error"
    assert "planted.py" in failure(tmp_path)["traceback"]
    assert not (tmp_path / "run.json").exists()


@pytest.mark.faults
def test_a_hung_collective_ends_with_the_stacks_of_all_ranks(data, tmp_path):
    process = start_run(
        tiny_config(**TWO_RANKS),
        data,
        tmp_path,
        script="planted.py",
        PLANT="hang",
        PLANT_RANK="1",
        MFUBENCH_TIMEOUT_S="10",
    )
    code, _ = finish_run(process)
    assert code == 1
    record = failure(tmp_path)
    assert record["kind"] == "hang"
    assert "MFUBENCH_TIMEOUT_S" in record["reason"]
    stacks = [(tmp_path / "ranks" / f"stacks-{rank}.txt").read_text() for rank in range(2)]
    assert len(record["stacks"]) == 2
    assert "planted.py" in stacks[1]  # where rank 1 sleeps
    assert stacks[0].count("File ")  # where rank 0 waits for it


@pytest.mark.faults
@pytest.mark.slow
def test_a_hang_of_a_single_process_leaves_a_record(data, tmp_path):
    command = [sys.executable, "-c", HANG, *run_arguments(tiny_config(), data, tmp_path)]
    process = subprocess.run(command, env=environment(MFUBENCH_TIMEOUT_S="3"), timeout=300, check=False)
    assert process.returncode == 1
    assert failure(tmp_path)["kind"] == "hang"
    assert "prefetch" in failure(tmp_path)["traceback"]


@pytest.mark.faults
def test_a_loss_that_is_not_finite_ends_with_status_diverged_and_the_step(data, tmp_path):
    optimizer = {"learning_rate": 1e30, "min_learning_rate": 0.0, "warmup_iters": 0, "grad_clip": 0.0}
    log = run_here(tiny_config(optimizer=optimizer, max_iters=200), data, tmp_path)
    assert log.status == "diverged"
    first = next(step.step for step in log.steps if step.loss is None)
    assert log.reason == f"the loss of step {first} is not finite"
    assert log.steps[-1].step - first <= 10
    assert "NaN" not in (tmp_path / "run.json").read_text()


@pytest.mark.faults
@pytest.mark.slow
def test_several_ranks_agree_that_they_diverged(data, tmp_path):
    optimizer = {"learning_rate": 1e30, "min_learning_rate": 0.0, "warmup_iters": 0, "grad_clip": 0.0}
    log = run(tiny_config(optimizer=optimizer, max_iters=200, **TWO_RANKS), data, tmp_path)
    assert log.status == "diverged"


def test_a_required_setting_that_is_not_to_be_had_skips_the_run(data, tmp_path):
    log = run_here(tiny_config(cuda_graphs=True, requires=("cuda_graphs", "dtype")), data, tmp_path)
    assert log.status == "skipped"
    assert "cuda_graphs: true was asked for, false is what there is (a CPU has no CUDA graphs)" in log.reason
    assert log.steps == []
    assert run_here(tiny_config(cuda_graphs=True, max_iters=2), data, tmp_path).status == "ok"
    assert run_here(tiny_config(requires=("attention", "loss"), max_iters=2), data, tmp_path).status == "ok"


@pytest.mark.slow
def test_a_memory_cap_makes_large_batches_out_of_memory(data, tmp_path):
    small = run(tiny_config(memory_cap_gib=1.0, max_iters=2), data, tmp_path / "small")
    assert small.status == "ok"
    large = run(tiny_config(memory_cap_gib=1.0, micro_batch_size=60_000, max_iters=2), data, tmp_path / "large")
    assert large.status == "oom", large.reason


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one", "two"])
def test_a_memory_cap_below_what_a_process_holds_is_out_of_memory_at_once(ranks, data, tmp_path):
    log = run(tiny_config(memory_cap_gib=0.05, max_iters=2, **ranks), data, tmp_path)
    assert log.status == "oom" and log.steps == []
    assert re.search(r"MemoryError: memory_cap_gib: 0\.05: the process held 0\.\d\d GiB before", log.reason)


def test_a_thread_that_cannot_be_started_is_out_of_memory_where_that_is_capped(monkeypatch):
    errors = [RuntimeError("unable to start watchdog thread"), RuntimeError("can't start new thread")]
    assert [failures.classify(error) for error in errors] == ["error", "error"]
    monkeypatch.setattr(failures, "memory_is_capped", lambda: True)
    assert [failures.classify(error) for error in errors] == ["oom", "oom"]


@pytest.mark.faults
def test_a_lone_process_that_the_kernel_killed_for_want_of_memory_is_a_result(data, tmp_path, monkeypatch):
    """The kernel's count stands in for its killer, which would not take this process alone."""
    count = tmp_path / "memory.events"
    count.write_text("oom 0\noom_kill 3\n")
    monkeypatch.setattr(ranks_module, "OOM_KILLS", (tmp_path / "no such file", count))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    paths = {"data": data, "output": tmp_path / "run.json"}
    config = tiny_config(max_iters=100_000).to_json()

    def killed(work, oom_kills: int) -> int:
        def kill() -> None:
            wait_until(lambda: (work / "live.json").exists(), 120)
            count.write_text(f"oom_kill {oom_kills}\n")
            children = psutil.Process().children()
            os.kill(next(one.pid for one in children if str(work) in one.cmdline()), signal.SIGKILL)

        with ThreadPoolExecutor(1) as pool:
            killer = pool.submit(kill)
            code = start_training(config, work=work, resume="never", **paths)
            killer.result()
        return code

    assert killed(tmp_path / "by somebody", 3) == -signal.SIGKILL and not paths["output"].exists()
    assert killed(tmp_path / "by the kernel", 4) == 0
    log = read_run_log(paths["output"])
    assert log.status == "oom" and log.steps
    assert log.reason == "the process was killed by SIGKILL: the kernel's out-of-memory killer was at work"


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one", "two"])
def test_a_run_that_was_paused_goes_on(ranks, data, tmp_path):
    config = tiny_config(max_iters=1000, **ranks)
    process = start_run(config, data, tmp_path, MFUBENCH_TIMEOUT_S="5")
    wait_until(lambda: (tmp_path / "live.json").exists(), 120)
    paused = [process.pid, *(ranks_of(process.pid) if ranks else [])]
    for number, seconds in ((signal.SIGSTOP, 7), (signal.SIGCONT, 0)):
        for pid in paused:
            os.kill(pid, number)
        time.sleep(seconds)
    code, stderr = finish_run(process)
    assert code == 0, stderr
    log = read_run_log(tmp_path / "run.json")
    assert len(log.steps) == 1000 and max(step.step_time_s for step in log.steps) > 6


@pytest.mark.faults
def test_damaged_data_is_a_sentence_and_no_traceback(tmp_path, capfd):
    folder = write_dataset(tmp_path / "data")
    (folder / "train.bin").write_bytes(b"1234")
    code = main(run_arguments(tiny_config(), folder, tmp_path / "work"))
    assert code == 1
    assert "train.bin" in failure(tmp_path / "work")["reason"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.faults
@pytest.mark.parametrize("jump_s", [86_400, -86_400])
def test_a_clock_that_is_set_changes_no_duration(jump_s, data, tmp_path):
    t0 = time.monotonic()
    planted = {"script": "planted.py", "PLANT": "clock", "PLANT_STEP": "5", "PLANT_JUMP_S": str(jump_s)}
    log = run(tiny_config(), data, tmp_path, **planted)
    elapsed_s = time.monotonic() - t0 + 2  # a process's start is known to the second
    assert log.status == "ok" and len(log.steps) == 20
    assert log.wall is not None and 0 < log.wall.training_s <= log.wall.total_s < elapsed_s
    assert all(0 < step.step_time_s < elapsed_s for step in log.steps)
    assert all(0 <= phase.time_s < elapsed_s for phase in log.phases)


@pytest.mark.faults
@pytest.mark.slow
def test_a_disk_that_fills_is_said_and_the_run_goes_on_once_there_is_room(small_disk, data):
    work = small_disk / "work"
    config = tiny_config(checkpoint={"interval": 5})
    planted = {"script": "planted.py", "PLANT": "full", "PLANT_STEP": "7", "PLANT_DISK": str(small_disk)}
    code, stderr = finish_run(start_run(config, data, work, **planted))
    assert code == 1 and f"no room is left on the disk of {work}: make some and start again" in stderr
    assert not (work / "run.json").exists()
    assert [path.name for path in (work / "checkpoints").glob("step-*")] == ["step-000005"]
    (small_disk / "somebody-elses").unlink()
    log = run(config, data, work)
    assert log.status == "ok" and [resume.step for resume in log.resumes] == [5]


@pytest.mark.faults
@pytest.mark.slow
def test_files_that_may_not_grow_leave_the_last_checkpoint(data, tmp_path):
    """What a full disk does, for users who may not mount one."""
    config = tiny_config(checkpoint={"interval": 5})
    code, _ = finish_run(start_run(config, data, tmp_path, script="planted.py", PLANT="limit", PLANT_STEP="7"))
    assert code == 1 and not (tmp_path / "run.json").exists()
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000005"]
    assert [resume.step for resume in run(config, data, tmp_path).resumes] == [5]


@pytest.mark.faults
def test_a_run_that_another_process_is_making_is_refused(data, tmp_path, capfd):
    with sole_writer(tmp_path):
        assert main(run_arguments(tiny_config(max_iters=2), data, tmp_path)) == 1
    assert f"another process is making this run (process {os.getpid()} on" in capfd.readouterr().err
    assert run_here(tiny_config(max_iters=2), data, tmp_path).status == "ok"


def test_a_model_with_too_few_rows_for_the_data_is_refused(data, tmp_path):
    assert main(run_arguments(tiny_config(model={"vocab_size": 50}), data, tmp_path)) == 1
    assert "vocab_size 50" in failure(tmp_path)["reason"]


@pytest.mark.faults
def test_an_unwritable_folder_is_told_before_training(data, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert main(run_arguments(tiny_config(), data, tmp_path / "file" / "work")) == 1
    assert "cannot be written to" in capfd.readouterr().err


@pytest.mark.parametrize("planted", [{"PLANT": "error"}, {"PLANT": "kill", "PLANT_RANK": "1"}], ids=str)
def test_stale_results_are_not_taken_for_new_ones(planted, data, tmp_path):
    run_here(tiny_config(max_iters=2), data, tmp_path)
    code, stderr = finish_run(start_run(tiny_config(**TWO_RANKS), data, tmp_path, script="planted.py", **planted))
    assert code == 1 and "rank" in stderr
    assert not (tmp_path / "run.json").exists()


@pytest.mark.faults
def test_an_attempt_that_is_refused_leaves_an_earlier_result_and_its_checkpoint(data, tmp_path, monkeypatch, capfd):
    config = tiny_config(max_iters=2, checkpoint={"at_end": True})
    run_here(config, data, tmp_path)
    (tmp_path / "trace.json.gz").write_bytes(b"a trace")
    result = (tmp_path / "run.json").read_bytes()
    only = tiny_config(evaluation={"only": True})

    def refused(config, data, *extra) -> str:
        capfd.readouterr()
        assert main(run_arguments(config, data, tmp_path, *extra)) == 1
        assert (tmp_path / "run.json").read_bytes() == result and (tmp_path / "trace.json.gz").exists()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
        assert failure(tmp_path)["kind"] == "refused"
        told = capfd.readouterr().err
        assert "run.json is an earlier run's result, which stays" in told
        return told

    assert "there is no such folder" in refused(config, tmp_path / "nowhere", "--resume", "never")
    assert "vocab_size 50" in refused(tiny_config(model={"vocab_size": 50}), data, "--resume", "never")
    assert "is a checkpoint of another run" in refused(tiny_config(seed=5), data)
    assert "evaluation.only needs a checkpoint" in refused(only, data, "--resume", "never")
    monkeypatch.setenv("MFUBENCH_TRACKERS", "paper")
    assert "unknown tracker 'paper'" in refused(config, data)
    monkeypatch.delenv("MFUBENCH_TRACKERS")
    huge = tiny_config(checkpoint={"at_end": True})
    monkeypatch.setattr(checkpoint_folders, "BYTES_A_PARAMETER", 10**15)
    assert "a checkpoint needs" in refused(huge, data, "--resume", "never")


@pytest.mark.faults
def test_out_of_memory_before_the_first_step_is_not_given_the_steps_of_an_earlier_run(data, tmp_path):
    run_here(tiny_config(max_iters=2), data, tmp_path)
    (tmp_path / "trace.json.gz").write_bytes(b"a trace")
    log = run(tiny_config(), data, tmp_path, script="planted.py", PLANT="large model")
    assert log.status == "oom" and log.steps == [] and not log.reason.startswith("rank")
    assert not (tmp_path / "trace.json.gz").exists()


@pytest.mark.faults
def test_a_cache_that_cannot_be_written_to_is_told_before_training(data, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MFUBENCH_CACHE", str(tmp_path / "file"))
    config = tiny_config(compile="block", max_iters=2)
    assert main(run_arguments(config, data, tmp_path)) == 1
    assert "set MFUBENCH_CACHE" in failure(tmp_path)["reason"] and failure(tmp_path)["kind"] == "refused"
    assert run_here(tiny_config(max_iters=2), data, tmp_path).status == "ok"  # which compiles nothing


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: ..."), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("NCCL error in: ..., unhandled cuda error. Last error: Cuda failure 2 'out of memory'"), "oom"),
        (RuntimeError("Failed to CUDA calloc 6291456 bytes"), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (RuntimeError("std::bad_alloc"), "oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "error"),  # no device here, so not a full one
        (ValueError("a shape is wrong"), "error"),
    ],
    ids=str,
)
def test_out_of_memory_by_any_name(error, kind):
    assert failures.classify(error) == kind


def test_errors_in_disguise_count_where_the_device_is_full(monkeypatch):
    monkeypatch.setattr(failures, "device_is_full", lambda: True)
    assert failures.classify(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")) == "oom"
    assert failures.classify(ValueError("a shape is wrong")) == "error"


def test_the_cause_comes_first(tmp_path):
    now = time.time()
    for rank, kind, at in ((0, "error", now + 1), (1, "error", now), (2, "oom", now + 2)):
        failures.write_failure(tmp_path, failures.Failure(rank, kind, "", "", at))
    assert [record.rank for record in failures.read_failures(tmp_path)] == [2, 1, 0]


def test_what_a_rank_says_after_its_first_failure_does_not_replace_it(tmp_path):
    failures.ranks_folder(tmp_path).mkdir(parents=True)
    failures.write_failure(tmp_path, failures.Failure(0, "hang", "no progress", "", 1.0))
    failures.write_failure(tmp_path, failures.Failure(0, "error", "connection closed by peer", "", 2.0))
    assert [record.kind for record in failures.read_failures(tmp_path)] == ["hang"]


@pytest.mark.parametrize("text", ["abc", "", "-5", "nan", "inf", "0"])
def test_a_timeout_that_is_none_is_refused_before_anything_begins(text, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MFUBENCH_TIMEOUT_S", text)
    assert main(run_arguments(tiny_config(), data, tmp_path / "work")) == 1
    assert f"MFUBENCH_TIMEOUT_S is {text!r}; set it to seconds above 0" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_run_of_one_process_takes_no_place_among_the_ranks_of_its_surroundings(data, tmp_path):
    """A shell inside somebody's torchrun or SLURM step has such variables."""
    strange = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MFUBENCH_LAUNCHER": "999999"}
    strange |= {"SLURM_NODEID": "1", "SLURM_NNODES": "2"}
    code, stderr = finish_run(start_run(tiny_config(max_iters=2), data, tmp_path, **strange))
    assert code == 0, stderr
    assert len(read_run_log(tmp_path / "run.json").steps) == 2


@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one", "two"])
def test_a_run_ends_with_the_job_that_started_it(ranks, data, tmp_path):
    """Nobody waits for its result any more, and its cards are given to others."""
    config = tiny_config(**ranks, max_iters=100_000)
    arguments = json.dumps({"data": str(data), "work": str(tmp_path), "output": str(tmp_path / "run.json")})
    job = subprocess.Popen([sys.executable, "-c", JOB, config.to_json(), arguments], env=environment())
    wait_until(lambda: (tmp_path / "live.json").exists(), 120)
    job.kill()
    job.wait()
    # the folder can be locked again: launcher and ranks are gone
    wait_until(lambda: is_free(tmp_path), 60)
    assert not (tmp_path / "run.json").exists()


def wait_until(condition, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def is_free(work) -> bool:
    try:
        with sole_writer(work):
            return True
    except ConfigError:
        return False
