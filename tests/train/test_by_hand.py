"""`mfubench train`, as people call it: a run JSON, a work folder beside it, and what stands in the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from train.test_resume import wait_for_step
from train.train_runs import VOCABULARY, environment, write_dataset
from typer.testing import CliRunner

from mfubench.cli import app
from mfubench.run_log import read_run_log
from mfubench.train.checkpoint_folders import latest

SMALL = (f"model.vocab_size={VOCABULARY}", "model.num_hidden_layers=1", "seq_len=16", "device=cpu", "dtype=float32")


def command_line(data, output, *words: str) -> list[str]:
    call = "from mfubench.cli import main; main()"
    options = ("--data", str(data), "--output", str(output))
    return [sys.executable, "-c", call, "train", "llama2-tiny", *SMALL, *words, *options]


def start(data, output, *words: str) -> subprocess.Popen[str]:
    command = command_line(data, output, *words)
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_in_terminal(data, output, *words: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command as the foreground job of a terminal of its own, and that terminal's other end."""
    terminal, inside = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command_line(data, output, *words),
        env=environment(),
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(inside)
    return process, terminal


def read_terminal(terminal: int) -> str:
    """All that is shown until the last program with this terminal has ended."""
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that nobody is left
        while piece := os.read(terminal, 4096):
            shown += piece
    return shown.decode()


def call(data, output, *words: str) -> tuple[int, str]:
    """Exit code and standard error."""
    process = start(data, output, *words)
    _, stderr = process.communicate(timeout=300)
    return process.returncode, stderr


@pytest.mark.faults
def test_a_killed_run_is_gone_on_from_or_replaced_as_its_user_says(data, tmp_path):
    output, work = tmp_path / "run.json", tmp_path / "run-work"
    process = start(data, output, "max_iters=100000", "checkpoint.interval=5", "measurement.profile=none")
    wait_for_step(work, 30, process)
    engine = psutil.Process(process.pid).children()[0]
    os.kill(engine.pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    last = latest(work / "checkpoints")
    assert process.returncode != 0 and last is not None
    assert "error: the training process was killed by SIGKILL (on a CPU mostly by the kernel for want of" in stderr
    assert f"checkpoint: {last};" in stderr and "--resume" in stderr

    done = int(last.name.removeprefix("step-"))
    code, stderr = call(data, output, f"max_iters={done + 1}")
    assert code == 1 and f"error: {last}: " in stderr and "--resume" in stderr and "--anew" in stderr
    assert latest(work / "checkpoints") == last

    code, stderr = call(data, output, f"max_iters={done + 1}", "--resume")
    assert code == 0, stderr
    assert [resume.step for resume in read_run_log(output).resumes] == [done]

    code, stderr = call(data, output, "max_iters=2", "--anew")
    assert code == 0 and f"starting anew: {last}, an earlier run's, is removed" in stderr
    assert latest(work / "checkpoints") is None and read_run_log(output).resumes == []


@pytest.mark.faults
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_a_terminal_stops_with_a_checkpoint(data, tmp_path, ranks):
    """The terminal sends it to all of its foreground processes at once: it counts once."""
    output, work = tmp_path / "run.json", tmp_path / "run-work"
    longer_steps = "gradient_accumulation_steps=64"
    words = ("max_iters=100000", "measurement.profile=none", f"world_size={ranks}", longer_steps)
    process, terminal = start_in_terminal(data, output, *words)
    reader = ThreadPoolExecutor(1).submit(read_terminal, terminal)
    wait_for_step(work, 10, process)
    os.write(terminal, b"\x03")
    assert process.wait(timeout=120) == 75
    shown = reader.result(timeout=60)
    os.close(terminal)
    last = latest(work / "checkpoints")
    assert last is not None and "stopped on request" in shown and "Traceback" not in shown
    assert f"checkpoint: {last};" in shown and "--resume" in shown
    done = int(last.name.removeprefix("step-"))
    code, stderr = call(data, output, f"max_iters={done + 1}", f"world_size={ranks}", longer_steps, "--resume")
    assert code == 0 and [resume.step for resume in read_run_log(output).resumes] == [done], stderr


def test_a_run_in_somebodys_step_is_made_and_its_path_is_there(data, tmp_path):
    """A shell on the second node of a job, of which the run is no part; sigterms after its end change nothing."""
    surroundings = environment(SLURM_JOB_ID="1", SLURM_STEP_ID="0", SLURM_NODEID="1", SLURM_NNODES="2")
    output = tmp_path / "run.json"
    process = subprocess.Popen(
        command_line(data, output, "max_iters=2"), env=surroundings, stdout=subprocess.PIPE, text=True
    )
    while not output.exists():
        assert process.poll() is None
        time.sleep(0.01)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert (process.wait(), process.stdout.read()) == (0, f"{output}\n")


@pytest.mark.faults
def test_resume_says_what_it_found_to_go_on_from(data, tmp_path):
    output, folder = tmp_path / "run.json", tmp_path / "run-work" / "checkpoints"
    words = ("max_iters=3", "checkpoint.at_end=true", "--resume")
    code, stderr = call(data, output, *words)
    assert code == 0 and stderr.startswith(f"no checkpoint in {folder}: starts anew\n"), stderr
    assert "unknown: a CPU has no datasheet peak\n" in stderr
    code, stderr = call(data, output, *words)
    assert code == 0 and "starts anew" not in stderr
    assert stderr.splitlines()[-1] == "by-hand/run: ok (all 3 steps were done before; nothing was trained)"
    code, stderr = call(data, output, "max_iters=6", "micro_batch_size=4", "--resume")
    refusal = next(line for line in stderr.splitlines() if line.startswith("error: "))
    assert code == 1 and refusal.startswith(f"error: {folder / 'step-000003'}: is a checkpoint of another run")
    assert "micro_batch_size: 8 there, 4 here; global_batch_size: 8 there, 4 here" in refusal
    assert refusal.endswith(f"remove {folder} (by hand: --anew) to start anew")


@pytest.mark.faults
def test_resume_refuses_other_data_of_the_same_size(tmp_path):
    data, output, folder = tmp_path / "data", tmp_path / "run.json", tmp_path / "run-work" / "checkpoints"
    code, stderr = call(write_dataset(data), output, "max_iters=4", "checkpoint.interval=2")
    assert code == 0, stderr
    before = read_run_log(output)
    code, stderr = call(write_dataset(data, seed=1), output, "max_iters=8", "checkpoint.interval=2", "--resume")
    last = folder / "step-000004"
    assert code == 1 and f"error: {last}: is a checkpoint of another run than this one: data.sha256: " in stderr
    assert latest(folder) == last and read_run_log(output) == before
    code, stderr = call(data, output, "max_iters=8", "checkpoint.interval=2", "--anew")
    assert code == 0 and read_run_log(output).resumes == [], stderr


def test_losses_and_sample_stand_at_the_end(data, tmp_path):
    asked = ("max_iters=3", "measurement.warmup_steps=1", "evaluation.at_start=true", "evaluation.at_end=true")
    code, stderr = call(data, tmp_path / "run.json", *asked, "evaluation.iters=1", "sample_tokens=5")
    assert code == 0, stderr
    log = read_run_log(tmp_path / "run.json")
    first, last = (one.loss for one in log.evaluations)
    assert stderr.splitlines()[-3:] == [
        "by-hand/run: ok",
        f"  validation loss: {first:.4f} after 0 steps, {last:.4f} after 3 steps",
        f"  sample: {log.sample}",
    ]


def test_a_run_by_hand_continues_another(data, tmp_path):
    first, checkpoints = tmp_path / "first.json", tmp_path / "first-work" / "checkpoints"
    code, stderr = call(data, first, "name=by-hand/first", "max_iters=3", "checkpoint.at_end=true")
    assert code == 0, stderr
    more = ("max_iters=5", "continues=by-hand/first")
    code, stderr = call(data, tmp_path / "more.json", *more)
    assert code == 1 and stderr.startswith("error: mfubench train: `continues` and --start-from go together: ")
    code, stderr = call(data, tmp_path / "more.json", *more, "--start-from", str(checkpoints))
    assert code == 0, stderr
    assert [step.step for step in read_run_log(tmp_path / "more.json").steps] == [3, 4]


@pytest.mark.faults
def test_what_continues_a_run_that_diverged_says_so(data, tmp_path):
    first, work = tmp_path / "first.json", tmp_path / "first-work"
    too_fast = ("optimizer.learning_rate=1.0e+30", "optimizer.warmup_iters=0", "optimizer.grad_clip=0.0")
    code, stderr = call(data, first, "name=by-hand/first", "max_iters=200", "checkpoint.at_end=true", *too_fast)
    assert code == 0 and "by-hand/first: diverged" in stderr
    more = ("max_iters=300", "continues=by-hand/first", *too_fast)
    for named in (work, work / "checkpoints"):
        code, stderr = call(data, tmp_path / "more.json", *more, "--start-from", str(named))
        assert code == 1 and f"error: {named}: no checkpoint of by-hand/first found" in stderr
        assert f"that run ended as diverged ({read_run_log(first).reason}): change its settings" in stderr


def test_a_run_that_lacks_what_it_requires_is_skipped_and_no_failure(data, tmp_path):
    code, stderr = call(data, tmp_path / "run.json", "cuda_graphs=true", "requires=[cuda_graphs]")
    assert code == 0 and "by-hand/run: skipped (required, but not to be had here: cuda_graphs: " in stderr
    assert read_run_log(tmp_path / "run.json").status == "skipped"
    told = " ".join(CliRunner().invoke(app, ["train", "--help"]).output.split())
    assert "Exits with 0 where a run JSON was written: its status says whether the run is ok, oom, diverged or" in told
    assert "With 75 where it was stopped with a checkpoint" in told


def test_a_key_that_is_given_twice_is_refused(data, tmp_path):
    code, stderr = call(data, tmp_path / "run.json", "max_iters=2", "max_iters=3")
    assert (code, stderr) == (1, "error: 'max_iters=3': max_iters is given twice; keep one of them\n")


def test_a_folder_without_a_dataset_is_told_with_the_way_to_one(data, tmp_path):
    code, stderr = call(tmp_path / "nowhere", tmp_path / "run.json")
    assert code == 1
    assert f"{tmp_path / 'nowhere'}: there is no such folder; `snakemake --cores all datasets`" in stderr
