"""Matmuls that accumulate weight gradients themselves, against gradients of which nothing is fused."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from train.train_runs import ACCUMULATE, finish_run, grad_norms, losses, run_many, start_run, tiny_config

from mfubench.model.fused.mlp_matmul import mlp_in_matmuls
from mfubench.model.weight_gradient import Linear, add_product
from mfubench.run_log import read_run_log
from mfubench.train.choices import resolve, resolve_weight_gradient
from mfubench.train.optimizer import Optimizer
from mfubench.train.process import Process
from mfubench.train.setup import build_engine
from mfubench.train.step import TrainStep

ALONE = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
A, B, T = 3, 2, 16


def built(kernels=None, in_matmuls=None, **overrides):
    values = {"gradient_accumulation_steps": A, "micro_batch_size": B, "attention": "eager", **overrides}
    config = tiny_config(kernels=kernels or {}, **values)
    torch.manual_seed(config.seed)
    resolved = resolve(config, ALONE)
    model, engine = build_engine(config, resolved, ALONE)
    for block in model.blocks:  # on a CPU no run chooses it
        block.mlp.in_matmuls = in_matmuls
    optimizer = Optimizer(engine, config.optimizer, process=ALONE, scale_loss=False)
    return model, engine, TrainStep(model, engine, optimizer), resolved


def batches():
    tokens = torch.randint(97, (A, B, T + 1), generator=torch.Generator().manual_seed(1))
    return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def main_gradients(**options):
    """Main gradients by parameter name, of a second forward and backward pass (which must not add to the first)."""
    torch._dynamo.reset()
    model, engine, step, resolved = built(**options)
    for _ in range(2):
        loss = step.forward_backward(*batches())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert engine.sent == len(engine.buckets)
    return loss, {name: engine.gradient_of(slot) for name, slot in engine.slots.items()}, resolved


def assert_same_gradients(found, expected, relative=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        off = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert off <= relative, f"{name}: off by {off:.3g} of the largest value"


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_main_gradients_are_those_of_the_plain_form(dtype, tied, loss):
    options = {
        "dtype": dtype,
        "loss": loss,
        "model": {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True, "qk_norm": True},
    }
    plain_loss, plain, _ = main_gradients(**options)
    found_loss, found, resolved = main_gradients(kernels=ACCUMULATE, **options)
    assert resolved.used["weight_gradient"].used == "accumulate"
    assert torch.equal(found_loss, plain_loss)
    # chunked: the head's gradient stays float32 here, and is rounded to bfloat16 in the plain form
    assert_same_gradients(found, plain, 2**-8 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"compile": "block", "compile_backend": "aot_eager"},
        {"compile": "model", "compile_backend": "aot_eager"},
        pytest.param({"compile": "block"}, marks=pytest.mark.slow),
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective", "compile": "block", "compile_backend": "aot_eager"},
        {"model": {"mlp": "gelu", "norm": "layernorm", "position": "learned", "tie_word_embeddings": True}},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values() if isinstance(value, str)) or "gpt2",
)
def test_compiled_and_checkpointed(options):
    architecture = {"model": options["model"]} if "model" in options else {}
    _, plain, _ = main_gradients(**architecture)
    _, found, resolved = main_gradients(kernels=ACCUMULATE, **options)
    assert resolved.used["compile"].used == options.get("compile", "none")
    assert_same_gradients(found, plain, 3e-5)


GPT2 = {"mlp": "gelu", "norm": "layernorm", "position": "learned", "tie_word_embeddings": True, "mlp_bias": True}


@pytest.mark.parametrize("kernels", [{}, ACCUMULATE], ids=["plain", "accumulate"])
@pytest.mark.parametrize("architecture", [{}, GPT2], ids=["swiglu", "gelu"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compile": "block", "compile_backend": "aot_eager"},
        {"compile": "model", "compile_backend": "aot_eager"},
        {"activation_checkpointing": "full"},
    ],
    ids=["eager", "block", "model", "checkpointed"],
)
def test_activations_in_their_matmuls(options, architecture, kernels):
    _, plain, _ = main_gradients(model=architecture)
    _, found, _ = main_gradients(kernels=kernels, in_matmuls=mlp_in_matmuls, model=architecture, **options)
    assert_same_gradients(found, plain, 3e-5)


def test_compiled_blocks_share_their_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []

    def keep_graph(graph, _):
        graphs.append(graph)
        return graph

    model, _, step, _ = built(ACCUMULATE, model={"num_hidden_layers": 12})
    backend = aot_autograd(fw_compiler=keep_graph, bw_compiler=keep_graph, keep_inference_input_mutations=True)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
    step.forward_backward(*batches())
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(graphs) == 2  # one forward, one backward
    calls = [str(node.target) for node in graphs[1].graph.nodes if node.op == "call_function"]
    assert sum("accumulate_product" in call or "auto_functionalized" in call for call in calls) == 4


@pytest.mark.slow
def test_the_compiler_hands_the_main_gradient_itself_to_the_matmul():
    """Not a copy of it that is copied back: that would cost what accumulating in the matmul saves."""
    torch._dynamo.reset()
    _, _, step, _ = built(ACCUMULATE, compile="block")
    with torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(step.forward_backward, *batches())
    calls = [call for source in set(sources) for call in re.findall(r"accumulate_product\.default\((\w+)", source)]
    assert len(calls) >= 4
    assert all(call.startswith("primals_") for call in calls)


def test_gradients_are_counted_down_in_the_same_order():
    orders = []
    for kernels in ({}, ACCUMULATE):
        _, engine, step, _ = built(kernels)
        order = []
        plain_count_down = engine.count_down

        def count_down(bucket, order=order, plain_count_down=plain_count_down):
            order.append(bucket.start)
            plain_count_down(bucket)

        engine.count_down = count_down
        step.forward_backward(*batches())
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 15


def test_a_layer_without_gradient_is_an_error():
    model, _, step, _ = built(ACCUMULATE)
    layer = model.blocks[0].mlp.down
    assert isinstance(layer, Linear)
    layer.forward = lambda inputs: inputs[..., :32] * 1.0
    with pytest.raises(RuntimeError, match="no gradient reached"):
        step.forward_backward(*batches())


def test_products_overwrite_or_add_in_float32():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 7), (7, 3)))
        total = torch.full((5, 3), torch.nan)
        add_product(total, left, right, overwrite=True)
        torch.testing.assert_close(total, (left @ right).float())
        add_product(total, left, right)
        torch.testing.assert_close(total, 2 * (left @ right).float())


def test_where_it_cannot_be_had_the_plain_form_is_used_and_the_reason_kept():
    cpu, cases = torch.device("cpu"), {}
    asked = tiny_config(kernels=ACCUMULATE)
    for communication, word in (
        ({"reduce_dtype": "bfloat16"}, "bfloat16"),
        ({"reshard_after_forward": "always"}, "each"),
    ):
        config = tiny_config(kernels=ACCUMULATE, gradient_accumulation_steps=2, communication=communication)
        cases[word] = resolve_weight_gradient(config, cpu, torch.float32, "fsdp", "false")
    cases["float8"] = resolve_weight_gradient(asked, cpu, torch.bfloat16, "none", "true")
    graphs = tiny_config(kernels=ACCUMULATE, compile="block", compile_mode="reduce-overhead")
    cases["reduce-overhead"] = resolve_weight_gradient(graphs, cpu, torch.float32, "none", "false")
    automatic = tiny_config(kernels={"weight_gradient": "auto"})
    cases["no CUDA"] = resolve_weight_gradient(automatic, cpu, torch.float32, "none", "false")
    for word, choice in cases.items():
        assert choice.used == "plain" and word in choice.reason
    plain = resolve_weight_gradient(tiny_config(), cpu, torch.float32, "fsdp", "false")
    assert plain.used == "plain" and plain.reason is None


def test_every_parallelism_trains_alike(data, tmp_path):
    configs = {}
    batch = {"world_size": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    for parallelism in ("ddp", "zero1", "fsdp"):
        for name, kernels in (("plain", {}), ("accumulate", ACCUMULATE)):
            options = {"parallelism": parallelism, "kernels": kernels, "max_iters": 6}
            configs[f"{parallelism}-{name}"] = tiny_config(**options, **batch)
    logs = run_many(configs, data, tmp_path)
    for key, log in logs.items():
        assert log.status == "ok"
        assert losses(log) == pytest.approx(losses(logs["ddp-plain"]), rel=1e-5)
        assert grad_norms(log) == pytest.approx(grad_norms(logs["ddp-plain"]), rel=1e-5)
        used = log.used["weight_gradient"]
        assert used.used == key.rpartition("-")[2] and used.reason is None


@pytest.mark.parametrize(
    "options",
    [
        {"model": {"tie_word_embeddings": True}, "loss": "full"},
        {"model": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, "loss": "chunked"},
        {"compile": "block", "compile_backend": "aot_eager"},
        {"dtype": "bfloat16", "activation_checkpointing": "full"},
        {"communication": {"shard_ranks": 1}},
        {"dtype": "bfloat16", "measurement": {"profile": "kernels"}},
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 1, "model": {"tie_word_embeddings": True}, "loss": "full", "dtype": "bfloat16"},
        {"gradient_accumulation_steps": 1, "world_size": 3, "model": {"tie_word_embeddings": False}},
    ],
    ids=[
        "tied",
        "biases",
        "compiled",
        "bfloat16",
        "copies",
        "profiled",
        "one step",
        "one step, tied",
        "rows left over",
    ],
)
def test_fsdp_reduces_what_matmuls_have_added_up(data, tmp_path, options):
    batch = {"world_size": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 3, "max_iters": 5}
    configs = {
        name: tiny_config(parallelism="fsdp", kernels=kernels, **batch | options)
        for name, kernels in (("plain", {}), ("accumulate", ACCUMULATE))
    }
    logs = run_many(configs, data, tmp_path)
    assert [log.used["weight_gradient"].used for log in logs.values()] == ["plain", "accumulate"]
    relative = 5e-3 if options.get("dtype") == "bfloat16" else 1e-5
    assert losses(logs["accumulate"]) == pytest.approx(losses(logs["plain"]), rel=relative)
    assert grad_norms(logs["accumulate"]) == pytest.approx(grad_norms(logs["plain"]), rel=relative)


def test_a_run_that_requires_a_fused_kernel_is_skipped_without_one(data, tmp_path):
    config = tiny_config(kernels={"swiglu": "fused"}, requires=("swiglu",))
    code, stderr = finish_run(start_run(config, data, tmp_path))
    assert code == 0, stderr
    log = read_run_log(tmp_path / "run.json")
    assert log.status == "skipped"
    assert "swiglu: fused was asked for, plain is what there is" in log.reason


@pytest.mark.parametrize("kind", ["recompute", "matmul"])
def test_swiglu_with_matmuls_of_its_own_and_fp8_exclude_each_other(kind):
    with pytest.raises(ValueError, match=rf"kernels\.swiglu: {kind} .* use fused"):
        tiny_config(dtype="bfloat16", fp8=True, kernels={"swiglu": kind})
