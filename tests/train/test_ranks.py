"""What a rank is started with."""

import os

import pytest
from train.train_runs import run_arguments, tiny_config

from mfubench.config import ConfigError
from mfubench.train.launch import main
from mfubench.train.ranks import node_rank, threads_of_a_rank


@pytest.mark.parametrize(
    ("outside", "ranks", "threads"),
    [
        (None, 1, 8),
        (None, 2, 4),
        ("8", 2, 4),  # snakemake's: the rule's threads, which are those of all ranks
        ("1", 2, 1),  # the user's: fewer
        ("", 4, 2),
        (None, 16, 1),
    ],
)
def test_the_ranks_of_a_node_share_its_cores(outside, ranks, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
        if outside is not None:
            monkeypatch.setenv(name, outside)
    assert threads_of_a_rank(ranks) == {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_fewer_threads_for_one_library_are_fewer_for_both(name, monkeypatch):
    """torch takes MKL's number, a user mostly says OpenMP's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for other in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    assert threads_of_a_rank(2) == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", ["SLURM_NODEID", "GROUP_RANK"])
def test_a_node_has_a_place_where_a_run_has_several(name, monkeypatch):
    for other in ("SLURM_NODEID", "GROUP_RANK"):
        monkeypatch.delenv(other, raising=False)
    one, two = tiny_config(), tiny_config(world_size=2, nnodes=2)
    with pytest.raises(ConfigError, match="nnodes is 2: start the run once on each node"):
        node_rank(two)
    monkeypatch.setenv(name, "1")
    assert (node_rank(one), node_rank(two)) == (0, 1)
    for wrong in ("x", "2", "-1"):
        monkeypatch.setenv(name, wrong)
        assert node_rank(one) == 0
        with pytest.raises(ConfigError, match=f"{name} is '{wrong}': the nodes of a run with nnodes 2 are 0 to 1"):
            node_rank(two)


def test_a_place_that_is_none_is_told_before_anything_begins(data, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    monkeypatch.setenv("GROUP_RANK", "x")
    config = tiny_config(world_size=2, micro_batch_size=4, nnodes=2)
    assert main(run_arguments(config, data, tmp_path / "work")) == 1
    assert capsys.readouterr().err.startswith("error: GROUP_RANK is 'x': ") and not (tmp_path / "work").exists()
