"""Fixtures of the engine's tests; what they are made of is in train_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.train_runs import write_dataset


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Compiled kernels of the tests stay out of the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MFUBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny")
