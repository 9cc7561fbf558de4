"""What a rank is started with."""

import os

import pytest

from mfubench.train.ranks import threads_of_a_rank


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
