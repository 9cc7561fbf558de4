"""The benchmark of own kernels: all of it, small, where the kernels run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_devices import DEVICES, run_interpreted

SMALL = ["--micro-batch-size", "1", "--seq-len", "8", "--repeats", "2"]
SMALL += ["--batch-seconds", "0.001", "--adamw-parameters", "3000"]
KERNELS = {"llama2-tiny": ("swiglu", "norm", "rope", "loss"), "gpt2-tiny": ("norm", "loss")}


def test_all_of_this_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", KERNELS)
def test_every_kernel_has_its_row(device: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import kernels

    arguments = [*SMALL, "--model", model, "--device", device, "--json", str(tmp_path / "rows.json")]
    assert kernels.main(arguments) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    passes = [(kernel, one) for kernel in KERNELS[model] for one in ("forward", "backward")]
    assert [(row["kernel"], row["pass"]) for row in rows] == [*passes, ("adamw", "update")]
    for row in rows:
        assert 0 < row["own_s"]["q1"] <= row["own_s"]["median"] <= row["own_s"]["q3"] and row["speedup"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import kernels

    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    assert kernels.main(SMALL) == 1
    assert "no CUDA device is here" in capsys.readouterr().err
