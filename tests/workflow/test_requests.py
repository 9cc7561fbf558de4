"""What jobs ask for, from dry runs: on a cluster whole nodes, elsewhere as many GPUs as the run has ranks."""

import re

import pytest
import yaml
from workflow.project import STUDY, Project, copy_project

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh(tmp_path) -> Project:
    """A project without results, whose study has a run of 16 ranks on two nodes of 8 GPUs."""
    project = copy_project(tmp_path / "project")
    study = yaml.safe_load(STUDY.read_text())
    study["machine"] = {"gpus": 8, "max_nodes": 2}
    study["base"]["device"] = "auto"
    study["experiments"]["scaling"] = {"cases": {"one-gpu": {}, "two-nodes": {"world_size": 16, "nnodes": 2}}}
    (project.folder / "study.yaml").write_text(yaml.safe_dump(study))
    return project


def requests(project: Project, *arguments: str) -> dict[str, dict[str, str]]:
    """Resources by the output of each job of a dry run."""
    printed = project.snakemake("-n", *arguments)
    found = re.findall(r"^    output: (\S+?),?(?: .*)?$(?:\n    .*)*?\n    resources: (.*)$", printed, re.MULTILINE)
    return {output: dict(pair.split("=", 1) for pair in listed.split(", ")) for output, listed in found}


def test_16_ranks_on_two_nodes_of_a_cluster(fresh):
    study = yaml.safe_load((fresh.folder / "study.yaml").read_text())
    asked = {"partition_gpu": "h100", "partition_cpu": "small", "account": "us", "cpus_per_gpu": 12}
    study["machine"]["slurm"] = {**asked, "extra": "--constraint=ib", "runtime_min": {"scaling": 45}}
    (fresh.folder / "study.yaml").write_text(yaml.safe_dump(study))
    found = requests(fresh)
    two_nodes = found["results/minimal/runs/scaling/two-nodes.json"]
    expected = {"gpu": "16", "nodes": "2", "tasks": "2", "mem_mb": "256000", "cpus_per_task": "96", "runtime": "45"}
    assert two_nodes.items() >= expected.items()
    assert two_nodes["slurm_partition"] == "h100" and two_nodes["slurm_account"] == "us"
    assert two_nodes["slurm_extra"] == "--exclusive --signal=TERM@300 --constraint=ib"
    assert found["results/minimal/runs/scaling/one-gpu.json"]["gpu"] == "8"  # its node is nobody else's
    assert found["results/minimal/machine.json"]["gpu"] == "8"
    for output in ("resources/datasets/text/meta.json", "results/minimal/report.html"):
        assert found[output]["slurm_partition"] == "small" and "gpu" not in found[output]


def test_elsewhere_a_run_asks_for_its_own_gpus_alone(fresh):
    found = requests(fresh)
    one_gpu = found["results/minimal/runs/scaling/one-gpu.json"]
    assert one_gpu["gpu"] == "1" and one_gpu["exclusive"] == "1"
    assert not [name for resources in found.values() for name in resources if name.startswith("slurm_")]


def test_more_gpus_than_the_limit_are_refused_rather_than_lowered(fresh):
    refused = fresh.snakemake("-n", "--resources", "gpu=8", check=False)
    assert "scaling/two-nodes needs 16 GPUs, but the limit is gpu=8" in refused
