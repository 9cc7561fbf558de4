"""A SLURM of two nodes on this machine, and a copy of the project whose study runs through it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cluster.slurm import ClusterProject
from workflow.project import STUDY, copy_project

UP = Path(__file__).parent / "slurm_up.sh"
UNAVAILABLE = 77  # its exit code where a machine can have no SLURM


def pytest_collection_modifyitems(items):
    """These tests install and start daemons: they run where that is wanted."""
    if os.environ.get("MFUBENCH_CLUSTER") != "1":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a SLURM: make test-cluster"))


def cluster_study() -> dict:
    """The smallest study, on two nodes of two (pretended) GPUs, one of its runs on both nodes."""
    study = yaml.safe_load(STUDY.read_text())
    study["machine"] = {
        "gpus": 2,
        "max_nodes": 2,
        "network": {"GLOO_SOCKET_IFNAME": "lo"},
        "slurm": {
            "partition_gpu": "gpu",
            "partition_cpu": "cpu",
            "mem_mb_per_gpu": 1500,
            "cpus": 2,
            "mem_mb": 1500,
        },
    }
    study["base"]["device"] = "auto"  # GPUs are asked for; torch finds none
    two_nodes = {"world_size": 4, "nnodes": 2}
    study["experiments"]["scaling"] = {"cases": {"two-nodes": two_nodes}}
    study["experiments"]["training"]["cases"]["pretrain"] |= two_nodes
    return study


@pytest.fixture(scope="session")
def slurm():
    """The daemons; ended after the tests unless they ran before."""
    before = shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0
    up = subprocess.run([UP], stderr=subprocess.PIPE, text=True, timeout=600)
    if up.returncode == UNAVAILABLE:
        pytest.skip(f"the cluster tests were not run: {up.stderr.strip().splitlines()[-1]}")
    assert up.returncode == 0, up.stderr
    yield
    if not before:
        subprocess.run([UP, "stop"], check=True, timeout=120)


@pytest.fixture(scope="session")
def project(slurm, tmp_path_factory) -> ClusterProject:
    """A project whose study has run whole. Tests that change it leave it whole."""
    project = ClusterProject(copy_project(tmp_path_factory.mktemp("cluster") / "project").folder)
    project.write_study(cluster_study())
    project.first_output = project.slurm("all")
    return project
