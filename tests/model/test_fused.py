"""The Triton kernels against the plain components: values and gradients, compiled, and captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from model.small_models import GPT2, LLAMA, QWEN3, run_config, tokens
from torch import Tensor
from triton_devices import CUDA, DEVICES, INTERPRETED, needs_cuda, run_interpreted

from mfubench.config import KernelsConfig, ModelConfig
from mfubench.model import build_model
from mfubench.model.attention import attention_backends, resolve_attention
from mfubench.model.attention_kernels import PACKED, PackedKernels, eager, repeat_heads, split_packed
from mfubench.model.components import rope_tables
from mfubench.model.loss import chunked_loss, full_fused_loss, full_loss
from mfubench.model.operations import (
    KINDS,
    PLAIN,
    Operations,
    join_split_and_attention,
    largest_difference,
    load_fused,
    load_packed_attention,
    load_swiglu_linear,
    not_in,
    resolve_operations,
)
from mfubench.model.weight_gradient import MainGradient
from mfubench.run_log import Choice
from mfubench.train.modules import checkpoint_activations

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest value: float32 differs in the order of additions, the others in the rounding of one or two results.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
PRODUCTION = {  # every shape of config/models.yaml that a kernel can see
    "llama2-1.36b": {"vocab_size": 32000, "hidden_size": 2304, "intermediate_size": 6144, "num_attention_heads": 18},
    "llama3-1.5b": {
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16},
        "num_key_value_heads": 8,
    },
    "gpt2-1.36b": {
        **{"vocab_size": 50257, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 18},
        **{"norm": "layernorm", "position": "learned", "mlp": "gelu", "tie_word_embeddings": True},
    },
    "qwen3-1.8b": {
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "qk_norm": True},
    },
}


def test_all_of_this_under_the_interpreter() -> None:
    run_interpreted(__file__)


def fused(kind: str, in_place: bool = True) -> Operations:
    return replace(PLAIN, **load_fused(kind, in_place))


def compare(
    run: Callable[..., tuple[Tensor, ...]],
    kind: str,
    inputs: list[Tensor],
    without: tuple[int, ...] = (),
    in_place: bool = True,
) -> None:
    """run(operations, *inputs): outputs and gradients of the fused form against the plain one in float32.

    without: outputs that nobody uses, so that no gradient arrives for them.
    """
    dtype = inputs[0].dtype
    found, expected = (
        outputs_and_gradients(run, operations, [x.to(exact) for x in inputs], without)
        for operations, exact in ((fused(kind, in_place), dtype), (PLAIN, torch.float32))
    )
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.dtype == dtype and x.shape == y.shape
        off = ((x.float() - y).abs().max() / y.abs().max()).item()
        assert off <= TOLERANCE[dtype], f"tensor {i} is off by {off:.3g} of its largest value"


def outputs_and_gradients(
    run: Callable[..., tuple[Tensor, ...]], operations: Operations, inputs: list[Tensor], without: tuple[int, ...]
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = run(operations, *(x.clone() for x in leaves))  # a leaf must not be overwritten
    used = [y for i, y in enumerate(outputs) if i not in without]
    generator = torch.Generator().manual_seed(3)
    # gradients as a transposing attention kernel hands them over: elements side by side, heads and tokens apart
    arriving = [torch.randn(y.shape, generator=generator).to(y.device) for y in used]
    strided = [g.transpose(1, 2).contiguous().transpose(1, 2) if g.dim() == 4 else g for g in arriving]
    gradients = torch.autograd.grad(used, leaves, [g.to(y.dtype) for g, y in zip(strided, used, strict=True)])
    return [x.detach() for x in (*outputs, *gradients)]


def draw(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def swiglu(operations: Operations, gate_up: Tensor) -> tuple[Tensor, ...]:
    return (operations.swiglu(gate_up),)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 128])
def test_swiglu(device: str, dtype: torch.dtype, width: int) -> None:
    compare(swiglu, "swiglu", draw(device, dtype, (2, 3, 2 * width)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulating", [False, True])
def test_swiglu_recomputed_behind_its_matmul(device: str, dtype: torch.dtype, accumulating: bool) -> None:
    from mfubench.model.fused.swiglu import swiglu_linear

    gate_up, weight, bias, grad = draw(device, dtype, (2, 3, 74), (5, 37), (5,), (2, 3, 5))
    leaves = [x.clone().requires_grad_() for x in (gate_up, weight, bias)]
    total = torch.full((5, 37), torch.nan, device=device)
    main = MainGradient(total, torch.tensor(True), torch.empty(0, device=device, requires_grad=True))
    found = swiglu_linear(*leaves, main if accumulating else None)
    found.backward(grad)
    exact = [x.float().requires_grad_() for x in (gate_up, weight, bias)]
    expected = torch.nn.functional.linear(PLAIN.swiglu(exact[0]), *exact[1:])
    expected.backward(grad.float())
    assert (leaves[1].grad is None) == accumulating
    weight_gradient = total if accumulating else leaves[1].grad
    pairs = [(found, expected), (weight_gradient, exact[1].grad)]
    pairs += [(leaf.grad, other.grad) for leaf, other in zip(leaves[::2], exact[::2], strict=True)]
    for i, (x, y) in enumerate(pairs):
        off = ((x.float() - y).abs().max() / y.abs().max()).item()
        assert off <= 4 * TOLERANCE[dtype], f"tensor {i} is off by {off:.3g} of its largest value"


def add_norm(centered: bool) -> Callable[..., tuple[Tensor, ...]]:
    norm = torch.nn.functional.layer_norm if centered else torch.nn.functional.rms_norm

    def run(operations: Operations, hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if operations.add_norm is not None:
            return operations.add_norm(hidden, update, weight, 1e-3, centered)
        total = hidden + update
        return total, norm(total, total.shape[-1:], weight, eps=1e-3)

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("unused", [(), (0,)], ids=["both", "norm-alone"])
@pytest.mark.parametrize("width", [8, 45])
def test_add_norm(device: str, dtype: torch.dtype, centered: bool, unused: tuple[int, ...], width: int) -> None:
    hidden, update, weight = draw(device, dtype, (2, 4, width), (2, 4, width), (width,))
    hidden += 2  # a mean that is far from 0
    update = (hidden + update).to(dtype) - hidden  # a sum that every dtype holds: its rounding is not what is tested
    compare(add_norm(centered), "norm", [hidden, update, weight], unused)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys", "head_dim", "norm"), [(3, 3, 10, False), (4, 1, 8, False), (4, 2, 16, True), (3, 3, 6, True)]
)
def test_split_rotated(
    device: str, dtype: torch.dtype, in_place: bool, queries: int, keys: int, head_dim: int, norm: bool
) -> None:
    cos, sin = rope_tables(5, head_dim, 10_000.0, torch.device(device))

    def split(operations: Operations, qkv: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
        return operations.split_heads(qkv, cos, sin, *(norms or (None, None)), 1e-3, queries, keys)

    shapes = [(2, 5, (queries + 2 * keys) * head_dim), *([(head_dim,), (head_dim,)] if norm else [])]
    compare(split, "rope", draw(device, dtype, *shapes), in_place=in_place)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["full", "chunked"])
@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize("vocabulary", [37, 5000])
def test_cross_entropy(device: str, dtype: torch.dtype, form: str, accumulating: bool, vocabulary: int) -> None:
    """The losses with the kernel inside: value, gradient of hidden states and of the head, which adds up in float32."""
    if (device, accumulating, dtype) == ("cpu", True, torch.bfloat16):
        pytest.skip("a CPU rounds the products that it adds up")
    if (form, accumulating, dtype) == ("chunked", True, torch.float16):
        pytest.skip("refused, since float16's loss is scaled later")
    hidden, weight = draw(device, dtype, (7, 16), (vocabulary, 16))
    labels = (torch.arange(7, device=device) * 5) % vocabulary
    exact = [x.float().clone().requires_grad_() for x in (hidden, weight)]
    expected = full_loss(*exact, labels)
    arriving = 1.0 if accumulating else 0.5  # a chunked loss adds to the main gradient before it knows
    (expected * arriving).backward()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    total = torch.full((vocabulary, 16), torch.nan, device=device)
    main = MainGradient(total, torch.tensor(True), torch.empty(0, device=device, requires_grad=True))
    loss = full_fused_loss if form == "full" else partial(chunked_loss, fused=True)
    found = loss(*leaves, labels, *([main] if accumulating else []))
    (found * arriving).backward()
    assert (leaves[1].grad is None) == accumulating
    pairs = [(found, expected), (leaves[0].grad, exact[0].grad)]
    pairs += [(total if accumulating else leaves[1].grad, exact[1].grad)]
    for i, (x, y) in enumerate(pairs):
        off = ((x.float() - y).abs().max() / y.abs().max()).item()
        assert off <= 4 * TOLERANCE[dtype], f"tensor {i} is off by {off:.3g} of its largest value"


@pytest.mark.parametrize("device", DEVICES)
def test_cross_entropy_of_padded_logits_leaves_no_gradient_in_the_padding(device: str) -> None:
    from mfubench.model.fused.cross_entropy import mean_cross_entropy

    (values,) = draw(device, torch.float32, (3, 40))
    labels = torch.tensor([0, 36, 5], device=device)
    leaf, exact = values.clone().requires_grad_(), values[:, :37].clone().requires_grad_()
    found, expected = mean_cross_entropy(leaf.clone(), labels, 37), torch.nn.functional.cross_entropy(exact, labels)
    torch.testing.assert_close(found, expected)
    (gradient,), (other,) = torch.autograd.grad(found, leaf), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(gradient[:, :37], other)
    assert not gradient[:, 37:].any()


@torch.library.custom_op("mfubench_tests::eager_attention", mutates_args=())
def eager_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return eager(q, k, v).contiguous(), q.new_zeros(0)


@torch.library.custom_op("mfubench_tests::eager_packed_backward", mutates_args=())
def eager_backward(grad: Tensor, qkv: Tensor, out: Tensor, _: Tensor, query_heads: int, key_heads: int) -> Tensor:
    """Gradient of qkv [B, T, (Q + 2K) D]; by hand, since an operator has no graph of its own."""
    q, k, v = (x.transpose(1, 2) for x in split_packed(qkv, query_heads, key_heads))  # [B, heads, T, D]
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    T, D = q.shape[-2:]
    k, v = (repeat_heads(x.transpose(1, 2), query_heads).transpose(1, 2) for x in (k, v))
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    probabilities = (q @ k.mT * D**-0.5).masked_fill(future, -torch.inf).softmax(dim=-1)
    of_scores = probabilities * (grad @ v.mT - (grad * out).sum(dim=-1, keepdim=True)) * D**-0.5
    of_query, of_key, of_value = of_scores @ k, of_scores.mT @ q, probabilities.mT @ grad
    of_key, of_value = (x.unflatten(1, (key_heads, -1)).sum(dim=2) for x in (of_key, of_value))
    return torch.cat((of_query, of_key, of_value), dim=1).transpose(1, 2).flatten(2)


@eager_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_zeros(0)


@eager_backward.register_fake
def _(grad: Tensor, qkv: Tensor, out: Tensor, _: Tensor, query_heads: int, key_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


@pytest.fixture
def eager_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKED, "eager", PackedKernels(eager_forward, eager_backward))


@pytest.mark.usefixtures("eager_is_packed")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize(("queries", "keys", "head_dim"), [(3, 3, 10), (4, 1, 8)])
def test_split_and_attention_as_one(device: str, rope: bool, queries: int, keys: int, head_dim: int) -> None:
    packed = load_packed_attention("eager")
    tables = rope_tables(5, head_dim, 10_000.0, torch.device(device)) if rope else (None, None)

    def attend(operations: Operations, qkv: Tensor) -> tuple[Tensor, ...]:
        if operations.packed_attention is not None:
            return (packed(qkv, *tables, queries, keys),)
        return (eager(*PLAIN.split_heads(qkv, *tables, None, None, 0.0, queries, keys)),)

    (qkv,) = draw(device, torch.float32, (2, 5, (queries + 2 * keys) * head_dim))
    found = outputs_and_gradients(attend, replace(PLAIN, packed_attention=packed), [qkv], ())
    expected = outputs_and_gradients(attend, PLAIN, [qkv], ())
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def joined(architecture: dict, device: str, asked: str = "auto", backend: str = "eager") -> tuple[Operations, Choice]:
    """Of a model without RoPE."""
    choice = Choice(requested=asked, used="plain", reason="the model has no RoPE" if asked != "plain" else None)
    return join_split_and_attention(
        PLAIN,
        choice,
        backend,
        eager,
        model=run_config(architecture).model,
        device=torch.device(device),
        dtype=torch.float32,
        in_place=False,
    )


@pytest.mark.usefixtures("eager_is_packed")
@pytest.mark.parametrize("device", DEVICES)
def test_without_rope_the_split_is_joined_with_attention_or_the_reason_kept(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, choice = joined(GPT2, device)
    assert operations.packed_attention is not None and (choice.requested, choice.used) == ("auto", "fused")
    assert choice.reason == (
        "the model has no RoPE; the split into q, k and v as one with attention, "
        "which writes its three gradients side by side"
    )
    assert joined(GPT2, device, asked="plain") == (PLAIN, Choice(requested="plain", used="plain"))
    monkeypatch.setitem(PACKED, "wrong", PackedKernels(lambda q, k, v: eager_forward(k, q, v), eager_backward))
    monkeypatch.setitem(PACKED, "broken", PackedKernels(eager_forward, lambda *_: 1 / 0))
    for architecture, backend, word in (
        (GPT2, "sdpa", "sdpa attention does not write its three gradients side by side"),
        ({**GPT2, "qk_norm": True}, "eager", "q/k-norms"),
        (GPT2, "wrong", "gives wrong results here"),
        (GPT2, "broken", "does not run on this device (ZeroDivisionError"),
    ):
        operations, choice = joined(architecture, device, backend=backend)
        assert operations == PLAIN and choice.used == "plain"
        assert choice.reason.startswith("the model has no RoPE, and ") and word in choice.reason


@pytest.mark.usefixtures("eager_is_packed")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_whole_model_without_rope_joined(device: str, backend: str | None, checkpointing: str) -> None:
    config = run_config(GPT2)
    results = []
    for operations in (joined(GPT2, device)[0], PLAIN):
        torch.manual_seed(0)
        model = build_model(config, device=device, attention=eager, operations=operations)
        if operations is not PLAIN:
            torch._dynamo.reset()
            if checkpointing != "none":
                checkpoint_activations(model, checkpointing)
            for block in model.blocks if backend is not None else ():
                block.forward = torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
        batch = tokens(2, 10).to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for x, y in zip(*results, strict=True):
        assert ((x - y).abs().max() / y.abs().max()).item() < 1e-4


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize("name", ["llama2-1.36b", "llama3-1.5b", "gpt2-1.36b"])
def test_split_and_attention_as_one_are_chosen_and_compile(name: str, backend: str) -> None:
    if (reason := attention_backends("cuda")[backend]) is not None:
        pytest.skip(reason)
    config = run_config(production_model(name), dtype="bfloat16", seq_len=256, attention=backend)
    torch.manual_seed(0)
    results = []
    for joins in (True, False):
        operations, choices = resolve_operations(
            KernelsConfig(rope="fused"), model=config.model, device="cuda", dtype=torch.bfloat16
        )
        attention, choice = resolve_attention(
            backend,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            num_attention_heads=config.model.num_attention_heads,
            num_key_value_heads=config.model.num_key_value_heads,
            head_dim=config.model.head_dim,
            seq_len=256,
            batch_size=2,
        )
        assert choice.used == backend
        if joins:
            operations, joint = join_split_and_attention(
                operations,
                choices["rope"],
                backend,
                attention,
                model=config.model,
                device=torch.device("cuda"),
                dtype=torch.bfloat16,
            )
            assert operations.packed_attention is not None and joint.used == "fused"
        torch.manual_seed(0)
        module = build_model(config, device="cuda", attention=attention, operations=operations).blocks[0].attention
        forward = torch.compile(module.forward, dynamic=False) if joins else module.forward
        (hidden,) = draw("cuda", torch.bfloat16, (2, 256, config.model.hidden_size))
        has_rope = config.model.position == "rope"
        tables = rope_tables(256, config.model.head_dim, 10_000.0, torch.device("cuda")) if has_rope else (None, None)
        out = forward(hidden.requires_grad_(), *tables)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [hidden, *module.parameters()])])
    for x, y in zip(*results, strict=True):
        assert ((x - y).float().abs().max() / y.float().abs().max()).item() < 2**-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    "architecture", [LLAMA, {**LLAMA, "num_key_value_heads": 2}, QWEN3, GPT2], ids=["mha", "gqa", "qwen3", "gpt2"]
)
def test_a_whole_model(device: str, architecture: dict, backend: str | None) -> None:
    """Loss and every gradient in float32; a block leaves its last addition to the next norm."""
    config = run_config(architecture)
    operations = PLAIN
    for kind in KINDS:
        if not_in(config.model, kind) is None:
            operations = replace(operations, **load_fused(kind))
    if backend is not None:  # compiled, and with the least memory
        operations = replace(operations, **load_swiglu_linear())
    results = []
    for chosen in (operations, PLAIN):
        torch.manual_seed(0)
        model = build_model(config, device=device, operations=chosen)
        if backend is not None:
            torch._dynamo.reset()
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
        batch = tokens(2, 10).to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        results.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (loss, gradients), (expected_loss, expected) = results
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        assert ((gradient - expected[name]).abs().max() / expected[name].abs().max()).item() < 1e-4, name


@pytest.mark.parametrize("device", ["cpu"] if INTERPRETED else [])
@pytest.mark.parametrize(
    ("kind", "architecture"), [*((kind, QWEN3) for kind in KINDS), ("norm", GPT2)], ids=[*KINDS, "layer-norm"]
)
def test_the_try_before_use_measures_the_difference(device: str, kind: str, architecture: dict) -> None:
    model = run_config(architecture).model
    assert largest_difference(kind, load_fused(kind), model, torch.device(device), torch.float32) < 1e-5
    fused_norm = fused("norm").add_norm
    wrong = {
        "norm": {"add_norm": lambda x, y, weight, eps, centered: fused_norm(x, y, weight, eps, not centered)},
        "rope": {"split_heads": lambda qkv, cos, sin, *rest: PLAIN.split_heads(qkv, cos, -sin, *rest)},
        "swiglu": {"swiglu": lambda x: PLAIN.swiglu(x.flip(-1))},
    }
    assert largest_difference(kind, wrong[kind], model, torch.device(device), torch.float32) > 1e-2


def test_without_cuda_or_without_the_operation_the_plain_form_is_used_and_the_reason_kept() -> None:
    asked = KernelsConfig(norm="auto", rope="fused", swiglu="auto")
    operations, choices = resolve_operations(asked, model=run_config(LLAMA).model, device="cpu", dtype=torch.float32)
    assert operations == PLAIN
    for kind, choice in choices.items():
        assert (choice.requested, choice.used) == (getattr(asked, kind), "plain")
        assert choice.reason == (None if kind == "gelu" else "Triton's kernels need a CUDA device, not cpu")
    _, choices = resolve_operations(asked, model=run_config(GPT2).model, device="cpu", dtype=torch.float32)
    assert choices["norm"].reason == "Triton's kernels need a CUDA device, not cpu"
    assert choices["rope"].reason == "the model has no RoPE"
    assert choices["swiglu"].reason == "the model's MLP is gelu"
    for options, word in (({"norm_bias": True}, "without bias"), ({"norm_position": "post"}, "norm_position: post")):
        model = run_config({**GPT2, **options}).model
        _, choices = resolve_operations(asked, model=model, device="cpu", dtype=torch.float32)
        assert choices["norm"].used == "plain" and word in choices["norm"].reason
    _, choices = resolve_operations(KernelsConfig(), model=run_config(LLAMA).model, device="cpu", dtype=torch.float32)
    assert all(choice.used == "plain" and choice.reason is None for choice in choices.values())


def production_model(name: str) -> ModelConfig:
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **PRODUCTION[name]}
    return ModelConfig(name=name, **sizes)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", PRODUCTION)
def test_production_shapes_are_fused_on_this_card(name: str) -> None:
    model = production_model(name)
    asked = KernelsConfig(norm="fused", rope="fused", swiglu="fused")
    _, choices = resolve_operations(asked, model=model, device="cuda", dtype=torch.bfloat16)
    has = [kind for kind in KINDS if not_in(model, kind) is None]
    assert {kind: choices[kind].reason for kind in has if choices[kind].used != "fused"} == {}
    N, H, inner = 16_384, model.hidden_size, model.intermediate_size
    hidden, weight = draw("cuda", torch.bfloat16, (N, H), (H,))
    compare(add_norm(model.norm == "layernorm"), "norm", [hidden, torch.zeros_like(hidden), weight])
    if "swiglu" in has:
        compare(swiglu, "swiglu", draw("cuda", torch.bfloat16, (N, 2 * inner)))
    if "rope" in has:
        cos, sin = rope_tables(2048, model.head_dim, model.rope_theta, torch.device("cuda"))
        heads = model.num_attention_heads, model.num_key_value_heads

        def split(operations: Operations, qkv: Tensor, *norms: Tensor) -> tuple[Tensor, ...]:
            return operations.split_heads(qkv, cos, sin, *(norms or (None, None)), 1e-6, *heads)

        shapes = [(8, 2048, (heads[0] + 2 * heads[1]) * model.head_dim)]
        shapes += [(model.head_dim,)] * 2 if model.qk_norm else []
        compare(split, "rope", draw("cuda", torch.bfloat16, *shapes))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", PRODUCTION)
def test_compiled_and_captured(device: str, name: str) -> None:
    """One block of a real shape: compiled, and replayed from a CUDA graph, it gives what it gives eagerly."""
    config = run_config(production_model(name), dtype="bfloat16", seq_len=256, attention="sdpa")
    operations, _ = resolve_operations(
        KernelsConfig(norm="fused", rope="fused", swiglu="fused"),
        model=config.model,
        device="cuda",
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    block = build_model(config, device=device, operations=operations).blocks[0]
    hidden, update = draw(
        device, torch.bfloat16, (2, 256, config.model.hidden_size), (2, 256, config.model.hidden_size)
    )
    tables = rope_tables(256, config.model.head_dim, 10_000.0, torch.device(device))
    cos, sin = tables if config.model.position == "rope" else (None, None)
    leaves = [hidden.requires_grad_(), update.requires_grad_(), *block.parameters()]

    def step(forward: Callable) -> list[Tensor]:
        outputs = forward(hidden, update, cos, sin)
        gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
        # a graph that lives on keeps the leaves' nodes, and with them the stream that no capture may wait for
        return [*(y.detach() for y in outputs), *gradients]

    eager = step(block.forward)
    compiled = torch.compile(block.forward, dynamic=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            results = {"compiled": step(compiled)}
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            results["captured"] = step(compiled)
        graph.replay()
        torch.cuda.synchronize()
    for key, found in results.items():
        for x, y in zip(found, eager, strict=True):
            assert ((x - y).float().abs().max() / y.float().abs().max()).item() < 2**-5, key
