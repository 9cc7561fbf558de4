"""A training on two nodes, ended in every way that a cluster knows, goes on from its checkpoint each time.

The tests are one story and run in order: each takes up what the one before left.
"""

import json
import subprocess
import sys

import pytest
from cluster.slurm import TRAINING, administer, ask, job, jobs_named, queue, submitted, wait_until

pytestmark = pytest.mark.cluster

RULE = "rule_run_training"


@pytest.fixture(scope="module")
def long_training(project):
    """The project with a training that takes longer than these tests and writes checkpoints often."""

    def change(study):
        pretrain = study["experiments"]["training"]["cases"]["pretrain"]
        pretrain.update(max_iters=100_000, checkpoint={"interval": 20}, evaluation={"interval": None})

    project.edit_study(change)
    yield project
    for process in project.processes:
        if process.poll() is None:
            project.kill(process)
    for line in queue():
        ask("scancel", line.split()[0])


def start_training(project):
    """snakemake, once a job of it has written another checkpoint; and the job's number."""
    saved, known = project.steps_saved(), jobs_named(RULE)
    process = project.start(TRAINING)
    project.wait_for_checkpoint_after(saved)
    (number,) = set(jobs_named(RULE)) - set(known)
    return process, number


def test_only_the_training_is_stale(long_training):
    assert long_training.slurm("-n", TRAINING).count("rule run_training:") == 1
    assert long_training.slurm("-n", TRAINING).count("\nrule ") == 1


def test_a_job_that_takes_more_memory_than_it_asked_for_fails_and_goes_on_with_more(long_training):
    def ask_for(megabytes):
        long_training.edit_study(lambda study: study["machine"]["slurm"].update(mem_mb_per_gpu=megabytes))

    ask_for(100)  # two ranks with torch take several times as much
    output = long_training.slurm(TRAINING, check=False)
    (number,) = submitted(output)
    assert f"SLURM-job '{number}' failed" in output and job(number)["JobState"] in ("FAILED", "OUT_OF_MEMORY")
    assert not (long_training.folder / TRAINING).exists()
    ask_for(1500)
    assert long_training.slurm("-n", TRAINING).count("\nrule ") == 1  # the next test goes on with it


def test_scancel(long_training):
    process, number = start_training(long_training)
    ask("scancel", number)
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0 and f"SLURM-job '{number}' failed, SLURM status is: 'CANCELLED'" in output
    assert submitted(output) == [number]
    assert not (long_training.folder / TRAINING).exists()


def test_requeue(long_training):
    """The same job starts again, finds its checkpoint and goes on; snakemake never notices."""
    saved = long_training.steps_saved()
    process, number = start_training(long_training)
    assert long_training.steps_saved() > saved > 0
    ask("scontrol", "requeue", number)
    wait_until(lambda: job(number)["Restarts"] == "1" and job(number)["JobState"] == "PENDING", "no requeue")
    ask("scontrol", "update", f"jobid={number}", "StartTime=now")  # else SLURM waits two minutes before it starts it
    wait_until(lambda: job(number)["JobState"] == "RUNNING", "the job did not start again", timeout_s=180)
    long_training.wait_for_checkpoint_after(long_training.steps_saved())
    assert process.poll() is None
    assert queue() == [f"{number} RUNNING"]


def test_snakemake_killed_leaves_its_job_and_submits_no_second_one(long_training):
    process = long_training.processes[-1]  # of the test before: its job is running
    (before,) = queue()
    long_training.kill(process)
    assert queue() == [before]
    locked = long_training.slurm(TRAINING, check=False)
    assert "--unlock" in locked
    long_training.slurm("--unlock", TRAINING)
    refused = long_training.slurm(TRAINING, check=False)
    assert "jobs of an earlier snakemake in this folder have not ended" in refused and not submitted(refused)
    assert queue() == [before]

    command = [sys.executable, "workflow/scripts/cancel_orphans.py"]
    environment = {**long_training.environment(), "PYTHONPATH": "src"}
    ended = subprocess.run(
        command, cwd=long_training.folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "1 job(s) of this folder were cancelled\n"
    assert queue() == []


def test_a_drained_node_holds_the_job_back_until_it_returns(long_training):
    administer("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    try:
        saved = long_training.steps_saved()
        process = long_training.start(TRAINING)
        wait_until(lambda: len(queue()) == 1 and queue()[0].endswith("PENDING"), "the job is not in the queue")
    finally:
        administer("scontrol", "update", "nodename=n2", "state=resume")
    long_training.wait_for_checkpoint_after(saved)
    number = queue()[0].split()[0]
    assert job(number)["NodeList"] == "n[1-2]"
    long_training.abandon(process)


def test_a_time_limit_leaves_a_checkpoint_and_the_restart_goes_on_from_it(long_training):
    def change(study):
        slurm = study["machine"]["slurm"]
        slurm.update(runtime_min={"training": 2}, stop_before_end_s=60, training_restarts=1)

    long_training.edit_study(change)
    saved = long_training.steps_saved()
    stopped = long_training.training() / "stopped.json"
    stopped.unlink(missing_ok=True)  # of the scancel before, which left a checkpoint too
    process = long_training.start(TRAINING)
    wait_until(stopped.exists, "the signal before the time limit did not stop the training", timeout_s=150)
    step = json.loads(stopped.read_text())["step"]
    assert step > saved and step == long_training.steps_saved()
    first = jobs_named(RULE)[-1]
    wait_until(lambda: jobs_named(RULE)[-1] != first, "snakemake did not submit the training again", timeout_s=180)
    assert job(first)["JobState"] == "FAILED"  # by its own exit code 75, before the limit
    long_training.wait_for_checkpoint_after(step)
    long_training.abandon(process)


def test_the_end_reports_every_restart(long_training):
    """A training that is short enough to end, cancelled once."""
    steps = 200

    def change(study):
        study["experiments"]["training"]["cases"]["pretrain"].update(max_iters=steps, checkpoint={"interval": 10})
        study["machine"]["slurm"].update(runtime_min={}, training_restarts=0)

    long_training.edit_study(change)
    earlier = long_training.training()
    process = long_training.start(TRAINING)
    wait_until(lambda: long_training.training() != earlier, "the training did not start anew", timeout_s=180)
    long_training.wait_for_checkpoint_after(0)
    long_training.abandon(process)
    saved = long_training.steps_saved()
    assert 0 < saved < steps

    long_training.slurm(TRAINING)
    log = json.loads((long_training.folder / TRAINING).read_text())
    assert log["status"] == "ok" and [step["step"] for step in log["steps"]] == list(range(steps))
    assert [resume["step"] for resume in log["resumes"]] == [saved]
    assert log["environment"]["slurm_job_id"] == jobs_named(RULE)[-1]
    assert "Nothing to be done" in long_training.slurm("-n", TRAINING)
