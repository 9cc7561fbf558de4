"""The folder of compiled kernels: where it is, and what is said where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mfubench.cache import cache_root, writable_folder
from mfubench.cli import app
from mfubench.config import ConfigError


def test_the_cache_is_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MFUBENCH_CACHE", raising=False)
    assert cache_root() == tmp_path / ".cache" / "mfubench"
    monkeypatch.setenv("MFUBENCH_CACHE", "~/kernels")
    assert cache_root() == tmp_path / "kernels"
    monkeypatch.setenv("MFUBENCH_CACHE", "/scratch/kernels")
    assert cache_root() == Path("/scratch/kernels")


def test_a_folder_is_made_and_left_empty(tmp_path):
    assert list(writable_folder(tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.faults
def test_a_cache_that_cannot_be_written_to_names_the_variable(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MFUBENCH_CACHE", str(file))
    with pytest.raises(ConfigError, match=rf"file/inductor: cannot be written to .* set MFUBENCH_CACHE \(now {file}\)"):
        writable_folder(cache_root() / "inductor")
    monkeypatch.delenv("MFUBENCH_CACHE")
    monkeypatch.setenv("HOME", "/proc")  # where not even root may make a folder
    with pytest.raises(ConfigError, match=r"/proc/\.cache/mfubench: .* set MFUBENCH_CACHE \(now unset, which means ~"):
        writable_folder(cache_root())


@pytest.mark.faults
def test_a_cache_on_a_full_disk_names_the_variable(small_disk, monkeypatch):
    monkeypatch.setenv("MFUBENCH_CACHE", str(small_disk / "kernels"))
    assert writable_folder(cache_root()).is_dir()
    with open(small_disk / "somebody-elses", "wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while stream.write(bytes(65536)):
            pass
    with pytest.raises(ConfigError, match=r"No space left on device.*set MFUBENCH_CACHE"):
        writable_folder(cache_root())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no user numbers here")
def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    import pwd

    def no_such_user(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("MFUBENCH_CACHE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    with pytest.raises(ConfigError, match=r"~/.cache/mfubench: .*home.*; set MFUBENCH_CACHE"):
        cache_root()


def test_the_doctor_shows_the_cache_and_what_is_wrong_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("MFUBENCH_CACHE", str(tmp_path / "kernels"))
    assert f"{tmp_path / 'kernels'} (can be written to)" in CliRunner().invoke(app, ["doctor"]).output
    (tmp_path / "file").touch()
    monkeypatch.setenv("MFUBENCH_CACHE", str(tmp_path / "file"))
    found = CliRunner().invoke(app, ["doctor"])
    assert f"problem {tmp_path / 'file'}: cannot be written to" in found.output and found.exit_code == 1
