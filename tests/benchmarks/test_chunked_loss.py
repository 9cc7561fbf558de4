"""The benchmark of the chunked loss, small and on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import chunked_loss
from mfubench.presets import load_model

SMALL = ["--model", "llama2-tiny", "--device", "cpu", "--micro-batch-size", "2", "--seq-len", "16", "--calls", "3"]
ROWS_OF_8, ROWS_OF_16 = (rows * 4 * 4096 / 2**30 for rows in (8, 16))  # GiB of float32 logits of 4,096 ids


def test_every_form_is_timed_and_held_against_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--limits", str(ROWS_OF_8), str(ROWS_OF_16), "1", "2"]
    assert chunked_loss.main([*SMALL, *limits, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 4  # 1 and 2 GiB are one chunk alike
    assert all(0 < row["q1_s"] <= row["median_s"] <= row["q3_s"] and row["held_gib"] is None for row in rows)
    assert capsys.readouterr().out.count("\n| a") == 4


def test_chunks_are_of_the_size_that_was_asked_for() -> None:
    model = load_model("llama2-tiny")
    loss = chunked_loss.Loss(model, 32, torch.device("cpu"))
    assert model.vocab_size == 4096 and loss.size(int(ROWS_OF_8 * 2**30)) == 8


def test_a_form_with_other_gradients_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    added = chunked_loss.Loss.added
    monkeypatch.setattr(chunked_loss.Loss, "added", lambda self, limit: 1.1 * added(self, limit))
    assert chunked_loss.main(SMALL) == 1
    assert "gives other gradients than the first form" in capsys.readouterr().err
