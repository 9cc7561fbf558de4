"""The step and memory models of the own kernels: bytes by hand, and beside the measured runs that ship."""

from __future__ import annotations

import itertools
import math

import pytest
from factories import make_model, make_run_config, make_run_log

from mfubench.config import KernelsConfig, RunConfig
from mfubench.decisions import head_accumulates
from mfubench.prediction.calibration import calibrate, fit_factors, predicted_seconds
from mfubench.prediction.card_rates import card_rates, datasheet_rates
from mfubench.prediction.measured_runs import REFERENCE, as_run, observe, observe_memory, read_all_ceilings, read_runs
from mfubench.prediction.memory import estimate_memory
from mfubench.prediction.pages import unseen_kernels
from mfubench.prediction.predict import check_predictions, predict
from mfubench.prediction.resolved_settings import lacking, resolve_settings
from mfubench.prediction.step_bytes import (
    accumulation_bytes,
    elementwise_bytes_by_group,
    epilogue_bytes,
    loss_bytes,
    optimizer_bytes,
)
from mfubench.prediction.step_model import step_terms
from mfubench.run_log import Choice

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
ALL = {"norm": "fused", "rope": "fused", "swiglu": "fused", "weight_gradient": "accumulate", "adamw": "fused"}
MATMUL_PARAMETERS = 18 * (3 * 2304 * 2304 + 2304 * 2304 + 3 * 2304 * 6144) + 32_000 * 2304
PARAMETERS = MATMUL_PARAMETERS + 32_000 * 2304 + 37 * 2304


def run_of(attention: str = "cudnn", preset: str = "llama2-1.36b", **kernels: str) -> RunConfig:
    """Micro-batch 8 x accumulation 4, 16,384 tokens a micro-step; other kernels plain."""
    return settings_of(preset, {"attention": attention}, **kernels)


def settings_of(preset: str, settings: dict, **kernels: str) -> RunConfig:
    fixed = {"micro_batch_size": 8, "gradient_accumulation_steps": 4, "loss": "full", "compile": "block"}
    model = make_model(preset)
    return make_run_config(model=model, **{**fixed, **settings}, kernels=kernels)


def megabytes_a_layer(group: str, config: RunConfig) -> float:
    return elementwise_bytes_by_group(config)[group] / 18 / 1e6


# --- bytes by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group, config, megabytes",
    [
        # forward + backward, as the docstrings of mfubench.model.fused count them
        ("activation", run_of(), 604 + 1007),
        ("activation", run_of(swiglu="fused"), 604 + 1007),
        ("activation", run_of(swiglu="recompute"), 604 + 1208),
        ("activation", run_of(swiglu="matmul"), 805),  # gate, up, their gradients and the product, less the product's
        ("activation", run_of(preset="gpt2-1.36b", gelu="matmul"), 604),  # read, and written once more
        ("rope", run_of(), 302 + 453),
        ("rope", run_of(rope="fused"), 302 + 453),
        ("rope", run_of("fa4", rope="fused"), 302 + 302),
        ("rope", run_of("fa4"), 302 + 453),
        # no RoPE: the gradients of q, k and v side by side, by a copy or by attention itself
        ("rope", run_of("fa4", "gpt2-1.36b"), 453),
        ("rope", run_of("cudnn", "gpt2-1.36b", rope="fused"), 453),
        ("rope", run_of("fa4", "gpt2-1.36b", rope="fused"), 0),
        ("norm", run_of(norm="fused"), (2 + 1 / 18) * (302 + 302)),  # two a layer, and the last
        ("norm", run_of(), (2 + 1 / 18) * (302 + 377.5)),
    ],
)
def test_elementwise_bytes_by_hand(group, config, megabytes):
    assert megabytes_a_layer(group, config) == pytest.approx(megabytes, rel=0.002)


def test_what_the_matmul_wrote_is_overwritten_only_where_nobody_reads_it():
    def settings(**changed) -> RunConfig:
        return settings_of("llama2-1.36b", {"attention": "fa4", **changed}, rope="fused")

    assert megabytes_a_layer("rope", settings(fp8=True)) == pytest.approx(453 + 453, rel=0.002)
    # selective checkpointing: the forward pass again
    kept = settings(activation_checkpointing="selective")
    assert megabytes_a_layer("rope", kept) == pytest.approx(3 * 453, rel=0.002)
    normed = run_of("fa4", "qwen3-1.8b", rope="fused")
    model, tokens = normed.model, 8 * 2048
    width = (model.num_attention_heads + 2 * model.num_key_value_heads) * 128
    # forward reads and writes; backward reads gradients and the norm's input, writes one gradient
    assert elementwise_bytes_by_group(normed)["rope"] == model.num_hidden_layers * tokens * 2 * 5 * width


def test_gradient_and_optimizer_bytes_by_hand():
    assert accumulation_bytes(run_of()) == PARAMETERS * (6 + 3 * 10) and epilogue_bytes(run_of()) == 0
    inside = run_of(weight_gradient="accumulate")
    # what no matmul makes is still added up; matmuls write 2 bytes more each time, and read 4 but the first
    assert accumulation_bytes(inside) == (PARAMETERS - MATMUL_PARAMETERS) * 36
    assert epilogue_bytes(inside) == MATMUL_PARAMETERS * (4 * 2 + 3 * 4)
    assert optimizer_bytes(run_of()) == PARAMETERS * (4 + 32 + 6)
    assert optimizer_bytes(run_of(adamw="fused")) == PARAMETERS * (4 + 30)
    assert PARAMETERS == 1_294_159_104


def test_gradient_adding_moves_into_the_matmul():
    rates = datasheet_rates(H100, run_of())
    plain, inside = (step_terms(one, rates) for one in (run_of(), run_of(weight_gradient="accumulate")))
    assert inside["optimizer"] < plain["optimizer"] and inside["matmul"] > plain["matmul"]
    assert sum(inside.values()) < sum(plain.values())
    # measured: 23 ms of additions become 2, and matmuls take 13 ms more
    assert plain["optimizer"] - inside["optimizer"] == pytest.approx(0.015, abs=0.002)
    assert inside["matmul"] - plain["matmul"] == pytest.approx(0.0083, abs=0.001)


def test_cross_entropy_bytes_by_hand():
    logits = 16_384 * 32_000 * 2
    assert (loss_bytes(run_of()), loss_bytes(run_of(cross_entropy="fused"))) == (4 * logits, 3 * logits)


def test_matmul_is_counted_where_it_can_run():
    rates, elsewhere = datasheet_rates(H100, run_of()), datasheet_rates("NVIDIA A100-SXM4-80GB", run_of())

    def resolved(rates=rates, preset="llama2-1.36b", **settings) -> str:
        config = settings_of(preset, settings, swiglu="matmul", gelu="matmul")
        kernels = resolve_settings(config, rates).kernels
        return kernels.gelu if preset.startswith("gpt2") else kernels.swiglu

    assert resolved() == resolved(preset="gpt2-1.36b") == "matmul"
    assert resolved(dtype="float32") == resolved(activation_checkpointing="selective") == "fused"
    assert resolved(elsewhere) == "fused" and resolved(elsewhere, preset="gpt2-1.36b") == "plain"


def test_auto_is_what_the_trainer_takes():
    auto = dict.fromkeys(KernelsConfig.model_fields, "auto")
    rates = datasheet_rates(H100, run_of())

    def resolved(**settings) -> dict[str, str]:
        return resolve_settings(settings_of("llama2-1.36b", settings, **auto), rates).kernels.model_dump()

    fused = {**ALL, "gelu": "plain", "cross_entropy": "fused"}
    assert resolved() == fused
    assert resolved(loss="fused") == {**fused, "cross_entropy": "plain"}
    assert resolved(fp8=True) == {**fused, "weight_gradient": "plain"}
    sharded = {"parallelism": "fsdp", "world_size": 2}
    assert resolved(**sharded) == resolved(**sharded, gradient_accumulation_steps=1) == fused
    for without in (
        {**sharded, "communication": {"reduce_dtype": "bfloat16"}},
        {**sharded, "communication": {"reshard_after_forward": "always"}},
        {"fp8": True},
        {"compile_mode": "reduce-overhead"},
    ):
        plain = {**fused, "weight_gradient": "plain"}
        assert resolved(**without) == plain
        asked = settings_of("llama2-1.36b", without, **auto | {"weight_gradient": "accumulate"})
        assert resolve_settings(asked, rates).kernels.model_dump() == plain
    assert resolved(compile_mode="reduce-overhead")["weight_gradient"] == "plain"
    gpt2 = resolve_settings(settings_of("gpt2-1.36b", {}, **auto), rates).kernels.model_dump()
    assert gpt2 == {**fused, "rope": "plain", "swiglu": "plain"}
    packed = resolve_settings(settings_of("gpt2-1.36b", {"attention": "fa4"}, **auto), rates).kernels.model_dump()
    assert packed == {**fused, "swiglu": "plain"}
    not_compiled = settings_of("llama2-1.36b", {"loss": "auto", "compile": "none"}, **auto)
    assert resolve_settings(not_compiled, rates).loss == "full"
    assert resolve_settings(not_compiled.model_copy(update={"kernels": KernelsConfig()}), rates).loss == "fused"


@pytest.mark.parametrize("preset", ["gpt2-1.36b", "llama2-1.36b", "llama3-1.5b", "qwen3-1.8b"])
def test_a_model_lacks_here_what_it_lacks_in_the_trainer(preset):
    operations = pytest.importorskip("mfubench.model.operations")
    model = make_model(preset)
    assert lacking(model) == {
        kind for kind in (*operations.KINDS, "gelu") if operations.not_in(model, kind) is not None
    }


def test_kernels_are_taken_as_they_ran():
    log = make_run_log(config=run_of(norm="auto", rope="fused", swiglu="recompute", adamw="auto"))
    for name, used in (("norm", "fused"), ("rope", "plain"), ("swiglu", "recompute"), ("adamw", "plain")):
        requested = getattr(log.config.kernels, name)
        log.used[name] = Choice(requested=requested, used=used, reason=None if requested == used else "a try failed")
    kernels = as_run(log).kernels
    assert (kernels.norm, kernels.rope, kernels.swiglu, kernels.adamw) == ("fused", "plain", "recompute", "plain")


# --- memory by hand --------------------------------------------------------------------------------------------------


def allocated(config: RunConfig) -> int:
    """Bytes counted of tensors."""
    return round(estimate_memory(config, 79.2).allocated_gib * 2**30)


def test_allocated_bytes_by_hand():
    """A layer keeps a token's stream and norm's output twice, q, k, v, q and k turned, the attention's output, its
    softmax's statistics, gate, up and their product."""
    tokens = 8 * 2048
    layer = 2 * (4 * 2304 + 3 * 2304 + 2 * 2304 + 2304 + 3 * 6144) + 4 * 18
    final = 2 * 2 * 2304  # into the last norm, and out of it
    logits, head = 2 * tokens * 32_000, 2 * 32_000 * 2304  # logits or their gradient; the head's gradient
    plain = 18 * PARAMETERS + tokens * (18 * layer + final) + logits + head
    assert allocated(run_of()) == plain
    assert allocated(run_of(norm="fused", swiglu="fused", adamw="fused")) == plain
    assert allocated(run_of(weight_gradient="accumulate")) == plain - head
    assert allocated(run_of(rope="fused")) == plain - tokens * 18 * 2 * 2 * 2304
    for kind in ("recompute", "matmul"):
        assert allocated(run_of(swiglu=kind)) == plain - tokens * 18 * 2 * 6144
    # the own cross-entropy needs no compiler to write the gradient over the logits
    eager = settings_of("llama2-1.36b", {"compile": "none"}, swiglu="fused")
    own = eager.model_copy(update={"kernels": KernelsConfig(swiglu="fused", cross_entropy="fused")})
    assert allocated(own) == plain and allocated(eager) == plain - logits - head + 12 * tokens * 32_000


def test_chunked_loss_holds_one_chunk():
    """Qwen3's vocabulary, 16,384 tokens: 4.98e9 bytes of logits, in five chunks with their gradient beside them or, in
    the own kernel, in three with it in their place. Beside them the float32 sum, unless it is the main gradient."""

    def logits(**kernels):
        return estimate_memory(settings_of("qwen3-1.8b", {"loss": "chunked"}, **kernels), 79.2).logits * 2**30

    plain, own = (logits(cross_entropy=form) for form in ("plain", "fused"))
    hidden, all_logits = make_model("qwen3-1.8b").hidden_size, 2 * 8 * 2048 * 151_936
    beside = 4 * 151_936 * hidden + 2 * 8 * 2048 * hidden
    assert (plain, own) == pytest.approx((beside + 2 * all_logits / 5, beside + all_logits / 3))
    assert own - logits(cross_entropy="fused", weight_gradient="accumulate") == pytest.approx(4 * 151_936 * hidden)


# --- beside measured runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs():
    return read_runs([REFERENCE])


@pytest.fixture(scope="module")
def observations(logs):
    return observe(logs, read_all_ceilings([REFERENCE]))


def held_in_1_gib_chunks(config: RunConfig) -> float:
    """GiB of logits and gradients when a chunk was held until the next one took its place, and the gradient of the
    head's weight had a float32 sum of its own in any case."""
    tokens = config.micro_batch_size * config.seq_len
    vocabulary, hidden = config.model.vocab_size, config.model.hidden_size
    element = 4 if config.dtype == "float32" else 2
    chunks = math.ceil(element * tokens * vocabulary / 2**30)
    copies = 1 if config.kernels.cross_entropy == "fused" else 2 if config.compile != "none" else 1 + 3 * 4 / element
    copies += chunks > 1
    hidden_gradient = element * tokens * hidden
    handed_on = hidden_gradient + (0 if head_accumulates(config) else element * vocabulary * hidden)
    chunk = element * tokens * vocabulary / chunks
    return (4 * vocabulary * hidden + hidden_gradient + max(copies * chunk, handed_on)) / 2**30


def test_allocated_memory_of_every_measured_run(logs):
    """What is counted lies below what was measured by workspaces: 0.1 to 0.22 GiB.

    With CUDA graphs up to 0.32, under fsdp, which has buffers of its own, up to 0.26. Chunked losses held more until
    2026-11-29 (`held_in_1_gib_chunks`).
    """
    peaks = [(log, one) for log in logs for one in observe_memory([log])]
    assert len(peaks) >= 157 and sum(one.config.fp8 for _, one in peaks) >= 4
    assert sum(one.name.endswith("-chunks") for _, one in peaks) == 3
    for log, one in peaks:
        estimate = estimate_memory(one.config, one.capacity_gib)
        counted = estimate.allocated_gib
        if one.config.loss == "chunked" and log.wall.started_at < "2026-11-29":
            counted += held_in_1_gib_chunks(one.config) - estimate.logits
        most = 0.32 if one.config.cuda_graphs else 0.26 if one.config.parallelism == "fsdp" else 0.22
        assert 0.05 < one.peak_allocated_gib - counted < most, one.name


def test_kernel_runs_within_five_percent_when_left_out(observations):
    checks = [check for check in check_predictions(observations) if check.observation.name.startswith("kernels/")]
    assert len(checks) == 18
    assert max(abs(check.error_fraction) for check in checks) < 0.05


def test_plain_is_slower_than_each_kernel_alone_and_that_slower_than_all(observations):
    """Fitted on one GPU; pairs whose measured times differ by less than 1 %, which repeats do too, say nothing."""
    single = [one for one in observations if one.config.world_size == 1 and one.gpu == "h100-sxm"]
    factors, _ = fit_factors(single)
    runs = {one.name: one for one in single if one.name.startswith("kernels/")}
    predicted = {name: predicted_seconds(one, factors) for name, one in runs.items()}
    alone = [f"kernels/only-{name}" for name in ("norm", "rope", "swiglu", "weight-gradient", "adamw")]
    for name in alone:
        assert predicted["kernels/all-cudnn"] < predicted[name] < predicted["kernels/base-cudnn"]
    inverted = {
        (a, b)
        for a, b in itertools.combinations(sorted(runs), 2)
        if abs(runs[a].step_s / runs[b].step_s - 1) > 0.01
        and (predicted[a] - predicted[b]) * (runs[a].step_s - runs[b].step_s) <= 0
    }
    # micro-batch 16 is faster than the model knows, by 1.5 %: the one pair that comes out the wrong way round
    assert inverted <= {("kernels/all-recompute-fa4", "kernels/mb16-all-cudnn")}


# --- ceilings of the same chip ---------------------------------------------------------------------------------------


def test_an_h200_computes_at_the_fraction_measured_on_an_h100():
    config = run_of()
    (ceilings,) = read_all_ceilings([REFERENCE / "h100"])
    h100, h100_before = card_rates(H100, config, [ceilings]), datasheet_rates(H100, config)
    h200, h200_before = card_rates(H200, config, [ceilings]), datasheet_rates(H200, config)
    for name in ("matmul_tflops", "operand_gb_s", "bandwidth_gb_s"):
        fraction = getattr(h100, name) / getattr(h100_before, name)
        assert fraction != 1
        assert getattr(h200, name) / getattr(h200_before, name) == pytest.approx(fraction)
    assert h200.attention["cudnn"] == pytest.approx(h100.attention["cudnn"])
    assert h200.attention["fa3"] == h200_before.attention["fa3"]  # not measured
    assert h200.related == h100.gpu and not h200.measured
    calibration = calibrate(observe([make_run_log(config=config)]), ceilings=[ceilings])
    basis = predict(config, H200, calibration=calibration).basis
    assert "as measured on NVIDIA H100 80GB HBM3, the same chip" in basis
    # half the power: another rate at the limit
    assert card_rates("NVIDIA H100 PCIe", config, [ceilings]) == datasheet_rates("NVIDIA H100 PCIe", config)


def test_ceilings_of_the_same_chip_count_once_however_often_they_are_given():
    """A study for each model measures the same card again: their fractions must not multiply."""
    config = run_of()
    (h100,) = read_all_ceilings([REFERENCE / "h100"])
    h200 = read_all_ceilings([REFERENCE / "h200"])
    assert len(h200) == 3
    assert card_rates(H200, config, [h100, h100]) == card_rates(H200, config, [h100])
    assert card_rates(H100, config, [h200[1], *h200]) == card_rates(H100, config, h200)
    # an H800 is an H100 with fewer links, and has not the H200's memory
    assert card_rates("NVIDIA H800", config, [h100, *h200]) == card_rates("NVIDIA H800", config, [h100])


def test_runs_of_one_name_on_two_cards_all_count(observations):
    """kernels/all-cudnn ran on an H100 and on an H200, tiers/tier4 with two models: each is a run."""
    single = [one for one in observations if one.config.world_size == 1]
    own = [one for one in single if one.config.kernels != KernelsConfig() and not one.config.fp8]
    factors, _ = fit_factors([one for one in single if one.config.kernels == KernelsConfig()])
    off = [abs(one.step_s / predicted_seconds(one, factors) - 1) for one in own]
    assert len({one.name for one in own}) < len(own)
    assert f": {sum(error <= 0.05 for error in off)} of the {len(own)} with them" in unseen_kernels(observations)
