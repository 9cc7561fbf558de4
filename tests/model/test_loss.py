"""The three forms of the loss agree with the definition, gradients included; the choice says what it did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.small_models import GPT2, LLAMA, run_config, tokens
from torch import Tensor

from mfubench.decisions import chunk_bytes, loss_accumulates
from mfubench.model import build_model, resolve_loss
from mfubench.model import loss as losses
from mfubench.model.loss import (
    accumulating_cross_entropy,
    chunked_cross_entropy,
    chunked_loss,
    full_loss,
)
from mfubench.model.weight_gradient import MainGradient

N, HIDDEN, V = 45, 16, 97  # 97 rows: not a multiple of 8


def inputs(dtype: torch.dtype, device: str = "cpu", vocab: int = V, count: int = N) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.5 * torch.randn(vocab, HIDDEN, generator=generator)).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (count,), generator=generator).to(device)


def loss_and_gradients(
    function: Any, hidden: Tensor, weight: Tensor, labels: Tensor, arriving: float = 0.25
) -> list[Tensor]:
    """The loss, and the gradients of a quarter of it, as with four accumulated micro-batches."""
    loss = function(hidden, weight, labels)
    assert loss.dtype == torch.float32 and loss.dim() == 0
    return [loss.detach(), *torch.autograd.grad(loss * arriving, (hidden, weight))]


def test_full_is_the_definition() -> None:
    hidden, weight, labels = inputs(torch.float32)
    expected = torch.stack([-(hidden[i] @ weight.T).softmax(0)[labels[i]].log() for i in range(N)]).mean()
    torch.testing.assert_close(full_loss(hidden, weight, labels), expected)


@pytest.mark.parametrize("rows", [1, 7, 9, 44, 45, 1000])
def test_chunked_equals_full(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For chunks that divide the tokens and that do not, down to one token."""
    monkeypatch.setattr(losses, "chunk_bytes", lambda own_kernel: rows * V * 4)
    for expected, found in zip(
        loss_and_gradients(full_loss, *inputs(torch.float32)),
        loss_and_gradients(chunked_loss, *inputs(torch.float32)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


FORMS = [("cpu", "full"), ("cpu", "chunked")]
FORMS += [pytest.param("cuda", form, marks=pytest.mark.gpu) for form in ("full", "chunked", "fused")]


@pytest.mark.parametrize(("device", "form"), FORMS)
def test_bfloat16_is_as_exact_as_its_rounding(device: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 on the same rounded inputs: no form loses more than bfloat16 logits do."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    function, choice = resolve_loss(form, device=device, vocab_size=V)
    if choice.used != form:
        pytest.skip(str(choice.reason))
    monkeypatch.setattr(losses, "chunk_bytes", lambda own_kernel: 10 * V * 2)
    hidden, weight, labels = inputs(torch.bfloat16, device)
    exact = loss_and_gradients(
        full_loss, hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_(), labels
    )
    found = loss_and_gradients(function, hidden, weight, labels)
    assert abs(found[0] - exact[0]) < 4e-3 * exact[0]
    for a, b in zip(found[1:], exact[1:], strict=True):
        assert a.dtype == torch.bfloat16 and a.shape == b.shape
        assert (a.float() - b).norm() < 1e-2 * b.norm()


@pytest.mark.parametrize("function", [full_loss, chunked_loss])
def test_float16_gradients_survive_the_mean(function: Any) -> None:
    """With a loss scale as in training, a mean over many tokens leaves nothing below float16's smallest numbers."""
    hidden = torch.randn(2048, 16, generator=torch.Generator().manual_seed(0)).half()
    _, weight, _ = inputs(torch.float16)
    labels = torch.arange(2048) % V
    exact_inputs = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    exact = torch.autograd.grad(full_loss(*exact_inputs, labels), exact_inputs)
    rounded_inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(function(*rounded_inputs, labels) * 4096, rounded_inputs)
    for a, b in zip(found, exact, strict=True):
        assert ((a.float() / 4096 - b).norm() / b.norm()).item() < 2e-3


def test_gradient_at_the_label_survives_bfloat16() -> None:
    """A token that is predicted almost surely: softmax - 1 would cancel to nothing in bfloat16."""
    hidden = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden[0, 0] = 8.0
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    weight[2, 0] = 1.0
    labels = torch.tensor([2])
    hidden.requires_grad_(), weight.requires_grad_()
    exact = loss_and_gradients(
        full_loss, hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_(), labels
    )
    found = loss_and_gradients(chunked_loss, hidden, weight, labels)
    torch.testing.assert_close(found[1].float(), exact[1], rtol=1e-2, atol=0)
    torch.testing.assert_close(found[2].float(), exact[2], rtol=1e-2, atol=0)


def test_chunked_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pass makes a tensor of the size of the logits, seen operator by operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden, weight, labels = inputs(torch.float32)
    monkeypatch.setattr(losses, "chunk_bytes", lambda own_kernel: 5 * V * 4)
    with Watch():  # the body of the operator, which hides its inside from such a watch
        chunked_cross_entropy._init_fn(hidden.detach(), weight.detach(), labels, 5, True, "", False)
        main = torch.zeros(V, HIDDEN), torch.tensor(True)
        accumulating_cross_entropy._init_fn(hidden.detach(), weight.detach(), labels, 5, "", False, *main)
    assert largest == weight.numel() == V * HIDDEN and 2 * largest < N * V
    with Watch():
        loss_and_gradients(chunked_loss, hidden, weight, labels)
    assert largest == V * HIDDEN


@pytest.mark.gpu
@pytest.mark.parametrize("compile_backend", ["", "inductor"], ids=["own", "compiled"])
def test_chunked_holds_one_chunk(compile_backend: str) -> None:
    """Of logits in the own kernel, of logits and of their gradient in the compiled one, of six chunks."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows, vocabulary = 1024, 65_536
    hidden, weight, labels = inputs(torch.bfloat16, "cuda", vocabulary, 6 * rows)
    main = torch.zeros(vocabulary, hidden.shape[1], device="cuda"), torch.tensor(True, device="cuda")

    def run() -> None:
        fused = not compile_backend
        accumulating_cross_entropy(hidden.detach(), weight.detach(), labels, rows, compile_backend, fused, *main)

    run()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    chunks = (torch.cuda.max_memory_allocated() - before) / (rows * vocabulary * 2)
    assert (1 if not compile_backend else 2) <= chunks < (1.1 if not compile_backend else 2.1)


def test_all_chunks_are_in_one_buffer_and_rows_beyond_the_vocabulary_count_nothing() -> None:
    hidden, weight, _ = inputs(torch.float32)
    padded = torch.cat([weight.detach(), torch.ones(3, HIDDEN)])  # as on a card, where they are zeros
    places = set()
    for rows, logits in losses.chunks_of_logits(hidden.detach(), padded, V, 7):
        places.add(logits.data_ptr())
        torch.testing.assert_close(logits[:, :V], hidden[rows].detach() @ weight.detach().T)
        assert logits.shape == (len(range(N)[rows]), V + 3) and torch.all(logits[:, V:] == -torch.inf)
    assert len(places) == 1


def test_an_evaluation_holds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks are its own: float32 copies stand beside the logits, whatever kernel a training takes."""
    monkeypatch.setattr(losses, "EVALUATED_BYTES", 5 * V * 4)
    sizes: list[int] = []
    chunks = losses.chunks_of_logits
    monkeypatch.setattr(losses, "chunks_of_logits", lambda *given: sizes.append(given[3]) or chunks(*given))
    with torch.no_grad():
        loss = chunked_loss(*inputs(torch.float32), fused=True)
    assert sizes == [5]
    torch.testing.assert_close(loss, full_loss(*inputs(torch.float32)).detach())


def test_evaluation_computes_no_gradients() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        loss = chunked_loss(hidden, weight, labels)
        empty = chunked_cross_entropy(hidden, weight, labels, 3, False, "", False)
    torch.testing.assert_close(loss, full_loss(hidden, weight, labels).detach())
    torch.testing.assert_close(empty[0], loss)
    assert [tensor.numel() for tensor in empty[1:]] == [0, 0]


def test_chunked_is_a_sound_operator() -> None:
    """torch's own checks: the shapes it promises to the compiler, its gradient, nothing mutated or aliased."""
    hidden, weight, labels = inputs(torch.float32)
    torch.library.opcheck(
        chunked_cross_entropy,
        (hidden, weight, labels, 3, True, "", False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    main = torch.ones(V, HIDDEN), torch.tensor(False)
    torch.library.opcheck(
        accumulating_cross_entropy,
        (hidden.detach(), weight.detach(), labels, 3, "", False, *main),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_main_gradient_is_the_sum_over_micro_steps(
    rows: int, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-steps, of which the first overwrites what is there, for chunks of any size; evaluation adds nothing."""
    monkeypatch.setattr(losses, "chunk_bytes", lambda own_kernel: rows * V * 4)
    hidden, weight, labels = inputs(torch.float32)
    main = MainGradient(torch.full((V, HIDDEN), torch.nan), torch.tensor(True), torch.empty(0, requires_grad=True))
    function = torch.compile(chunked_loss, backend=backend, fullgraph=True) if backend else chunked_loss
    expected = loss_and_gradients(full_loss, hidden, weight, labels, arriving=1.0)
    for micro_step in range(2):
        main.overwrite.fill_(micro_step == 0)
        loss = function(hidden, weight, labels, main)
        of_hidden, of_ticket = torch.autograd.grad(loss, (hidden, main.ticket))
        with torch.no_grad():
            torch.testing.assert_close(chunked_loss(hidden, weight, labels, main), expected[0])
        torch.testing.assert_close((loss.detach(), of_hidden), tuple(expected[:2]), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(main.total, (micro_step + 1) * expected[2], rtol=1e-5, atol=1e-7)
        assert of_ticket.numel() == 0


def test_a_scaled_loss_takes_no_main_gradient() -> None:
    main = MainGradient(torch.zeros(V, HIDDEN), torch.tensor(True), torch.empty(0, requires_grad=True))
    with pytest.raises(ValueError, match="float16"):
        chunked_loss(*inputs(torch.float16), main)
    assert [loss_accumulates("chunked", dtype) for dtype in ("float16", "bfloat16")] == [False, True]
    assert loss_accumulates("full", "float16") and not loss_accumulates("fused", "bfloat16")


@pytest.mark.parametrize("form", ["full", "chunked"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(form: str, backend: str) -> None:
    function, choice = resolve_loss(form, device="cpu", vocab_size=V, compile_backend=backend)
    assert choice.used == form
    for found, expected in zip(
        loss_and_gradients(function, *inputs(torch.float32)),
        loss_and_gradients(full_loss, *inputs(torch.float32)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("tokens_", "vocab", "own_kernel", "expected"),
    [
        (8192, 151_936, False, [2816, 2816, 2560]),
        (8192, 151_936, True, [4096] * 2),
        (16_384, 128_256, False, [4096] * 4),
        (16_384, 128_256, True, [8192] * 2),
        (16_384, 32_000, False, [16_384]),
        (40, 32_000, True, [40]),
    ],
)
def test_chunks_are_even_and_whole_tiles(tokens_: int, vocab: int, own_kernel: bool, expected: list[int]) -> None:
    size = losses.chunk_size(tokens_, 2 * vocab, chunk_bytes(own_kernel))
    assert [min(size, tokens_ - start) for start in range(0, tokens_, size)] == expected


@pytest.mark.parametrize("form", ["full", "chunked"])
def test_whole_model_with_its_loss_is_one_graph(form: str) -> None:
    function, _ = resolve_loss(form, device="cpu", vocab_size=96, compile_backend="aot_eager")
    decoder = build_model(run_config(LLAMA), device="cpu", loss=function)
    batch = tokens(2, 17)
    expected = decoder(batch[:, :-1], batch[:, 1:])
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch[:, :-1], batch[:, 1:]), expected)


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["tied", "untied"])
def test_model_gradients_do_not_depend_on_the_form(model: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's gradient and, where it is tied, the embedding's share of it."""
    monkeypatch.setattr(losses, "chunk_bytes", lambda own_kernel: 5 * 96 * 4)
    batch = tokens(2, 17)
    gradients = []
    for form in ("full", "chunked"):
        torch.manual_seed(0)
        decoder = build_model(run_config(model, loss=form), device="cpu")
        decoder(batch[:, :-1], batch[:, 1:]).backward()
        gradients.append({name: parameter.grad for name, parameter in decoder.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-7)


def test_choices_on_a_cpu() -> None:
    assert resolve_loss("auto", device="cpu", vocab_size=150_000)[1].used == "full"
    function, choice = resolve_loss("fused", device="cpu", vocab_size=V)
    assert choice.used == "chunked" and choice.reason == "fused needs a CUDA device, not cpu"
    torch.testing.assert_close(function(*inputs(torch.float32)), full_loss(*inputs(torch.float32)))


@pytest.mark.parametrize(
    ("vocab", "compiled", "wanted"),
    [
        (32_000, True, "full"),
        (50_257, True, "full"),
        (128_256, True, "chunked"),
        (151_936, False, "chunked"),
        (32_000, False, "fused"),
    ],
)
def test_what_auto_wants_on_cuda(vocab: int, compiled: bool, wanted: str) -> None:
    assert losses.preferred(torch.device("cuda"), vocab, compiled)[0] == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", ["full", "chunked", "fused"])
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_forms_on_cuda(form: str, backend: str | None) -> None:
    """An odd vocabulary (its weight is padded there), compiled and not; float32 so that nothing hides in rounding."""
    function, choice = resolve_loss(form, device="cuda", vocab_size=V, compile_backend=backend)
    if choice.used != form:
        pytest.skip(str(choice.reason))
    torch.backends.cuda.matmul.allow_tf32 = False
    for found, expected in zip(
        loss_and_gradients(function, *inputs(torch.float32, "cuda")),
        loss_and_gradients(full_loss, *inputs(torch.float32)),
        strict=True,
    ):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-6)
