"""The benchmark of matmuls: all of it on a CPU, with a stand-in for quack's kernels and for a card's energy counter."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_devices import needs_cuda

from benchmarks import matmuls, quack_kernels
from benchmarks.meter import Meter
from benchmarks.quack_kernels import DGATED, GATED, PLAIN, Quack
from mfubench.model.attention import eager
from mfubench.model.decoder import Decoder
from mfubench.model.loss import full_loss
from mfubench.model.weight_gradient import Linear
from mfubench.presets import load_model

ROOT = Path(__file__).parents[2]
SWIGLU = "gate_up forward, SwiGLU"
PASSES = ("forward", "input gradient", "weight gradient")
PARAMETERS = {  # of llama2-tiny's matmuls: hidden 128, intermediate 384, vocabulary 4096
    "qkv": 3 * 128 * 128,
    "output": 128 * 128,
    "gate_up": 2 * 384 * 128,
    "down": 384 * 128,
    "head": 4096 * 128,
}


class TorchQuack:
    """Of quack.gemm_interface what the benchmark calls, in torch: gate and up in turn, results to the tensors given."""

    def __init__(self) -> None:
        self.gemm_tuned = SimpleNamespace(fn=self.gemm)
        self.configs: list[Any] = []

    def gemm(self, A: Tensor, B: Tensor, out: Tensor, *, add_to_output: bool, config: Any) -> None:
        self.configs.append(config)
        out.copy_(A.float() @ B.float() + (out if add_to_output else 0))

    def gemm_gated(
        self,
        A: Tensor,
        B: Tensor,
        *,
        activation: str,
        preact_out: Tensor,
        postact_out: Tensor,
        tuned: bool,
        config: Any,
    ) -> tuple[Tensor, Tensor]:
        assert activation == "swiglu" and not tuned
        self.configs.append(config)
        result = A.float() @ B.float()
        preact_out.copy_(result)
        postact_out.copy_(F.silu(result[:, 0::2]) * result[:, 1::2])
        return preact_out, postact_out

    def gemm_dgated(
        self,
        A: Tensor,
        B: Tensor,
        PreAct: Tensor,
        *,
        activation: str,
        dx_out: Tensor,
        postact_out: Tensor,
        dynamic_scheduler: bool,
        tuned: bool,
        config: Any,
    ) -> tuple[Tensor, Tensor]:
        assert activation == "swiglu" and not tuned and dynamic_scheduler == (config is None)
        self.configs.append(config)
        gate, up, grad = PreAct[:, 0::2].float(), PreAct[:, 1::2].float(), A.float() @ B.float()
        sigmoid = gate.sigmoid()
        dx_out[:, 0::2] = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        dx_out[:, 1::2] = grad * gate * sigmoid
        postact_out.copy_(gate * sigmoid * up)
        return dx_out, postact_out


def rows_with(interface: TorchQuack, hopper: bool = True, only: str = "") -> dict[str, list[dict[str, Any]]]:
    """Case -> rows, of a tiny model beside a stand-in for quack."""
    quack = Quack(interface, dict, "0", hopper)
    meter = Meter(torch.device("cpu"), 0.0, 0.001)
    with torch.no_grad():
        cases = matmuls.all_cases(load_model("llama2-tiny"), 32, quack)
        return {case.name: list(matmuls.measure(case, meter, math.inf)) for case in cases if only in case.name}


def refuse(*arguments: Any, **named: Any) -> None:
    raise RuntimeError("no such\nkernel")


def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.matmuls", "--tiny", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["model"] == "llama2-tiny" and found["tokens"] == 32 and found["quack"] is None
    with_swiglu = {SWIGLU: "gate_up", "down input gradient, SwiGLU": "down"}
    layers = with_swiglu | {f"{layer} {one}": layer for layer in PARAMETERS for one in PASSES}
    assert list(dict.fromkeys(row["case"] for row in found["rows"])) == list(layers)
    for row in found["rows"]:
        assert row["tflops"] * row["ms"] * 1e9 == pytest.approx(2 * 32 * PARAMETERS[layers[row["case"]]])
        assert row["calls"] >= 1 and row["error"] < 0.01 and row["joules"] is None
    assert len(done.stdout.splitlines()) == 2 + len(found["rows"])


@pytest.mark.gpu
@needs_cuda
def test_swiglu_on_a_card(tmp_path: Path) -> None:
    sizes = ["--model", "llama2-tiny", "--micro-batch-size", "8", "--seq-len", "256"]
    loops = ["--preheat", "0.1", "--seconds", "0.5", "--only", "SwiGLU"]
    assert matmuls.main([*sizes, *loops, "--json", str(tmp_path / "rows.json")]) == 0
    rows = [row for row in json.loads((tmp_path / "rows.json").read_text())["rows"] if row["system"] == "cuBLAS"]
    assert rows and all(row["ms"] > 0 and row["error"] < 0.01 for row in rows)
    for row in rows:
        assert row["joules"] is None or row["joules"] == pytest.approx(row["watts"] * row["ms"] / 1e3)


@pytest.mark.parametrize("name", ["llama2-1.36b", "qwen3-tiny", "gpt2-tiny"])
def test_shapes_are_those_of_the_model(name: str) -> None:
    model = load_model(name)
    with torch.device("meta"):
        decoder = Decoder(model, 16, eager, full_loss)
    weights = {name.split(".")[-1]: m.weight.shape for name, m in decoder.named_modules() if isinstance(m, Linear)}
    weights["head"] = weights.pop("lm_head")
    layers = matmuls.linear_layers(model, 64)
    assert {layer: (M, K) for layer, (_, K, M) in layers.items()} == weights
    assert {N for N, _, _ in layers.values()} == {64}


def test_logits_are_padded_and_come_in_chunks() -> None:
    assert matmuls.linear_layers(load_model("gpt2-1.36b"), 32768)["head"] == (16384, 2304, 50304)


def test_a_model_without_swiglu_has_plain_matmuls_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert matmuls.main(["--tiny", "--model", "gpt2-tiny", "--only", "up "]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line[:31].strip() for line in lines] == [f"up {one}" for one in PASSES]


def test_every_variant_of_quack_is_held_against_the_first() -> None:
    interface = TorchQuack()
    for case, rows in rows_with(interface).items():
        choices = GATED if "forward, SwiGLU" in case else DGATED if "SwiGLU" in case else PLAIN
        assert [row["system"] for row in rows].count("quack") == 1 + len(choices)
        assert all("failed" not in row and row["error"] < 0.01 for row in rows), rows
        assert rows[0]["error"] == 0 and rows[0]["ms_ratio"] == 1
        assert rows[-1]["variant"] == f"{rows[0]['variant']}, again"
        assert rows[-2]["ms_ratio"] == pytest.approx(rows[-2]["ms"] / rows[0]["ms"])
    sizes = {"tile_m": 128, "tile_n": 192, "pingpong": True, "cluster_m": 1, "cluster_n": 2}
    assert None in interface.configs and sizes | {"is_dynamic_persistent": False} in interface.configs


def test_other_cards_than_hopper_have_quacks_own_choice_alone() -> None:
    interface = TorchQuack()
    assert all(
        sum(row["system"] == "quack" for row in rows) == 1 for rows in rows_with(interface, hopper=False).values()
    )
    assert set(interface.configs) == {None}


@pytest.mark.parametrize(
    ("function", "replacement", "case", "complaint"),
    [
        # it writes where it should add, in the one case that adds
        (
            "gemm",
            lambda A, B, out, **_: out.copy_(A.float() @ B.float()),
            "qkv weight gradient",
            "differs from torch's",
        ),
        ("gemm", lambda A, B, out, **_: out.fill_(math.nan), "qkv forward", "differs from torch's result by nan"),
        # nothing is written
        ("gemm", lambda *_, **__: None, "down forward", "differs from torch's result by nan"),
        ("gemm_gated", lambda *_, preact_out, postact_out, **__: (preact_out, postact_out), SWIGLU, "by nan"),
        ("gemm_gated", refuse, SWIGLU, "RuntimeError: no such kernel"),
    ],
)
def test_what_fails_is_a_row_and_the_others_go_on(
    function: str, replacement: Callable, case: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchQuack, function, staticmethod(replacement))
    rows = rows_with(TorchQuack(), hopper=False, only=case)[case]
    assert [complaint in row.get("failed", "") for row in rows] == [False, True, False]
    assert "ms" not in rows[1] and rows[2]["ms"] > 0


def test_without_quack_a_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    assert quack_kernels.load_quack() is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("without quack (") and "pip install --no-deps quack-kernels==" in line


def test_joules_are_the_slope_of_the_counter() -> None:
    """A card of 100 W whose counter advances every 5 ms."""
    meter = Meter(torch.device("cpu"), 0.04, 0.4)
    meter.nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: int(time.perf_counter() / 0.005) * 500,
        nvmlDeviceGetClockInfo=lambda *_: 1400,
    )
    row = meter.measure(lambda: time.sleep(0.002))
    assert row["watts"] == pytest.approx(100, rel=0.1) and row["sm_mhz"] == 1400
    assert row["joules"] == pytest.approx(row["watts"] * row["ms"] / 1e3) and row["ms"] >= 2


def test_a_counter_that_stands_still_gives_no_energy() -> None:
    meter = Meter(torch.device("cpu"), 0.0, 0.05)
    meter.nvml = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=lambda _: 5000)
    row = meter.measure(lambda: time.sleep(0.002))
    assert row["joules"] is row["watts"] is None and row["ms"] >= 2


def test_rows_are_kept_when_it_is_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([{"ms": 1.0, "joules": None}, {"ms": 2.0, "joules": None}])

    def measure(self: Meter, call: Callable[[], object]) -> dict[str, Any]:
        try:
            return next(measured) | dict.fromkeys(("watts", "sm_mhz"))
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(Meter, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        matmuls.main(["--tiny", "--only", "qkv", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["case"], row["ms"]) for row in rows] == [("qkv forward", 1.0), ("qkv input gradient", 2.0)]


def test_no_loop_begins_that_would_end_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    assert matmuls.main(["--tiny", "--seconds", "2", "--minutes", "0.06"]) == 75
    captured = capsys.readouterr()
    assert "the time was up in" in captured.err and len(captured.out.splitlines()) > 2


def test_a_call_too_short_for_one_loop_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert matmuls.main(["--tiny", "--seconds", "60", "--minutes", "0.5"]) == 1
    assert capsys.readouterr().err == "error: one loop takes about 60 s: raise --minutes\n"


def test_rows_that_failed_are_named_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmuls, "relative_error", lambda *_: 0.5)
    assert matmuls.main(["--tiny", "--only", "qkv forward"]) == 1
    assert capsys.readouterr().err == (
        "failed: qkv forward: torch, mm: ArithmeticError: differs from torch's result by 5.0e-01 of its norm\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tiny", "--model", "llama2-tny"], "--model: "),
        (["--tiny", "--only", "convolution"], "--only: found 'convolution'"),
        (["--tiny", "--micro-batch-size", "0"], "--micro-batch-size: found 0"),
        (["--tiny", "--seconds", "nan"], "--seconds: found nan"),
        (["--tiny", "--preheat", "-1"], "--preheat: found -1"),
        (["--tiny", "--minutes", "0"], "--minutes: found 0"),
        ([], "no CUDA device is here"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert matmuls.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {complaint}")
