"""What counts as a checkpoint, and where kernels are kept."""

from __future__ import annotations

import os

import pytest
import torch

from mfubench.config import ConfigError
from mfubench.train.arguments import Paths
from mfubench.train.checkpoint_folders import complete, latest
from mfubench.train.launch import prepare_folders
from mfubench.train.process import Process
from mfubench.train.setup import keep_kernels


def test_only_folders_of_a_step_are_checkpoints(tmp_path):
    for name in ("step-2", "step-10", "step-2.backup", "step-x", ".writing-step-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-99").write_text("a file")
    assert [path.name for path in complete(tmp_path)] == ["step-2", "step-10"]
    assert latest(tmp_path) == tmp_path / "step-10" and latest(tmp_path / "none") is None


def test_a_folder_in_place_of_the_run_json_is_told_before_training(tmp_path):
    (tmp_path / "run.json").mkdir()
    paths = Paths(data=tmp_path, work=tmp_path / "work", output=tmp_path / "run.json")
    with pytest.raises(ConfigError, match=r"run\.json: is a folder"):
        prepare_folders(paths)


def test_kernels_are_kept_in_the_cache_of_the_project(tmp_path, monkeypatch):
    monkeypatch.setenv("MFUBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("QUACK_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "as it was")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    keep_kernels(Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu")))
    assert "TRITON_CACHE_DIR" not in os.environ
    keep_kernels(Process(rank=0, world_size=1, local_rank=0, device=torch.device("cuda")))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton") and (tmp_path / "triton").is_dir()
    assert os.environ["QUACK_CACHE_DIR"] == "elsewhere"
