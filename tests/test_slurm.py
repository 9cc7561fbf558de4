"""What is asked of SLURM, with stand-ins for its commands; tests/cluster asks a real one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mfubench.config import ConfigError, parse
from mfubench.machine_config import MachineConfig
from mfubench.slurm import (
    JOB_NAME_PREFIX,
    check_status_command,
    jobs_of_folder,
    needs_step,
    refuse_orphans,
    run_step,
)
from mfubench.slurm_requests import slurm_cpu, slurm_node, whole_nodes

PROFILES = Path(__file__).parents[1] / "profiles"
MACHINE = {"gpus": 8, "slurm": {"partition_gpu": "gpu", "partition_cpu": "cpu"}}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Puts a shell script on the PATH, under the name of one of SLURM's commands."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()

    def write(name, body):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return write


def test_orphans_are_the_jobs_of_this_folder_with_our_prefix(command, tmp_path):
    lines = (
        f"7|RUNNING|mfubench_1b2c|{tmp_path}",
        f"8|PENDING|mfubench_1b2c|{tmp_path}",
        f"9|RUNNING|other|{tmp_path}",
        "10|RUNNING|mfubench_1b2c|/elsewhere",
    )
    command("squeue", "\n".join(f"echo '{line}'" for line in lines))
    assert [job.number for job in jobs_of_folder(tmp_path)] == ["7", "8"]
    with pytest.raises(ConfigError, match=r"7 \(running\), 8 \(pending\).*cancel_orphans.py"):
        refuse_orphans(tmp_path)


def test_a_queue_that_does_not_answer_is_no_empty_queue(command, tmp_path):
    command("squeue", "echo 'cannot reach the controller' >&2; exit 1")
    with pytest.raises(ConfigError, match="cannot reach the controller"):
        jobs_of_folder(tmp_path)


def test_without_a_slurm_there_are_no_orphans(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refuse_orphans(tmp_path)


@pytest.mark.parametrize("storage", ["(null)", "accounting_storage/none"])
def test_sacct_without_accounts_is_refused(command, storage):
    command("scontrol", f"echo 'AccountingStorageType   = {storage}'")
    with pytest.raises(ConfigError, match="--slurm-status-command squeue"):
        check_status_command("sacct")
    check_status_command("squeue")


def test_sacct_with_accounts_is_fine(command):
    command("scontrol", "echo 'AccountingStorageType   = accounting_storage/slurmdbd'")
    check_status_command("sacct")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "5"}, True),  # the batch script of the executor plugin, which drops the rest
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "4294967291"}, True),  # a batch script
        ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}, False),  # under srun
    ],
)
def test_a_batch_script_starts_a_step_and_a_step_does_not(monkeypatch, variables, expected):
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert needs_step() is expected


def test_a_step_has_one_task_a_node_and_a_name_of_its_own(command, capfd):
    command("srun", 'echo "$@"; echo "$MFUBENCH_STEP"; exit 75')
    assert run_step(2, ["python", "train_model.py"]) == 75
    arguments, first = capfd.readouterr().out.splitlines()
    assert arguments.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1")
    assert arguments.endswith("python train_model.py")
    run_step(1, ["true"])
    assert capfd.readouterr().out.splitlines()[1] != first


@pytest.mark.parametrize(("number", "passed_on"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_an_interrupt_becomes_sigterm_to_the_tasks_and_srun_is_left_alone(command, tmp_path, number, passed_on):
    command("srun", f"trap 'echo killed > {tmp_path}/srun' TERM INT; touch {tmp_path}/started; sleep 2")
    command("scancel", f'echo "$@" > {tmp_path}/scancel')
    code = "from mfubench.slurm import run_step; run_step(1, ['x'])"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "SLURM_JOB_ID": "5"})
    while not (tmp_path / "started").exists():
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    assert not (tmp_path / "srun").exists()
    assert (tmp_path / "scancel").exists() is passed_on
    assert not passed_on or (tmp_path / "scancel").read_text() == "--signal=TERM 5\n"


def test_the_default_profile_takes_nothing_from_the_slurm_profile():
    """`--profile profiles/slurm` is overruled, key by key, by profiles/default, which Snakemake always finds."""
    default, slurm = (
        yaml.safe_load((PROFILES / name / "config.yaml").read_text(encoding="utf-8")) for name in ("default", "slurm")
    )
    assert default.items() <= slurm.items()
    assert slurm["slurm-jobname-prefix"] == JOB_NAME_PREFIX


def machine(**changes):
    return parse(MachineConfig, json.loads(json.dumps({**MACHINE, **changes})), "study.yaml: machine")


def test_run_times_not_named_keep_their_defaults():
    changed = machine(slurm={**MACHINE["slurm"], "runtime_min": {"training": 60}}).slurm.runtime_min
    assert changed["training"] == 60 and changed["smoke"] == machine().slurm.runtime_min["smoke"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"gpus": "auto"}, "slurm needs `gpus`"),
        ({"slurm": {**MACHINE["slurm"], "runtime_min": {"smokes": 5}}}, "runtime_min"),
        ({"slurm": {**MACHINE["slurm"], "runtime_min": {"smoke": 0}}}, "runtime_min"),
        ({"slurm": {**MACHINE["slurm"], "extra": "--comment=a; touch b"}}, "extra"),
        ({"slurm": {**MACHINE["slurm"], "account": "$(id)"}}, "account"),
        ({"network": {"LD_PRELOAD": "x.so"}}, "LD_PRELOAD"),
        ({"network": {"NCCL_NET_PLUGIN": "/tmp/x.so"}}, "NCCL_NET_PLUGIN"),
    ],
)
def test_values_that_would_reach_a_shell_or_load_code_are_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        machine(**changes)


def test_network_variables():
    assert machine(network={"NCCL_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}).network


def test_a_job_that_measures_asks_for_whole_nodes_and_its_stages_time():
    asked = {"account": "us", "cpus_per_gpu": 12, "mem_mb_per_gpu": 1000, "runtime_min": {"scaling": 45}}
    cluster = machine(slurm={**MACHINE["slurm"], **asked, "extra": "--constraint=ib"})
    assert whole_nodes(cluster, 1, 1) == 8 and whole_nodes(cluster, 16, 2) == 16
    assert slurm_node(cluster, "scaling") == {
        "slurm_partition": "gpu",
        "slurm_account": "us",
        "runtime": 45,
        "mem_mb": 8000,
        "cpus_per_task": 96,
        "slurm_extra": "--exclusive --signal=TERM@300 --constraint=ib",
    }
    assert slurm_node(machine(), "scaling")["cpus_per_task"] == -1  # all that the node has


def test_preparation_and_analysis_go_to_cpu_nodes():
    preparation, analysis = slurm_cpu(machine(), "preparation"), slurm_cpu(machine(), "analysis")
    assert preparation["slurm_partition"] == analysis["slurm_partition"] == "cpu"
    assert preparation["cpus_per_task"] == 8 and analysis["cpus_per_task"] == 1


def test_elsewhere_nothing_is_asked_of_slurm():
    laptop = parse(MachineConfig, {"gpus": 4}, "study.yaml: machine")
    assert slurm_node(laptop, "scaling") == slurm_cpu(laptop, "analysis") == {}
    assert whole_nodes(laptop, 2, 1) == 2


def test_a_job_without_srun_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="srun, which is not to be found"):
        run_step(1, ["true"])
