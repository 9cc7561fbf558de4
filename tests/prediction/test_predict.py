"""Prediction: terms against independent counts and first readings, calibration against runs with a known truth."""

from __future__ import annotations

import dataclasses
import json
import types

import numpy as np
import pytest
from factories import make_model, make_run_config, make_run_log
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mfubench.ceilings.schema import AttentionRate, Ceilings, CollectiveRate, CopyRate, MatmulRate
from mfubench.cli import app
from mfubench.config import ConfigError, MemorySearch
from mfubench.decisions import FSDP_KEPT_FRACTION, fsdp_keeps_weights
from mfubench.flops import flop_terms, flops_per_token
from mfubench.hardware import find_gpu
from mfubench.model.attention_kernels import PACKED
from mfubench.planner.design import PlanConfig
from mfubench.planner.search import build_model, shapes
from mfubench.prediction import measured_runs
from mfubench.prediction import pages as prediction_pages
from mfubench.prediction import predict as prediction_module
from mfubench.prediction.calibration import calibrate, fit_memory, shipped_calibration, uncalibrated
from mfubench.prediction.card_rates import TILES, card_rates, datasheet_rates, generation, tile_share
from mfubench.prediction.measured_runs import (
    REFERENCE,
    as_run,
    observe,
    observe_memory,
    read_all_ceilings,
    read_memory_searches,
    read_runs,
)
from mfubench.prediction.memory import (
    MemoryFit,
    estimate_memory,
    largest_micro_batch,
)
from mfubench.prediction.predict import check_predictions, format_checks, plan_run, predict, predict_fastest
from mfubench.prediction.resolved_settings import WRITES_ONE_GRADIENT
from mfubench.prediction.step_bytes import optimizer_bytes
from mfubench.prediction.step_model import (
    attention_seconds,
    lost_to_communication,
    micro_step_matmuls,
    slowest_of,
    step_terms,
)
from mfubench.presets import load_model
from mfubench.run_log import Choice, RankMemory, write_json, write_run_log

H100 = "NVIDIA H100 80GB HBM3"

FSDP_8B = {"model": make_model("llama3-8b"), "world_size": 8, "parallelism": "fsdp", "micro_batch_size": 2}

# First readings on one H100, tokens/s: preset, micro-batch, accumulation, attention. The first two are a prototype of
# this project's training step, the others torchtitan 0.2.2 and nanoGPT (flash attention of torch, compiled).
READINGS = [
    ("llama2-1.36b", 8, 4, "cudnn", 67_900),
    ("llama2-1.36b", 16, 4, "cudnn", 70_050),
    ("llama3-1.5b", 4, 8, "sdpa", 57_100),
    ("qwen3-1.8b", 4, 8, "sdpa", 48_300),
    ("llama3-2.2b", 2, 16, "sdpa", 33_000),
    ("gpt2-1.36b", 8, 4, "sdpa", 62_850),
]


@pytest.fixture(autouse=True)
def no_shipped_runs(monkeypatch, tmp_path_factory):
    """Tests of this file do not depend on which measured studies ship."""
    monkeypatch.setattr(measured_runs, "REFERENCE", tmp_path_factory.mktemp("results") / "reference")
    shipped_calibration.cache_clear()
    yield
    shipped_calibration.cache_clear()


def estimate(config, model=None, fit=None, capacity_gib=79.2):
    return estimate_memory(config, capacity_gib, model, fit or MemoryFit())


def run_on(gpu=H100, **overrides):
    return predict(make_run_config(**overrides), gpu)


# --- terms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["gpt2-1.36b", "llama2-1.36b", "llama3-1.5b", "qwen3-1.8b"])
def test_matmuls_are_those_of_the_flops_formula(preset):
    config = make_run_config(model=make_model(preset), micro_batch_size=2)
    counted = sum(one.count * one.flops for one in micro_step_matmuls(config))
    terms = flop_terms(config.model, config.seq_len)
    assert counted == 2 * 2048 * (flops_per_token(terms, "matmul") - terms.attention)


@pytest.mark.parametrize("weight_gradient", ["plain", "accumulate"])
def test_full_checkpointing_repeats_the_blocks_forward(weight_gradient: str):
    """All but a down projection of torch's own, before which it stops."""
    kernels = {"weight_gradient": weight_gradient}
    plain, again = (
        sum(
            one.count * one.flops
            for one in micro_step_matmuls(make_run_config(activation_checkpointing=mode, kernels=kernels))
        )
        for mode in ("none", "full")
    )
    model = make_model()
    blocks = flop_terms(model, 2048).attention_mlp_parameters
    down = model.num_hidden_layers * model.intermediate_size * model.hidden_size if weight_gradient == "plain" else 0
    assert again - plain == 8 * 2048 * 2 * (blocks - down)


@pytest.mark.parametrize("preset, micro_batch, accumulation, attention, tokens_per_s", READINGS)
def test_uncalibrated_prediction_covers_the_first_readings(preset, micro_batch, accumulation, attention, tokens_per_s):
    prediction = run_on(
        model=make_model(preset),
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        attention=attention,
    )
    assert prediction.tokens_per_s == pytest.approx(tokens_per_s, rel=0.10)
    assert abs(prediction.tokens_per_s / tokens_per_s - 1) < prediction.error_fraction < 0.2


def test_terms_where_a_profile_saw_them():
    """llama2-1.36b, 65,536 tokens, one H100: matmuls 690 ms, attention 109, elementwise 110, optimizer and sums 36."""
    terms = run_on(attention="cudnn", loss="full").terms_s
    for term, seconds in (("matmul", 0.690), ("attention.cudnn", 0.109), ("elementwise", 0.110), ("optimizer", 0.036)):
        assert terms[term] == pytest.approx(seconds, rel=0.1)


def test_terms_sum_to_the_step_and_mfu_follows():
    prediction = run_on(world_size=4, parallelism="ddp")
    assert sum(prediction.terms_s.values()) == pytest.approx(prediction.step_time_s)
    assert prediction.tokens_per_s == pytest.approx(4 * prediction.tokens_per_s_per_gpu)
    assert prediction.mfu["palm"] == pytest.approx(prediction.tokens_per_s_per_gpu * 8.784175104e9 / 989.4e12)
    assert prediction.mfu["palm"] > prediction.mfu["matmul"] > prediction.mfu["causal"]


def rate(**overrides) -> float:
    return run_on(**overrides).tokens_per_s_per_gpu


def test_what_must_be_slower_is_slower():
    base = rate()
    assert rate(micro_batch_size=1) < base < rate(micro_batch_size=16)
    assert rate(compile="none") < base
    assert rate(attention="eager") < rate(attention="sdpa") < base
    assert rate(activation_checkpointing="full") < rate(activation_checkpointing="selective") < base
    assert rate(dtype="float32", attention="fa3") == rate(dtype="float32", attention="sdpa") < base / 1.5
    assert rate(dtype="float32", tf32=False) < rate(dtype="float32")
    assert rate(attention="sdpa") < rate(attention="sdpa", fp8=True)
    tiny = {"model": make_model("llama2-tiny"), "seq_len": 256, "compile": "none", "micro_batch_size": 1}
    assert rate(**tiny) < rate(**tiny, cuda_graphs=True) / 2  # the CPU launches slower than the GPU computes


@pytest.mark.parametrize("parallelism", ["ddp", "zero1", "fsdp"])
def test_communication_costs_less_when_accumulated_and_more_over_a_network(parallelism):
    def loss_of_rate(accumulation: int, **more) -> float:
        one = rate(gradient_accumulation_steps=accumulation)
        many = rate(gradient_accumulation_steps=accumulation, world_size=8, parallelism=parallelism, **more)
        return 1 - many / one

    if parallelism == "ddp":
        assert 0 < loss_of_rate(16) < loss_of_rate(1) < 0.1
    assert loss_of_rate(1, nnodes=8) > loss_of_rate(1, nnodes=2) > loss_of_rate(1)


@pytest.mark.parametrize("parallelism", ["ddp", "zero1", "fsdp"])
def test_gradients_reduced_in_bfloat16_take_less_of_the_network(parallelism):
    config = {"world_size": 16, "nnodes": 2, "parallelism": parallelism, "gradient_accumulation_steps": 1}
    whole, rounded = (
        run_on(communication={"reduce_dtype": dtype}, **config).terms_s["communication"]
        for dtype in ("float32", "bfloat16")
    )
    assert 0.4 * whole < rounded < 0.9 * whole


@pytest.mark.parametrize("parallelism", ["ddp", "zero1"])
def test_an_exchange_takes_less_from_the_backward_pass_and_memory_for_its_buckets(parallelism):
    def on(gpu, reduction):
        communication = {"reduction": reduction}
        return run_on(gpu, world_size=8, parallelism=parallelism, communication=communication)

    collective, exchange, auto = (on(H100, reduction) for reduction in ("collective", "exchange", "auto"))
    lost, kept = (one.terms_s["communication"] for one in (collective, exchange))
    assert 0.3 * lost < kept < 0.8 * lost
    embedding = auto.config.model.vocab_size * auto.config.model.hidden_size
    assert exchange.memory.gradients - collective.memory.gradients == pytest.approx(2 * 4 * embedding / 2**30)
    assert auto.terms_s == exchange.terms_s and auto.config.communication.reduction == "exchange"
    over_pcie = on("NVIDIA A10", "auto")
    assert over_pcie.config.communication.reduction == "collective"
    for reduction in ("auto", "exchange"):
        several = run_on(world_size=16, nnodes=2, parallelism=parallelism, communication={"reduction": reduction})
        assert several.config.communication.reduction == "collective"


def test_fsdp_is_predicted_by_exchange_where_it_was_asked_for_and_has_whole_gradients():
    asked = {"world_size": 4, "parallelism": "fsdp", "communication": {"reduction": "exchange"}}
    accumulate = {"kernels": {"weight_gradient": "accumulate"}}
    collective = {"communication": {"reduction": "collective"}}
    resharded = {"communication": {"reduction": "exchange", "reshard_after_forward": "always"}}
    exchange = run_on(**asked, **accumulate)
    assert exchange.config.communication.reduction == "exchange"
    assert exchange.terms_s["communication"] < run_on(**asked | collective, **accumulate).terms_s["communication"]
    for change in ({}, accumulate | resharded):
        assert run_on(**asked | change).config.communication.reduction == "collective"
    assert run_on(**asked | accumulate | {"communication": {}}).config.communication.reduction == "collective"


def test_slower_links_cost_more():
    nvlink, pcie = (
        run_on(gpu, world_size=4, parallelism="fsdp", gradient_accumulation_steps=1, micro_batch_size=2)
        for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA A10")
    )
    share = [one.terms_s["communication"] / one.step_time_s for one in (nvlink, pcie)]
    assert share[0] < share[1]


def test_the_slowest_of_more_cards_is_slower():
    # expected maximum of 2 and 8 standard normals: 0.564 and 1.424
    assert slowest_of(1, 0.01) == 0
    assert slowest_of(2, 0.01) == pytest.approx(0.00564, rel=0.05)
    assert slowest_of(8, 0.01) == pytest.approx(0.01424, rel=0.05)


@given(rows=st.integers(1, 20_000), inner=st.integers(1, 20_000), columns=st.integers(1, 200_000))
def test_tile_share_is_a_share(rows, inner, columns):
    assert 0 < tile_share(rows, inner, columns, 132) <= 1
    assert tile_share(rows, inner, columns, None) == 1


def test_whole_waves_fill_the_card():
    rows, columns, _ = TILES[0]
    assert tile_share(rows * 132, 2048, columns, 132) == 1
    assert tile_share(rows * 133, 2048, columns, 132) < 0.95  # one tile too many: a second wave, or smaller tiles


# --- ceilings --------------------------------------------------------------------------------------------------------


def make_ceilings(device_name=H100, matmul_tflops=800.0, operand_gb_s=2500.0, **overrides) -> Ceilings:
    """A card whose matmuls obey the model exactly."""
    matmuls = []
    for m, k, n in ((16384, 2304, 6912), (16384, 2304, 2304), (16384, 2304, 12288), (8192, 8192, 8192)):
        flops, moved = 2.0 * m * k * n, 2 * (m * k + k * n + m * n)
        seconds = flops / (matmul_tflops * 1e12 * tile_share(m, k, n, 132)) + moved / (operand_gb_s * 1e9)
        shape = {"name": "qkv", "product": "forward", "arithmetic": "bf16", "m": m, "k": k, "n": n}
        measured = flops / seconds / 1e12
        quartiles = (measured, measured, measured)
        matmuls.append(
            MatmulRate(model="m", calls_per_step=1, tflops=measured, tflops_quartiles=quartiles, seconds=2.0, **shape)
        )
    fields = {
        "measured_at": "2026-03-02T09:00:00+00:00",
        "total_s": 60.0,
        "host": "node-1",
        "device": "cuda",
        "device_name": device_name,
        "threads": 8,
        "environment": {},
        "seconds": 2.0,
        "matmuls": matmuls,
        "copy_rate": CopyRate(bytes=2**30, gb_s=2960.0),
    }
    return Ceilings(**(fields | overrides))


def test_ceilings_replace_the_datasheet():
    config = make_run_config(world_size=4, parallelism="ddp")
    attention = AttentionRate(
        model="m", backend="cudnn", dtype="bfloat16", batch_size=8, seq_len=4096, query_heads=18, key_value_heads=18,
        head_dim=128, forward_tflops=450.0, forward_backward_tflops=400.0,
    )  # fmt: skip
    collectives = [
        CollectiveRate(
            operation="all_reduce", backend="nccl", world_size=ranks, dtype="bf16", bytes=size, time_s=0.1, bus_gb_s=bus
        )
        for ranks, size, bus in ((2, 2**30, 300.0), (4, 2**20, 20.0), (4, 2**30, 340.0))
    ]
    rates = card_rates(H100, config, [make_ceilings(attention=[attention], collectives=collectives)])
    assert rates.matmul_tflops == pytest.approx(800) and rates.operand_gb_s == pytest.approx(2500)
    assert rates.bandwidth_gb_s == 2960
    assert rates.link_gb_s == 340  # the largest message of four ranks
    assert rates.attention["cudnn"] == pytest.approx(400 * (1 + 600 / 4096) / (1 + 600 / 2048))
    assert rates.attention["sdpa"] == datasheet_rates(H100, config).attention["sdpa"]  # not measured
    assert set(rates.measured) == {"attention", "bandwidth_gb_s", "link_gb_s", "matmul_tflops", "operand_gb_s"}


def test_ceilings_of_another_card_change_nothing():
    config = make_run_config()
    assert card_rates("B200", config, [make_ceilings()]) == datasheet_rates("B200", config)


# --- calibration -----------------------------------------------------------------------------------------------------

TRUTH = {"matmul": 1.15, "attention.cudnn": 0.8, "elementwise": 1.3, "optimizer": 1.2, "communication": 2.0}


def measured_run(noise=0.0, seed=0, **overrides):
    """A run log whose step takes what the model says, times TRUTH."""
    config = make_run_config(**{"loss": "full", **overrides})
    terms = step_terms(config, datasheet_rates(H100, config))
    step_s = sum(TRUTH.get(term, 1.0) * seconds for term, seconds in terms.items())
    step_s *= 1 + noise * np.random.default_rng(seed).standard_normal()
    expected = estimate(config)
    reserved = expected.allocated_gib + 0.2 * expected.activations + 2.5
    memory = [RankMemory(rank=rank, peak_reserved_gib=reserved, peak_rss_gib=3.0) for rank in range(config.world_size)]
    return make_run_log(step_time_s=step_s, config=config, name=config.name, memory=memory)


def study(noise=0.0) -> list:
    """Two models, several batch sizes, 1, 2 and 4 GPUs."""
    logs = []
    for preset in ("llama2-1.36b", "llama3-1.5b"):
        for gpus in (1, 2, 4):
            for micro_batch, accumulation in ((2, 4), (8, 1), (8, 4), (16, 2)):
                logs.append(
                    measured_run(
                        noise,
                        seed=len(logs),
                        name=f"scaling/{preset}-{gpus}-{micro_batch}-{accumulation}",
                        model=make_model(preset),
                        world_size=gpus,
                        parallelism="none" if gpus == 1 else "ddp",
                        micro_batch_size=micro_batch,
                        gradient_accumulation_steps=accumulation,
                        communication={"reduction": "exchange"},
                    )
                )
    return logs


def test_calibration_finds_the_truth_and_says_how_sure():
    calibration = calibrate(observe(study()))
    assert calibration.left_out_runs < 0.01 and calibration.left_out_models < 0.02
    unseen = measured_run(model=make_model("qwen3-1.8b"), micro_batch_size=6, world_size=4, parallelism="ddp")
    prediction = predict(unseen.config, H100, calibration=calibration)
    truth = unseen.measured_steps()[0].step_time_s
    assert prediction.step_time_s == pytest.approx(truth, rel=0.02)
    assert prediction.error_fraction < 0.06
    assert prediction.calibrated and "24 runs on h100-sxm" in prediction.basis
    assert "datasheet" in prediction.basis


def test_one_model_at_one_gpu_predicts_the_rest_within_five_percent():
    observations = observe(study(noise=0.005))
    checks = check_predictions(observations, fit_model="llama2-1.36b", fit_gpus=1)
    assert sum(check.fitted for check in checks) == 4
    assert max(abs(check.error_fraction) for check in checks) < 0.05
    table = format_checks(checks, check_predictions(observations))
    assert table.count("\n") == 2 + len(checks) and "llama3-1.5b" in table


def test_error_bars_cover_what_was_not_seen():
    """Each noisy run left out: nearly all lie inside the bar of the fit to the others."""
    observations = observe(study(noise=0.02))
    inside = 0
    for position, one in enumerate(observations):
        rest = calibrate([*observations[:position], *observations[position + 1 :]])
        error = rest.step_seconds(one.terms) / one.step_s - 1
        inside += abs(error) <= rest.error_fraction(one.terms, one.gpu, one.config)
    assert inside >= 0.9 * len(observations)


def test_the_error_bar_is_wider_for_what_no_run_was():
    observations = [one for one in observe(study()) if one.config.world_size == 1]
    calibration = calibrate(observations)
    one = observations[0]
    unlike = one.config.model_copy(update={"world_size": 16, "nnodes": 2, "parallelism": "fsdp"})
    assert calibration.unseen(one.config) == []
    assert calibration.unseen(unlike) == ["several cards", "fsdp", "several nodes"]
    narrow, wide = (calibration.error_fraction(one.terms, one.gpu, config) for config in (one.config, unlike))
    assert wide > 1.96 * 0.03 * 3**0.5 > 0 and wide > narrow


def test_leave_one_out_does_not_know_the_run_it_predicts():
    """A run that is 30 % off stays 25 % off when it is left out, whatever the others say."""
    logs = study()
    odd = logs[0].model_copy(
        update={"steps": [step.model_copy(update={"step_time_s": 1.3 * step.step_time_s}) for step in logs[0].steps]}
    )
    checks = check_predictions(observe([odd, *logs[1:]]))
    assert checks[0].error_fraction > 0.25
    assert not any(check.fitted for check in checks)


def test_a_term_that_no_run_has_stays_at_its_prior():
    calibration = calibrate(observe([measured_run()]))
    assert calibration.factor("attention.sdpa") == uncalibrated().factor("attention.sdpa") == 1.0
    assert (
        calibration.left_out_runs is None
        and "not known from one run" in predict(make_run_config(), H100, calibration=calibration).basis
    )


def test_another_card_widens_the_bar():
    calibration = calibrate(observe(study()))
    config = make_run_config(loss="full")
    here, there = predict(config, H100, calibration=calibration), predict(config, "B200", calibration=calibration)
    assert here.error_fraction < there.error_fraction < predict(config, "B200").error_fraction + 0.05
    assert "b200 is another card" in there.basis


def test_uncalibrated_says_so():
    prediction = run_on("B200")
    assert not prediction.calibrated and prediction.basis.startswith("UNCALIBRATED")
    assert 0.1 < prediction.error_fraction < 0.3


def test_runs_are_taken_as_they_ran():
    log = measured_run(attention="cudnn", compile="model", loss="auto")
    log.used["attention"] = Choice(requested="cudnn", used="sdpa", reason="no cuDNN here")
    log.used["loss"] = Choice(requested="auto", used="chunked")
    config = as_run(log)
    assert (config.attention, config.loss, config.compile) == ("sdpa", "chunked", "model")
    assert "attention.sdpa" in observe([log])[0].terms


def test_only_gpu_runs_that_measured_something_count():
    logs = [
        make_run_log(device="cpu"),
        make_run_log(status="oom", reason="out of memory", steps=[]),
        measured_run(),
    ]
    assert [one.name for one in observe(logs)] == [logs[2].name]
    assert calibrate(observe(logs[:2])).runs == ()


def test_memory_is_calibrated_on_peaks():
    logs = study()
    fit = calibrate(observe(logs), observe_memory(logs)).memory
    assert fit.activation_factor == pytest.approx(1.2, abs=0.02)
    assert fit.reserve_gib == pytest.approx(2.5, abs=0.3)
    assert fit.error_fraction == 0.02 and "24 runs" in fit.source


def test_limits_are_of_tensors_where_they_are_known():
    """Fragments count towards what is reserved; before it fails, the allocator gives them back."""
    peaks = observe_memory(study())
    reserved_alone = [dataclasses.replace(one, peak_allocated_gib=None) for one in peaks]
    counted = [estimate_memory(one.config, one.capacity_gib).allocated_gib for one in peaks]
    tensors = [
        dataclasses.replace(one, peak_allocated_gib=size + 0.3) for one, size in zip(peaks, counted, strict=True)
    ]
    by_tensors, by_reserved = fit_memory(tensors), fit_memory(reserved_alone)
    assert by_tensors.activation_factor == by_reserved.activation_factor == by_reserved.tensor_activation_factor
    assert by_tensors.tensor_activation_factor == pytest.approx(1.0, abs=0.01)
    assert by_tensors.workspace_gib == pytest.approx(0.3, abs=0.1)
    config = make_run_config()
    assert largest_micro_batch(config, 79.2, by_tensors) > largest_micro_batch(config, 79.2, by_reserved)


def test_reading_runs(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "machine.json").write_text('{"cards": []}')
    with pytest.raises(ConfigError, match="no run JSON"):
        read_runs([tmp_path])
    write_run_log(tmp_path / "runs" / "tiers" / "tier1.json", measured_run())
    assert len(read_runs([tmp_path])) == 1


def test_checkpoints_of_a_study_are_no_runs(tmp_path):
    """A checkpoint's history has steps as a run JSON has, and lies in the work folder."""
    study = tmp_path / "results" / "study"
    log = measured_run()
    write_run_log(study / "runs" / "tiers" / "tier1.json", log)
    for folder in (study / "work" / "tiers" / "tier1" / "checkpoints" / "step-000010", tmp_path / "flat"):
        folder.mkdir(parents=True)
        history = {"steps": [], "rank_step_times_s": [], "resumes": []}
        (folder / "history.json").write_text(json.dumps(history))
    write_run_log(tmp_path / "flat" / "case.json", log)
    assert len(read_runs([study])) == len(read_runs([tmp_path / "flat"])) == 1
    assert len(read_runs([tmp_path])) == 2


def write_search(path, capacity_gib: float) -> MemorySearch:
    """What a memory search leaves, on a card whose activations need a fifth more than counted."""
    run = make_run_config(name="memory/limit", loss="auto")
    search = MemorySearch(run=run, candidates=(2, 4, 8))
    full = run.model_copy(update={"loss": "full"})
    fit = MemoryFit(1.2, 2.5, tensor_activation_factor=1.2, workspace_gib=2.5)
    trials = []
    for size in (2, 4, 8):
        expected = estimate(full.model_copy(update={"micro_batch_size": size}), fit=fit)
        peak = expected.allocated_gib + expected.reserve
        trials.append({"micro_batch_size": size, "status": "ok", "peak_memory_gib": peak})
    largest = largest_micro_batch(full, capacity_gib, fit)
    trials.append({"micro_batch_size": largest + 1, "status": "oom", "peak_memory_gib": None})
    summary = {"name": run.name, "search": json.loads(search.to_json()), "memory_gib": capacity_gib, "trials": trials}
    write_json(path, summary | {"largest": largest, "largest_is_exact": True, "largest_comfortable": 8})
    return search


def test_memory_searches_are_read(tmp_path):
    write_search(tmp_path / "memory" / "limit.json", 79.2)
    peaks, limits = read_memory_searches([tmp_path])
    assert len(peaks) == 3 and peaks[0].config.loss == "full"
    (limit,) = limits
    fit = calibrate(observe([measured_run()]), peaks).memory
    assert largest_micro_batch(limit.config, limit.capacity_gib, fit) == limit.largest_micro_batch_size


def test_shipped_studies_calibrate_by_themselves(tmp_path):
    assert shipped_calibration() == uncalibrated()
    shipped_calibration.cache_clear()
    for position, log in enumerate(study()):
        write_run_log(measured_runs.REFERENCE / "h100" / "llama2" / f"{position}.json", log)
    write_search(measured_runs.REFERENCE / "h100" / "llama2" / "limit.json", 79.2)
    assert len(shipped_calibration().runs) == 24
    assert "Calibrated on 24 runs" in run_command("llama2-1.36b", "--gpu", "H100 SXM")
    assert "UNCALIBRATED" in run_command("llama2-1.36b", "--gpu", "H100 SXM", "--uncalibrated")
    assert "20 of 20 runs" in prediction_pages.measured_table()
    assert "memory/limit" in prediction_pages.limit_table()


def test_pages_say_where_nothing_was_measured():
    assert "uncalibrated" in prediction_pages.measured_table()
    assert "No measured memory limit" in prediction_pages.limit_table()
    assert prediction_pages.eight_table() == "No measured study ships yet."


def test_what_several_cards_measured_stands_beside_what_eight_will_do():
    for gpus, step_time_s in ((1, 1.0), (2, 1.25), (4, 1.5)):
        parallelism = "none" if gpus == 1 else "ddp"
        settings = {"world_size": gpus, "parallelism": parallelism, "kernels": {"norm": "fused"}}
        config = make_run_config(name=f"scaling/{gpus}", **settings)
        log = make_run_log(gpu_name="NVIDIA H200", step_time_s=step_time_s, config=config)
        log.used["norm"] = Choice(requested="fused", used="fused")
        write_run_log(measured_runs.REFERENCE / "h200" / f"{gpus}.json", log)
    row = prediction_pages.eight_table().splitlines()[-1].split(" | ")
    tokens = config.tokens_per_step / 4
    measured = [float(cell.replace(",", "")) for cell in row[4:7]]
    assert measured == pytest.approx([tokens / seconds for seconds in (1.0, 1.25, 1.5)], rel=0.01)
    assert row[2] == "ddp" and "±" in row[7]


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset, micro_batch, gib", [("llama3-1.5b", 4, 40), ("qwen3-1.8b", 4, 51), ("llama3-2.2b", 2, 49)]
)
def test_memory_covers_the_first_readings(preset, micro_batch, gib):
    """Of torchtitan 0.2.2 on one H100: float32 masters, bf16 compute, all logits, compiled blocks.

    Its loss is compiled without the head's matmul: logits are handed in, so that their gradient cannot replace them.
    """
    config = make_run_config(model=make_model(preset), micro_batch_size=micro_batch, loss="full", compile="block")
    logits_gib = 2 * micro_batch * 2048 * config.model.vocab_size / 2**30
    assert estimate(config).allocated_gib + logits_gib == pytest.approx(gib, rel=0.06)


def test_states_are_eighteen_bytes_a_parameter_and_sharded():
    parameters = 1_294_159_104
    alone = estimate(make_run_config())
    states = (alone.weights, alone.masters, alone.moments, alone.gradients)
    assert [round(one * 2**30 / parameters) for one in states] == [2, 4, 8, 4]
    whole = estimate(make_run_config(dtype="float32"))
    assert (whole.weights, whole.masters) == pytest.approx((4 * parameters / 2**30, 0))
    zero1 = estimate(make_run_config(world_size=4, parallelism="zero1"))
    assert zero1.masters == pytest.approx(alone.masters / 4) and zero1.moments == pytest.approx(alone.moments / 4)
    assert (zero1.weights, zero1.gradients) == (alone.weights, alone.gradients)
    sharded = make_run_config(world_size=4, parallelism="fsdp")
    one_micro_step = sharded.model_copy(update={"gradient_accumulation_steps": 1})
    assert estimate(one_micro_step).gradients == 0  # none is kept whole, and its shards come as activations go
    kept, resharded = estimate(sharded), estimate(sharded, capacity_gib=16.0)
    assert kept.weights == pytest.approx(1.25 * zero1.weights)  # the rounded shards, which are gathered
    assert kept.gradients == pytest.approx(zero1.gradients)
    assert resharded.gradients < zero1.gradients and resharded.weights < zero1.weights
    assert kept.masters == resharded.masters == zero1.masters


def test_fsdp_holds_whole_gradients_where_matmuls_make_them():
    kernels = {"weight_gradient": "accumulate"}
    config = make_run_config(world_size=4, parallelism="fsdp", kernels=kernels)
    one = config.model_copy(update={"gradient_accumulation_steps": 1})
    parameters, vocabulary = 1_294_159_104, 32_000 * config.model.hidden_size
    gib = 2**30
    assert estimate(config).gradients == pytest.approx(4 * parameters / gib)
    assert estimate(one).gradients == pytest.approx(4 * (parameters - vocabulary) / gib)  # a lookup's gradient is short
    held = estimate(one).weights - estimate(config).weights  # the head, gathered last, until something else is gathered
    assert held == pytest.approx(2 * vocabulary / gib)
    whole = make_run_config(world_size=4, parallelism="fsdp", kernels=kernels, dtype="float32")
    assert estimate(whole).weights == pytest.approx(4 * parameters / gib)  # gathered from the masters


def test_shards_of_gradients_are_counted_where_activations_leave_too_little_room():
    """At the end of a backward pass all of them are there, beside masters, moments and rounded shards."""
    small = {
        "micro_batch_size": 1,
        "seq_len": 256,
        "activation_checkpointing": "full",
        "gradient_accumulation_steps": 1,
    }
    config = make_run_config(
        model=make_model("llama3-8b"),
        world_size=2,
        parallelism="fsdp",
        communication={"reshard_after_forward": "always"},
        **small,
    )
    shard_gib = 8_030_261_248 / 2 / 2**30
    assert 18 * shard_gib < estimate(config).allocated_gib < 19.5 * shard_gib
    roomy = config.model_copy(update={"micro_batch_size": 256})
    found = estimate(roomy)
    assert found.allocated_gib - found.activations - found.logits < 15.5 * shard_gib


def test_copies_of_shards_are_counted():
    """Groups of two on two nodes: weights gathered in each micro-step stay on their node, gradients cross once."""
    parameters, gib, rates = 1_294_159_104, 2**30, datasheet_rates(H100, make_run_config())
    lost = {}
    for ranks in (None, 4, 2, 1):
        communication = {"shard_ranks": ranks, "reshard_after_forward": "always"}
        options = {"world_size": 4, "nnodes": 2, "parallelism": "fsdp", "gradient_accumulation_steps": 8}
        config = make_run_config(communication=communication, **options)
        owners = ranks or 4
        alike = config.model_copy(update={"world_size": owners})
        lost[ranks], found = lost_to_communication(config, rates, 0.05, 0.1), estimate(config)
        assert found.masters + found.moments == pytest.approx(12 * parameters / owners / gib)
        assert optimizer_bytes(config) == pytest.approx(optimizer_bytes(alike))
    assert lost[None] == lost[4] > 1.9 * lost[2]


def test_one_gpu_shards_nothing():
    found = {name: run_on(H100, parallelism=name) for name in ("none", "ddp", "zero1", "fsdp")}
    assert {(one.step_time_s, one.memory.total_gib) for one in found.values()} == {
        (found["none"].step_time_s, found["none"].memory.total_gib)
    }


def test_fsdp_keeps_weights_when_the_trainer_does(monkeypatch):
    assert FSDP_KEPT_FRACTION == 0.4
    trainer, torch = pytest.importorskip("mfubench.train.fsdp"), pytest.importorskip("torch")
    card, dtype = torch.device("cuda", 0), torch.bfloat16
    config = make_run_config(model=make_model("llama3-8b"), world_size=8, parallelism="fsdp")
    assert not fsdp_keeps_weights(config, 8_030_261_248, 79.2) and fsdp_keeps_weights(config, 8_030_261_248, 178.0)
    for gib, kept in ((79.2, False), (178.0, True)):
        properties = types.SimpleNamespace(total_memory=int(gib * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert trainer.keeps_weights(config, dtype, card) is kept
    assert trainer.keeps_weights(config, dtype, torch.device("cpu"))
    small, large = run_on(H100, **FSDP_8B), run_on("B200", **FSDP_8B)
    lost = [one.terms_s["communication"] / one.step_time_s for one in (small, large)]
    assert lost[0] > 3 * lost[1]  # every micro-step against once


def test_a_vocabulary_of_odd_size_costs_a_padded_copy_of_the_head():
    model = make_model("gpt2-1.36b")
    odd, even = (
        estimate(make_run_config(model=model.model_copy(update={"vocab_size": rows}), compile="block", loss="full"))
        for rows in (50_257, 50_304)
    )
    copy = 2 * 50_304 * model.hidden_size / 2**30
    assert odd.logits == pytest.approx(even.logits * 50_257 / 50_304 + copy)


def test_what_saves_memory_saves_memory():
    def total(**overrides) -> float:
        return estimate(make_run_config(**overrides)).total_gib

    assert total(activation_checkpointing="full") < total(activation_checkpointing="selective") < total()
    assert total(compile="model") < total(compile="none") < total(compile="none", attention="eager")
    qwen = {"model": make_model("qwen3-1.8b"), "micro_batch_size": 8}
    assert total(**qwen, loss="chunked") < total(**qwen, loss="full")


def test_memory_counts_grids_as_it_counts_models():
    plan = PlanConfig(compute=1e21, vocab_size=128_256)
    grid = shapes(plan, 2048)
    for overrides in ({"parallelism": "fsdp", "world_size": 8}, {"compile": "none", "loss": "full"}):
        config = make_run_config(**overrides)
        totals = estimate(config, grid).total_gib
        for row in (0, 17, totals.size - 1):
            assert totals[row] == pytest.approx(estimate(config, build_model(grid, row)).total_gib)


@settings(max_examples=40, deadline=None)
@given(capacity=st.floats(10, 300), preset=st.sampled_from(["llama2-1.36b", "qwen3-1.8b"]))
def test_largest_micro_batch_is_the_last_that_fits(capacity, preset):
    config = make_run_config(model=make_model(preset))

    def total(size: int) -> float:
        tried = config.model_copy(update={"micro_batch_size": size})
        return estimate(tried, fit=MemoryFit().at_the_limit).total_gib

    largest = largest_micro_batch(config, capacity)
    assert largest == 0 or total(largest) <= capacity
    assert total(largest + 1) > capacity


def test_memory_fit_moves_the_estimate():
    config = make_run_config()
    more = estimate(config, fit=MemoryFit(activation_factor=1.5))
    assert more.activations == pytest.approx(1.5 * estimate(config).activations)
    assert dataclasses.replace(more, activations=0.0).allocated_gib < more.allocated_gib


# --- command line ----------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["predict", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_says_what_it_took_for_granted_or_replaced():
    many = run_command("qwen3-1.8b", "--gpu", "H100 SXM", "--gpus", "16", "--nodes", "2", "--micro-batch-size", "4")
    assert "; 50 GB/s a card between nodes (--network-gb-s)" in many
    one = run_command("llama2-1.36b", "--gpu", "H200", "--attention", "fa4", "--dtype", "float32")
    assert "attention sdpa (fa4 has no float32), loss" in one and "between nodes" not in one


def test_command_predicts_as_the_function_does():
    result = json.loads(
        run_command("llama2-1.36b", "--gpu", "B200", "--gpus", "8", "--micro-batch-size", "24", "--json")
    )
    config = plan_run(load_model("llama2-1.36b"), 8, micro_batch_size=24, gradient_accumulation_steps=8)
    assert result == json.loads(json.dumps(predict(config, "B200").to_dict()))
    assert result["calibrated"] is False and result["fits"] is True
    assert result["config"]["attention"] == "cudnn" and result["config"]["loss"] == "full"


@pytest.mark.parametrize("gpu", ["B200", "B300", "GB200", "GB300"])
def test_cards_of_one_generation_have_its_attention(gpu):
    assert generation(find_gpu(gpu)) == "blackwell"


def test_command_says_which_kernels_it_assumed():
    base = ("llama2-1.36b", "--gpu", "H100 SXM", "--micro-batch-size", "8")
    plain, own = (json.loads(run_command(*base, "--json", *more)) for more in ((), ("--kernels", "auto")))
    assert set(plain["config"]["kernels"].values()) == {"plain"}
    assert own["config"]["kernels"] == {
        "norm": "fused",
        "rope": "fused",
        "swiglu": "fused",
        "gelu": "plain",
        "cross_entropy": "fused",
        "weight_gradient": "accumulate",
        "adamw": "fused",
    }
    assert own["config"]["attention"] == "cudnn"
    assert own["tokens_per_s"] > 1.01 * plain["tokens_per_s"]
    # q and k are overwritten where they stand, and no head's gradient is handed on: 16,384 tokens, 18 layers
    saved = (16_384 * 18 * 2 * 2 * 2304 + 2 * 32_000 * 2304) / 2**30
    assert plain["memory_gib"]["total"] - own["memory_gib"]["total"] == pytest.approx(saved)
    assert "assumed   attention cudnn, loss full, own kernels: none\n" in run_command(*base)
    sharded = run_command(*base, "--kernels", "auto", "--gpus", "8", "--parallelism", "fsdp", "--attention", "fa3")
    kernels = "norm fused, rope fused, swiglu fused, cross_entropy fused, weight_gradient accumulate, adamw fused"
    assert f"assumed   attention fa3, loss full, own kernels: {kernels}\n" in sharded


def test_command_takes_no_kernel_for_what_a_model_lacks():
    """GPT-2 has learned positions and a GELU."""
    text = run_command("gpt2-1.36b", "--gpu", "H100 SXM", "--micro-batch-size", "8", "--kernels", "auto")
    assert "own kernels: norm fused, cross_entropy fused, weight_gradient accumulate, adamw fused\n" in text


def test_command_predicts_float8():
    base = ("llama2-1.36b", "--gpu", "H100 SXM", "--micro-batch-size", "8", "--fp8")
    text = run_command(*base, "--kernels", "auto")
    assert "bfloat16 with float8 matmuls" in text and "of 1978.9 TFLOP/s dense" in text
    assert "cross_entropy fused, adamw fused\n" in text  # float8 matmuls do not accumulate
    terms = json.loads(run_command(*base, "--json"))["terms_s"]
    assert terms["matmul.fp8"] > 0 and "matmul" not in terms


def test_float8_is_for_matmuls_alone():
    for card in ("H100 SXM", "B200"):
        half, float8 = (run_on(card, fp8=fp8, attention="cudnn").terms_s["attention.cudnn"] for fp8 in (False, True))
        assert float8 == half


def test_flash_attention_3_and_4_join_ropes_backward_pass():
    assert set(WRITES_ONE_GRADIENT) == set(PACKED)
    kernels = {"rope": "fused"}
    own = {name: run_on(attention=name, kernels=kernels).terms_s["elementwise_own"] for name in ("cudnn", "fa3", "fa4")}
    assert own["fa3"] == own["fa4"] < own["cudnn"]


def test_runs_and_uncalibrated_contradict_each_other(tmp_path):
    both = ["--runs", str(tmp_path), "--uncalibrated"]
    result = CliRunner().invoke(app, ["predict", "llama2-1.36b", "--gpu", "B200", *both])
    assert result.exit_code != 0 and "give one of them" in f"{result.output}{result.exception}"


def fake_predictions(monkeypatch, tokens_per_s: list[float], gib: list[float], capacity_gib=79.2):
    """Predictions by micro-batch, from 1 on, of a card and memory count that are known to 10 %."""
    template = run_on()
    largest = sum(one <= capacity_gib for one in gib)

    def fake(config, gpu):
        place = config.micro_batch_size - 1
        memory = dataclasses.replace(template.memory, activations=0.0)
        memory = dataclasses.replace(memory, activations=gib[place] - memory.total_gib)
        return dataclasses.replace(
            template,
            config=config,
            tokens_per_s=tokens_per_s[place],
            memory=memory,
            least_memory_gib=gib[place],
            memory_error_fraction=0.1,
            memory_capacity_gib=capacity_gib,
            largest_micro_batch_size=largest,
        )

    monkeypatch.setattr(prediction_module, "predict", fake)
    return make_run_config(micro_batch_size=99)


@pytest.mark.parametrize(
    "tokens_per_s, gib, chosen, basis",
    [
        # 72.0 GiB and a tenth are 79.2: the last that surely fits; the faster 74 GiB may not
        ([100, 150, 198, 200, 230], [40, 50, 60, 72, 74], 4, "the fastest per token; 1 to 4 surely fit"),
        ([100, 150, 199, 200, 230], [40, 50, 60, 72, 74], 3, "the smallest within 1 % of the fastest per token (4)"),
        ([100, 197, 198.5, 200, 195], [40, 50, 60, 65, 70], 3, "(4); 1 to 5 surely fit"),
        ([100, 110], [72.1, 79], 1, "the smallest, since none surely fits"),
    ],
)
def test_the_fastest_of_the_micro_batches_that_surely_fit(monkeypatch, tokens_per_s, gib, chosen, basis):
    found = predict_fastest(fake_predictions(monkeypatch, tokens_per_s, gib), H100)
    assert found.config.micro_batch_size == chosen
    assert basis in found.micro_batch_basis


def test_no_micro_batch_is_chosen_where_one_does_not_fit(monkeypatch):
    with pytest.raises(ConfigError, match=r"does not fit on .*: 80\.0 GiB at least, of 79, with micro-batch 1"):
        predict_fastest(fake_predictions(monkeypatch, [100], [80.0]), H100)


def test_command_chooses_a_micro_batch_that_surely_fits():
    """Uncalibrated, memory to 10 %: 18 of llama2-1.36b may fit in 79.2 GiB, 16 (71.8 GiB) surely do."""
    arguments = ("llama2-1.36b", "--gpu", "H100 SXM")
    result = json.loads(run_command(*arguments, "--json"))
    assert result["largest_micro_batch_size"] == 18
    assert result["config"]["micro_batch_size"] == 10
    assert result["micro_batch_basis"] == "the smallest within 1 % of the fastest per token (16); 1 to 16 surely fit"
    assert result["fits_surely"] is True
    text = run_command(*arguments)
    assert f"chosen    micro-batch 10: {result['micro_batch_basis']}\n" in text
    given = run_command(*arguments, "--micro-batch-size", "18")
    assert "chosen" not in given and "may fit, too close to tell; largest micro-batch that may fit: 18" in given


def test_command_calibrates_on_a_folder(tmp_path):
    for log in study()[:6]:
        write_run_log(tmp_path / f"{log.config.case}.json", log)
    (tmp_path / "ceilings.json").write_text(make_ceilings().model_dump_json())
    text = run_command(
        "llama2-1.36b", "--gpu", "H100 SXM", "--runs", str(tmp_path), "--ceilings", str(tmp_path / "ceilings.json")
    )
    assert "Calibrated on 6 runs" in text and "measured ceilings" in text
    assert "UNCALIBRATED" in run_command("llama2-1.36b", "--gpu", "H100 SXM")


def test_command_says_what_is_wrong(tmp_path):
    for arguments, words in (
        (["llama3-8b", "--gpu", "H100 SXM"], "does not fit"),
        (["llama2-1.36b", "--gpu", "H1000"], "H1000"),
        (["llama9", "--gpu", "B200"], "llama9"),
        (["llama2-1.36b", "--gpu", "B200", "--gpus", "0"], "world_size"),
        (["llama2-1.36b", "--gpu", "B200", "--micro-batch-size", "0"], "micro_batch_size"),
        (["gpt2-1.36b", "--gpu", "B200", "--seq-len", "4096"], "seq_len"),
        (["llama2-1.36b", "--gpu", "Tesla V100-SXM2-32GB"], "bf16"),
        (["llama2-1.36b", "--gpu", "A100 80GB PCIe", "--fp8"], "no fp8"),
        (["llama2-1.36b", "--gpu", "B200", "--gpus", "8", "--nodes", "3"], "nnodes"),
        (["llama2-1.36b", "--gpu", "B200", "--gpus", "8", "--parallelism", "none"], "one process"),
        (["llama2-1.36b", "--gpu", "B200", "--network-gb-s", "0"], "network_gb_s"),
        (["llama2-tiny", "--gpu", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "--gpus", "2"], "no link"),
        (["llama2-tiny", "--gpu", "B200", "--runs", str(tmp_path / "nowhere")], "no such folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            CliRunner().invoke(app, ["predict", *arguments], catch_exceptions=False)


def test_a_measured_rate_of_eager_attention_is_taken_as_it_is():
    """Its causal FLOPs over the measured rate: what it computes beyond them, and its softmax, are in that rate."""
    (ceilings, *_) = read_all_ceilings([REFERENCE / "h200" / "llama2-1.36b-2x80gb"])
    config = plan_run(load_model("llama2-1.36b"), 1, micro_batch_size=6, attention="eager")
    rates = card_rates("NVIDIA H200", config, [ceilings])
    measured = next(one.forward_backward_tflops for one in ceilings.attention if one.backend == "eager")
    assert rates.attention_tflops("eager") == pytest.approx(measured)
    flops = 18 * 3.5 * 4 * 128 * 6 * 18 * 2048**2 / 2  # layers, passes, a score's FLOPs, scores below the diagonal
    assert attention_seconds(config, rates) == pytest.approx(flops / (measured * 1e12))


@pytest.mark.parametrize(("gpu", "backend"), [("NVIDIA A100-SXM4-80GB", "fa4"), ("NVIDIA B200", "fa3")])
def test_an_attention_kernel_that_does_not_run_on_the_card_is_refused(gpu, backend):
    config = plan_run(load_model("llama2-1.36b"), 1, micro_batch_size=1, attention=backend)
    with pytest.raises(ConfigError, match=f"attention: {backend} does not run on {gpu}; there is cudnn, "):
        predict(config, gpu)
