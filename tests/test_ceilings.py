"""Measured ceilings: a real few seconds on the CPU, and the arithmetic around them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from factories import make_model

from mfubench.ceilings import Ceilings, collectives, read_ceilings
from mfubench.ceilings.collectives import measure_collectives, measure_exchange, run_ranks, time_limit_s
from mfubench.ceilings.kernels import model_linears
from mfubench.ceilings.measure import describe, main
from mfubench.ceilings.schema import CollectiveRate
from mfubench.config import ConfigError
from mfubench.flops import count_parameters


def request(**changes: object) -> str:
    model = make_model("llama3-tiny", num_hidden_layers=2, vocab_size=512)
    values = {
        "models": [model.model_dump(mode="json")],
        "seq_len": 64,
        "micro_batch_size": 2,
        "dtypes": ["float32"],
        "seconds": 0.02,
        "world_sizes": [1],
        "device": "cpu",
    }
    return json.dumps(values | changes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Ceilings:
    output = tmp_path_factory.mktemp("ceilings") / "ceilings.json"
    assert main(["--request", request(), "--output", str(output)]) == 0
    return read_ceilings(output)


def test_a_cpu_is_measured_in_seconds(measured: Ceilings) -> None:
    assert measured.device == "cpu" and measured.threads == torch.get_num_threads()
    assert measured.measured_dtypes() == ["fp32"]
    assert measured.large_matmul_tflops("fp32") > 1e-4
    assert measured.large_matmul_tflops("bf16") is None
    assert measured.copy_rate.gb_s > 0.05
    assert measured.environment["torch"] == torch.__version__
    assert measured.telemetry["samples"] >= 0 and measured.collectives == []
    rates = [rate for rate in measured.matmuls if rate.model == "llama3-tiny"]
    assert len(rates) == 5 * 3, "forward and both backward products of five weights"
    for rate in rates:
        low, median, high = rate.tflops_quartiles
        assert 0 < low <= median <= high


def test_all_products_of_a_weight_cost_the_same_flops(measured: Ceilings) -> None:
    for name in ("qkv", "attention_output", "mlp_up", "mlp_down", "lm_head"):
        assert len({rate.flops for rate in measured.matmuls if rate.name == name}) == 1


def test_model_rate_is_weighted_by_time(measured: Ceilings) -> None:
    rates = [rate for rate in measured.matmuls if rate.model == "llama3-tiny"]
    slowest, fastest = min(rate.tflops for rate in rates), max(rate.tflops for rate in rates)
    assert slowest <= measured.model_matmul_tflops("llama3-tiny", "fp32") <= fastest
    assert measured.model_matmul_tflops("unknown", "fp32") is None
    assert measured.fastest_matmul_tflops("fp32") >= fastest


def test_attention_backends_of_a_cpu(measured: Ceilings) -> None:
    assert [rate.backend for rate in measured.attention] == ["sdpa", "eager"]
    assert all(rate.forward_tflops > 0 and rate.forward_backward_tflops > 0 for rate in measured.attention)


@pytest.mark.parametrize("preset", ["llama2-1.36b", "gpt2-1.36b", "llama3-8b", "qwen3-1.8b"])
def test_shapes_are_all_matmul_parameters(preset: str) -> None:
    model = make_model(preset)
    assert (
        sum(linear.k * linear.n * linear.calls for linear in model_linears(model, 1)) == count_parameters(model).matmul
    )


@pytest.mark.slow
def test_collectives_between_two_processes(tmp_path: Path) -> None:
    output = tmp_path / "ceilings.json"
    assert main(["--request", request(world_sizes=[1, 2]), "--output", str(output)]) == 0
    ceilings = read_ceilings(output)
    assert {rate.operation for rate in ceilings.collectives} == {"all_reduce", "reduce_scatter"}
    assert ceilings.collectives_skipped == {"exchange over 2": "it is made by the copy engines of GPUs"}
    assert "all_reduce over 2, 0.25 MiB of fp16: " in describe(ceilings)
    assert "exchange over 2: not measured: it is made by the copy engines of GPUs" in describe(ceilings)
    for rate in ceilings.collectives:
        assert rate.backend == "gloo" and rate.world_size == 2 and rate.dtype == "fp16"
        share = 1.0 if rate.operation == "all_reduce" else 0.5  # 2 (n-1)/n and (n-1)/n of two
        assert rate.bus_gb_s == pytest.approx(rate.bytes / rate.time_s / 1e9 * share)


@pytest.mark.slow
def test_an_exchange_between_two_processes() -> None:
    rates, problem = run_ranks(measure_exchange, 2, "cpu", 0.1)
    assert problem is None
    assert [(rate.operation, rate.bytes) for rate in rates] == [("exchange", 2**18), ("exchange", 2**22)]
    for rate in rates:
        assert rate.bus_gb_s == pytest.approx(rate.bytes / rate.time_s / 1e9) and rate.dtype == "fp32"


SOME_RATE = CollectiveRate(
    operation="all_reduce", backend="gloo", world_size=2, dtype="fp16", bytes=2**20, time_s=0.001, bus_gb_s=1.0
)


def stuck_at_the_end(process, seconds):
    if process.rank == 1:
        dist.destroy_process_group = lambda: time.sleep(600)
    return [SOME_RATE]


def failing_on_one_rank(process, seconds):
    """The other one waits as NCCL does: for ever."""
    if process.rank == 1:
        raise RuntimeError("the card fell off")
    time.sleep(600)


def killed_on_one_rank(process, seconds):
    if process.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def stuck(process, seconds):
    time.sleep(600)


@pytest.mark.slow
def test_a_result_counts_though_a_rank_hangs_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ENDING_S", 1.0)
    assert run_ranks(stuck_at_the_end, 2, "cpu", 0.1) == ([SOME_RATE], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "reason"),
    [
        (failing_on_one_rank, "rank 1: RuntimeError: the card fell off"),
        (killed_on_one_rank, "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_rank_to_fail_is_told_and_ends_the_others(measure, reason) -> None:
    started_s = time.monotonic()
    assert run_ranks(measure, 2, "cpu", 0.1) == ([], reason)
    assert time.monotonic() - started_s < collectives.TIMEOUT_S


@pytest.mark.slow
def test_ranks_that_do_not_end_are_ended_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "TIMEOUT_S", 1.0)
    assert run_ranks(stuck, 2, "cpu", 0.0) == ([], "not finished after 1 s")


def test_ranks_have_the_time_that_their_measurement_takes() -> None:
    """Two operations of each of four sizes, or of two, four rounds of a third of the seconds each."""
    assert time_limit_s("cuda", 0.0) == collectives.TIMEOUT_S
    assert time_limit_s("cuda", 30.0) == pytest.approx(collectives.TIMEOUT_S + 4 * 2 * 4 * 10)
    assert time_limit_s("cpu", 30.0) == pytest.approx(collectives.TIMEOUT_S + 2 * 2 * 4 * 10)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cards_are_measured_by_collectives_and_by_exchange_or_say_why_not() -> None:
    rates, skipped = measure_collectives([2], "cuda", 0.2)
    found = {rate.operation for rate in rates}
    assert found >= {"all_reduce", "reduce_scatter"}
    assert ("exchange" in found) != ("exchange over 2" in skipped)
    for rate in rates:
        print(rate.operation, rate.bytes, f"{rate.bus_gb_s:.0f} GB/s")


def test_bad_requests_are_told() -> None:
    with pytest.raises(ConfigError, match="int8"):
        main(["--request", request(dtypes=["int8"]), "--output", "unused.json"])
    with pytest.raises(ConfigError, match="there is no run to measure for"):
        main(["--request", request(dtypes=[], models=[]), "--output", "unused.json"])
    with pytest.raises(ConfigError, match="secnds: unknown key"):
        main(["--request", request(secnds=1), "--output", "unused.json"])
    with pytest.raises(ConfigError, match="--request: is no JSON"):
        main(["--request", "{bad", "--output", "unused.json"])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            main(["--request", request(device="cuda"), "--output", "unused.json"])


def test_bad_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_ceilings(tmp_path / "none.json")
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"old\.json"):
        read_ceilings(tmp_path / "old.json")
