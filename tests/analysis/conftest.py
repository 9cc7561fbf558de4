"""The example studies, written once for all tests of the analysis; tests that change one take a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from analysis.example_study import write_cpu_study, write_gpu_study


@pytest.fixture(scope="session")
def gpu_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpu_study(tmp_path_factory.mktemp("results") / "llama2-1.36b-80gb")


@pytest.fixture(scope="session")
def cpu_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cpu_study(tmp_path_factory.mktemp("results") / "default")


@pytest.fixture
def changed_study(gpu_study: Path, tmp_path: Path) -> Path:
    """A copy of the GPU study, to be changed."""
    return Path(shutil.copytree(gpu_study, tmp_path / "study"))
