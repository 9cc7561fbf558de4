"""Shared by all tests. Its place puts tests/ on the import path, so that `from factories import make_run_log` works."""

import os
import subprocess

import pytest
from hypothesis import settings

# The same examples each time: a test that passed here passes elsewhere. HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of two megabytes. Skips where none may be made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)
