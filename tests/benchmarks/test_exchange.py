"""The benchmark of exchanges, small and on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import exchange
from mfubench.presets import load_model
from mfubench.train.process import Process

SMALL = ["--model", "llama2-tiny", "--device", "cpu", "--micro-batch-size", "1", "--seq-len", "16", "--calls", "3"]


def test_every_form_is_timed_alone_and_beside_matmuls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exchange.main([*SMALL, "--json", str(tmp_path / "rows.json")]) == 0
    found = json.loads((tmp_path / "rows.json").read_text())
    forms = [row["form"] for row in found["rows"]]
    sums = ["all-reduce", "exchange", "exchange, each rank its part"]
    assert forms == [*sums, "all-gather of the weights", "matmuls alone", *(f"matmuls and {name}" for name in sums)]
    assert all(0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"] for row in found["rows"])
    assert (found["gpus"], found["calls"]) == (2, 3)
    assert capfd.readouterr().out.count("\n| matmuls and") == 3


def test_sums_of_many_calls_stay_finite(tmp_path: Path) -> None:
    """Two ranks double what they sum: in place, 140 times over would leave float32."""
    assert exchange.main([*SMALL[:-1], "40", "--json", str(tmp_path / "rows.json")]) == 0
    assert json.loads((tmp_path / "rows.json").read_text())["finite"]


def scale(sums: exchange.Sums, bucket: torch.Tensor) -> None:
    bucket.mul_(1.1)


def test_wrong_sums_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = {"init_method": f"file://{tmp_path}/meeting", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **where)
    try:
        process = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
        sums = exchange.Sums(load_model("llama2-tiny"), 16, process)
        sums.check()
        monkeypatch.setattr(exchange.Sums, "exchanged", scale)
        with pytest.raises(ArithmeticError, match="other sums than all-reduce"):
            sums.check()
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_measured_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert exchange.main([*SMALL, "--gpus", "1"]) == 1
    assert "--gpus: found 1" in capsys.readouterr().err
    assert exchange.main([*SMALL, "--json", "/nowhere/rows.json"]) == 1
    assert "--json: /nowhere is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        exchange.main([*SMALL, "--seq-len", "0"])
    assert "found 0; give a number of 1 and more" in capsys.readouterr().err
    assert exchange.main([*SMALL[2:], "--model", "llama2-huge"]) == 1
    assert "no model preset 'llama2-huge'" in capsys.readouterr().err
