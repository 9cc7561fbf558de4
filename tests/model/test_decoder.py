"""The decoder as a whole: initial values, causality, tying, sampling, compiling, and what it copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.small_models import ARCHITECTURES, GPT2, LLAMA, QWEN3, build, run_config, tokens

from mfubench.model import Decoder, build_model
from mfubench.model.attention_kernels import eager
from mfubench.model.loss import full_loss


def seeded(model: dict[str, Any], seed: int = 5, **overrides: Any) -> Decoder:
    torch.manual_seed(seed)
    return build_model(run_config(model, **overrides), device="cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_initial_values(architecture: str) -> None:
    """N(0, 0.02); projections onto the residual stream 1/sqrt(2 * layers) of that; norms 1, biases 0."""
    wide = {"hidden_size": 240, "intermediate_size": 500, "num_hidden_layers": 8, "vocab_size": 300}
    decoder = seeded({**ARCHITECTURES[architecture], **wide})
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = "output" in name or "down" in name
            assert parameter.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name
            assert abs(parameter.mean().item()) < 1e-3, name


def test_initialisation_follows_the_seed_alone() -> None:
    first = seeded(QWEN3)
    torch.randn(7)
    torch.manual_seed(5)
    torch.randn(100)  # drawing in between changes nothing: the seed counts, not the state
    second = build_model(run_config(QWEN3), device="cpu")
    third = seeded(QWEN3, seed=6)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        assert parameter.dim() == 1 or not torch.equal(parameter, third.get_parameter(name))


def test_building_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_model(run_config(LLAMA), device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_values_are_the_same_in_every_dtype_but_for_rounding() -> None:
    exact, rounded = seeded(LLAMA), seeded(LLAMA, dtype="bfloat16")
    for name, value in rounded.initial_parameters(torch.device("cpu")):
        assert value.dtype == torch.float32
        assert torch.equal(value, exact.get_parameter(name))
        assert torch.equal(value.bfloat16(), rounded.get_parameter(name))


def test_no_two_parameters_start_alike() -> None:
    values = [value for _, value in seeded(LLAMA).initial_parameters(torch.device("cpu")) if value.dim() == 2]
    assert len({tuple(value.flatten()[:4].tolist()) for value in values}) == len(values)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    batch = tokens(4, 25)
    loss = seeded(LLAMA)(batch[:, :-1], batch[:, 1:])
    assert loss.item() == pytest.approx(torch.tensor(96.0).log().item(), abs=0.1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_look_ahead(architecture: str) -> None:
    decoder = build(ARCHITECTURES[architecture])
    batch = tokens(2, 20)
    changed = batch.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 96
    before, after = decoder.logits(batch), decoder.logits(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12], after[:, 12])


def test_forward_is_the_loss_of_the_logits() -> None:
    decoder = build(GPT2)
    batch = tokens(3, 20)
    expected = torch.nn.functional.cross_entropy(decoder.logits(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    torch.testing.assert_close(decoder(batch[:, :-1], batch[:, 1:]), expected)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build(GPT2), build(LLAMA)
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert untied.lm_head.weight is not untied.token_embedding.weight


def test_meta_model_holds_no_memory_and_can_be_filled() -> None:
    decoder = build_model(run_config(GPT2), device="meta")
    assert all(parameter.is_meta for parameter in decoder.parameters())
    decoder.to_empty(device="cpu")
    decoder.tie_weights()
    torch.manual_seed(5)
    decoder.initialize()
    for name, parameter in seeded(GPT2).named_parameters():
        assert torch.equal(parameter, decoder.get_parameter(name))


def test_parameters_by_name() -> None:
    source, target = build(GPT2), seeded(GPT2)
    target.load_parameters(dict(source.named_parameters()))
    batch = tokens(2, 20)
    assert torch.equal(source.logits(batch), target.logits(batch))
    with pytest.raises(RuntimeError, match=r"final_norm\.weight"):
        target.load_parameters({n: p for n, p in source.named_parameters() if n != "final_norm.weight"})


@pytest.mark.parametrize("architecture", ["gpt2", "llama-gqa", "qwen3"])
def test_sampling_draws_from_the_next_token_distribution(architecture: str) -> None:
    """The samples of 3,000 continuations, token by token, against the model's own probabilities."""
    decoder = build(ARCHITECTURES[architecture])
    with torch.no_grad():
        decoder.lm_head.weight.mul_(0.2)
    prompt = tokens(1, 6)
    samples = decoder.generate(prompt.expand(3000, 6), 1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(samples[:, :6], prompt.expand(3000, 6))
    frequencies = samples[:, 6].bincount(minlength=96) / 3000
    expected = decoder.logits(prompt)[0, -1].softmax(-1)
    assert (frequencies - expected).abs().max() < 0.04 and expected.max() < 0.9


def test_sampling_reads_every_token_before() -> None:
    """Greedy by a scaled head: each new token is the arg-max after all tokens so far."""
    decoder = build(LLAMA)
    with torch.no_grad():
        decoder.lm_head.weight.mul_(1e4)
    found = decoder.generate(tokens(2, 6), 8)
    expected = tokens(2, 6)
    for _ in range(8):
        expected = torch.cat((expected, decoder.logits(expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found, expected)


def test_sampling_beyond_the_context_slides_the_window() -> None:
    decoder = build(GPT2)  # 40 learned positions
    with torch.no_grad():
        decoder.lm_head.weight.mul_(1e4)
    found = decoder.generate(tokens(1, 38), 6)
    assert found.shape == (1, 44)
    for position in range(41, 44):
        window = found[:, position - 40 : position]
        assert found[0, position] == decoder.logits(window)[0, -1].argmax()


def test_sampling_follows_its_generator() -> None:
    decoder = build(LLAMA)
    first, again, other = (
        decoder.generate(tokens(2, 6), 20, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("architecture", ["gpt2-biased", "llama-gqa", "qwen3"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_blocks_equal_eager(architecture: str, backend: str) -> None:
    """Every block in one graph; loss and gradients unchanged, sdpa and RoPE inside."""
    plain = build(ARCHITECTURES[architecture], attention="sdpa")
    compiled = build(ARCHITECTURES[architecture], attention="sdpa")
    torch._dynamo.reset()
    for block in compiled.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend, dynamic=False)
    batch = tokens(2, 25)
    for decoder in (plain, compiled):
        decoder(batch[:, :-1], batch[:, 1:]).backward()
    for (name, expected), found in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("architecture", ["gpt2", "llama-gqa", "qwen3"])
def test_all_blocks_share_one_compilation(architecture: str) -> None:
    """Twelve layers compile once: more than a handful of versions of one function, and torch gives up silently."""
    from torch._dynamo.testing import CompileCounterWithBackend

    decoder = build({**ARCHITECTURES[architecture], "num_hidden_layers": 12}, attention="sdpa")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in decoder.blocks:
        block.forward = torch.compile(block.forward, backend=counter, dynamic=False)
    batch = tokens(2, 25)
    for _ in range(2):
        decoder(batch[:, :-1], batch[:, 1:]).backward()
    assert counter.frame_count == 1


def test_bfloat16_model_computes_without_casting_parameters() -> None:
    """No operator of a step turns a parameter into another dtype: masters are float32 elsewhere."""
    from torch.utils._python_dispatch import TorchDispatchMode

    decoder = build_model(run_config(QWEN3, dtype="bfloat16"), device="cpu", attention=eager, loss=full_loss)
    storages = {parameter.untyped_storage().data_ptr(): name for name, parameter in decoder.named_parameters()}
    cast = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default:
                cast.append(storages.get(args[0].untyped_storage().data_ptr()))
            return function(*args, **(kwargs or {}))

    batch = tokens(2, 25)
    with Watch():
        loss = decoder(batch[:, :-1], batch[:, 1:])
    assert loss.dtype == torch.float32
    assert cast and not [name for name in cast if name]  # activations are cast (RoPE, softmax), parameters never
    loss.backward()
    assert {parameter.grad.dtype for parameter in decoder.parameters()} == {torch.bfloat16}


def test_queries_and_keys_are_views_of_one_tensor() -> None:
    """What reaches the attention kernel was split without a copy, last axis contiguous."""
    seen = []

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.extend((q, k, v))
        return eager(q, k, v)

    build_model(run_config(QWEN3), device="cpu", attention=watch).hidden_states(tokens(2, 25))
    q, k, v = seen[:3]
    assert q.shape == (2, 25, 6, 16) and k.shape == v.shape == (2, 25, 2, 16)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert all(x.stride(-1) == 1 for x in (q, k, v))
