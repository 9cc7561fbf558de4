"""The small study through sbatch: which job goes where and asks for what, and a run on two nodes."""

import json
import subprocess
import sys

import pytest
from cluster.slurm import job, submitted

pytestmark = pytest.mark.cluster

MEASURED = ("run_", "measure_ceilings", "search_memory", "record_machine")


@pytest.fixture(scope="module")
def jobs(project):
    """What SLURM says of each job of the study, by its rule."""
    return [job(number) for number in submitted(project.first_output)]


def rule(found):
    return found["Comment"].removeprefix("rule_").split("_wildcards_")[0]


def test_every_job_has_completed_and_nothing_is_left_to_do(project, jobs):
    assert {found["JobState"] for found in jobs} == {"COMPLETED"}
    assert "Nothing to be done" in project.slurm("-n", "all")
    assert json.loads((project.results / "audit.json").read_text())


def test_measured_jobs_take_whole_gpu_nodes_and_the_others_cpu_nodes(jobs):
    rules = {rule(found) for found in jobs}
    assert {"get_tokenizer", "prepare_dataset", "tabulate_runs", "write_report", "run_baseline"} <= rules
    for found in jobs:
        measures = rule(found).startswith(MEASURED)
        assert found["Partition"] == ("gpu" if measures else "cpu"), rule(found)
        nodes = int(found["NumNodes"])
        if measures:
            assert found["TresPerJob"] == f"gres:gpu:{2 * nodes}"
            assert found["NumCPUs"] == str(4 * nodes)  # all that its nodes have
            assert found["MinMemoryNode"] in ("3000M", "3G")


def test_no_two_measurements_shared_a_node(jobs):
    """Each has all CPUs of its nodes, so that SLURM cannot have placed another beside it."""
    measured = sorted(
        (found for found in jobs if rule(found).startswith(MEASURED)), key=lambda found: found["StartTime"]
    )
    for earlier in measured:
        for later in measured:
            if earlier["JobId"] != later["JobId"] and earlier["NodeList"] == later["NodeList"]:
                assert earlier["EndTime"] <= later["StartTime"] or later["EndTime"] <= earlier["StartTime"]


def test_a_run_on_two_nodes(project, jobs):
    log = json.loads((project.results / "runs" / "scaling" / "two-nodes.json").read_text())
    found = next(found for found in jobs if rule(found) == "run_scaling")
    assert log["status"] == "ok" and log["config"]["nnodes"] == 2 and len(log["rank_step_times_s"]) == 4
    assert log["environment"]["slurm_job_id"] == found["JobId"]
    variables = log["environment"]["variables"]
    assert variables["SLURM_JOB_NODELIST"] == found["NodeList"] == "n[1-2]"
    assert variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert json.loads(variables["MFUBENCH_LEASE"])["cards"] == ["0", "1"]
    ranks = project.results / "work" / "scaling" / "two-nodes" / "ranks"
    assert sorted(path.name for path in ranks.glob("rank-*.log")) == [f"rank-{rank}.log" for rank in range(4)]


def test_two_nodes_train_as_one_does(project, tmp_path):
    """Four ranks on two nodes give the losses of four ranks on one."""
    on_two = json.loads((project.results / "runs" / "scaling" / "two-nodes.json").read_text())
    config = json.dumps({**on_two["config"], "nnodes": 1, "name": "scaling/one-node"})
    folders = ["--data", "resources/datasets/text", "--work", tmp_path, "--output", tmp_path / "run.json"]
    command = [sys.executable, "-m", "mfubench.train.launch", "--config", config, *folders]
    environment = {**project.environment(), "PYTHONPATH": "src"}
    subprocess.run(command, cwd=project.folder, env=environment, check=True, timeout=120)
    on_one = json.loads((tmp_path / "run.json").read_text())
    losses = [step["loss"] for step in on_two["steps"]]
    assert [step["loss"] for step in on_one["steps"]] == pytest.approx(losses, rel=1e-6)


def test_the_plain_profile_form_submits_too(project):
    figure = "results/minimal/figures/loss.png"
    output = project.slurm(figure, "--workflow-profile", "default", "--profile", "profiles/slurm", "-R", "plot_loss")
    (number,) = submitted(output)
    assert job(number)["Comment"] == "rule_plot_loss"
