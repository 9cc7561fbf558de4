"""Shared by all tests. Its place puts tests/ on the import path, so that `from factories import make_run_log` works."""

import os
import subprocess
import sys

import pytest
from hypothesis import settings

from mfubench import cli

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


@pytest.fixture
def full_disk(small_disk):
    """That disk without any room left; what takes it is called `somebody-elses`."""
    with open(small_disk / "somebody-elses", "wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while stream.write(bytes(65536)):
            pass
    return small_disk


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Call `mfubench` with some words, which must end with exit code 1: the last line of its errors."""

    def call(*words) -> str:
        monkeypatch.setattr(sys, "argv", ["mfubench", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        return capsys.readouterr().err.splitlines()[-1]

    return call
