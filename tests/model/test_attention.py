"""Every attention backend equals the plain form, forward and backward; the choice among them says what it did."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model.small_models import QWEN3, run_config, tokens
from torch import Tensor

from mfubench.model import attention, attention_times, build_model, resolve_attention
from mfubench.model.attention import FALLBACKS, LOADERS, Shape, attention_backends, tracing_obstacle, try_backend
from mfubench.model.attention_kernels import FLASH, PACKED, eager, load_fa3, load_fa4, sdpa
from mfubench.model.kernels import kernels_match, profile_kernels
from mfubench.run_log import Choice

HEADS = {"mha": (4, 4), "gqa-2": (4, 2), "gqa-3": (6, 2), "mqa": (3, 1)}
# every backend that runs on a CPU there, and every one on CUDA
BACKENDS = [("cpu", "eager"), ("cpu", "sdpa"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in LOADERS)]


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, one query at a time: the reference of the reference."""
    B, T, H, D = q.shape
    group = H // k.shape[2]
    out = torch.empty_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys, values = k[b, : t + 1, h // group], v[b, : t + 1, h // group]  # [t + 1, D]
                out[b, t, h] = torch.softmax(keys @ q[b, t, h] / D**0.5, dim=0) @ values
    return out


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_eager_equals_the_definition(heads: tuple[int, int]) -> None:
    q, k, v, _ = Shape(2, 7, *heads, 8, torch.float64, torch.device("cpu")).inputs()
    torch.testing.assert_close(eager(q, k, v), written_out(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seq_len", [3, 64, 127, 193])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_backend_equals_eager(
    device: str, backend: str, dtype: torch.dtype, heads: tuple[int, int], seq_len: int
) -> None:
    """Output and gradients of q, k, v, against eager in float64.

    float32: 1e-5. bfloat16: no further from the exact values than a few times what the plain
    form itself is in bfloat16, which is the dtype's rounding and nothing of the backend's.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shape = Shape(2, seq_len, *heads, 64, dtype, torch.device(device))
    function, reason = try_backend(backend, shape)
    if function is None:
        pytest.skip(f"{backend}: {reason}")
    *inputs, grad = shape.inputs()
    exact = forward_backward(eager, [x.detach().double().requires_grad_() for x in inputs], grad.double())
    found = forward_backward(function, inputs, grad)
    plain = forward_backward(eager, inputs, grad)
    for name, a, b, rounded in zip(("out", "dq", "dk", "dv"), found, exact, plain, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        error, rounding = ((x.double() - b).norm() / b.norm() for x in (a, rounded))
        limit = 1e-5 if dtype == torch.float32 else 3 * rounding + 1e-3
        assert error <= limit, f"{name}: {error:.2g}, eager itself {rounding:.2g}"


def forward_backward(function: attention.AttentionFunction, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_backend_is_one_graph_and_the_claimed_kernel(device: str, backend: str) -> None:
    """No graph break around attention, the same values, and the kernels of the backend, by name."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = Shape(2, 96, 4, 2, 64, dtype, torch.device(device))
    function, reason = try_backend(backend, shape)
    if function is None:
        pytest.skip(f"{backend}: {reason}")
    compiled = torch.compile(
        lambda q, k, v: function(q * 2, k, v) + 1,
        fullgraph=True,
        backend="inductor" if device == "cuda" else "aot_eager",
    )
    *inputs, grad = shape.inputs()
    expected = forward_backward(lambda q, k, v: function(q * 2, k, v) + 1, inputs, grad)
    for a, b in zip(forward_backward(compiled, inputs, grad), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    kernels = profile_kernels(lambda: forward_backward(compiled, inputs, grad), device)
    assert kernels_match(backend, kernels, device) is None


class FakePackages:
    """Stand-ins for the three FlashAttention packages: their calling conventions, with plain arithmetic inside."""

    @staticmethod
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        assert causal
        return eager(q, k, v)

    @staticmethod
    def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool) -> tuple[Any, ...]:
        assert causal and return_lse
        B, T, H, _ = q.shape
        return eager(q, k, v).contiguous(), torch.full((B, H, T), 7.0), None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, causal: bool, **gradients: Tensor
    ) -> None:
        assert causal and (lse == 7).all() and torch.allclose(out, eager(q, k, v))
        # by hand: an operator's inside is below autograd. One axis for the KV heads, one for the queries of a group.
        T, KV, D = k.shape[1:]
        q_, dout_ = (x.unflatten(2, (KV, -1)) for x in (q, dout))  # [B, T, KV, R, D]
        scores = torch.einsum("btgrd,bsgd->bgrts", q_, k) * D**-0.5
        p = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        dp = torch.einsum("btgrd,bsgd->bgrts", dout_, v)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * D**-0.5
        gradients["dq"].copy_(torch.einsum("bgrts,bsgd->btgrd", ds, k).flatten(2, 3))
        gradients["dk"].copy_(torch.einsum("bgrts,btgrd->bsgd", ds, q_))
        gradients["dv"].copy_(torch.einsum("bgrts,btgrd->bsgd", p, dout_))

    @staticmethod
    def fwd(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, num_splits: int) -> tuple[Tensor, ...]:
        assert num_splits == 1
        out, log_sum_exp, *_ = FakePackages._flash_attn_fwd(q, k, v, causal=is_causal, return_lse=True)
        return out, log_sum_exp, q.new_empty(0), q.new_empty(0)

    @staticmethod
    def bwd(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        is_causal: bool,
        **gradients: Tensor,
    ) -> None:
        FakePackages._flash_attn_bwd(q, k, v, out, dout, softmax_lse, causal=is_causal, **gradients)


@pytest.fixture
def fake_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.flash_attn_3, "fwd", FakePackages.fwd, raising=False)
    monkeypatch.setattr(torch.ops.flash_attn_3, "bwd", FakePackages.bwd, raising=False)
    for name, contents in {
        "flash_attn": {"flash_attn_func": FakePackages.flash_attn_func},
        "flash_attn.cute": {},
        "flash_attn.cute.interface": {
            "_flash_attn_fwd": FakePackages._flash_attn_fwd,
            "_flash_attn_bwd": FakePackages._flash_attn_bwd,
        },
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("backend", ["fa2", "fa3", "fa4"])
@pytest.mark.usefixtures("fake_packages")
def test_calls_into_the_packages(backend: str) -> None:
    """Arguments, returned tuples, gradients and the graph around them, without the packages or a card."""
    function = LOADERS[backend]()
    *inputs, grad = Shape(2, 37, 6, 2, 16, torch.float32, torch.device("cpu")).inputs()
    expected = forward_backward(eager, inputs, grad)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert tracing_obstacle(function, Shape(1, 5, 6, 2, 16, torch.float32, torch.device("cpu"))) is None
    for candidate in (function, compiled):
        for a, b in zip(forward_backward(candidate, inputs, grad), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_fa4_keeps_its_compiled_kernels_where_compiled_kernels_are_kept(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(os, "environ", {"MFUBENCH_CACHE": str(tmp_path)})
    with contextlib.suppress(ImportError):
        load_fa4()
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash-attention-4")


@pytest.mark.parametrize("backend", FLASH)
@pytest.mark.usefixtures("fake_packages")
def test_flash_kernels_are_sound_operators(backend: str) -> None:
    q, k, v, grad = Shape(1, 5, 4, 2, 8, torch.float32, torch.device("cpu")).inputs()
    sound = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward, packed_backward = PACKED[backend]
    torch.library.opcheck(forward, (q, k, v), test_utils=sound)
    out, log_sum_exp = (x.detach() for x in forward(q, k, v))
    qkv = torch.cat([x.detach() for x in (q, k, v)], dim=2).flatten(2)
    torch.library.opcheck(packed_backward, (grad, qkv, out, log_sum_exp, 4, 2), test_utils=sound)


@pytest.mark.parametrize("backend", FLASH)
@pytest.mark.usefixtures("fake_packages")
def test_packed_gradient_is_the_three_side_by_side(backend: str) -> None:
    q, k, v, grad = Shape(2, 9, 6, 2, 8, torch.float32, torch.device("cpu")).inputs()
    LOADERS[backend]()
    out = FLASH[backend].attention(q, k, v)
    expected = torch.cat(torch.autograd.grad(out, (q, k, v), grad), dim=2).flatten(2)
    qkv = torch.cat([x.detach() for x in (q, k, v)], dim=2).flatten(2)
    forward, backward = PACKED[backend]
    found = backward(grad, qkv, *(x.detach() for x in forward(q, k, v)), 6, 2)
    torch.testing.assert_close(found, expected)


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that is searched first, with nothing of the packages of FlashAttention-3 anywhere else."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("flash_attn_3", "xformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_fa3_of_its_own_package_comes_first(own_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing its library is what registers the operators."""
    (own_path / "flash_attn_3").mkdir()
    (own_path / "flash_attn_3/__init__.py").touch()
    (own_path / "flash_attn_3/_C.py").write_text("raise OSError('undefined symbol: of another torch')\n")
    (own_path / "xformers/flash_attn_3").mkdir(parents=True)
    (own_path / "xformers/flash_attn_3/_C.so").touch()
    with pytest.raises(OSError, match="of another torch"):
        load_fa3()
    assert "xformers" not in sys.modules


def test_fa3_of_xformers_is_its_library_alone(own_path: Path) -> None:
    (own_path / "xformers/flash_attn_3").mkdir(parents=True)
    (own_path / "xformers/__init__.py").write_text("raise RuntimeError('built for another torch')\n")
    with pytest.raises(ImportError, match=r"no flash_attn_3/_C\.so in xformers"):
        load_fa3()
    library = own_path / "xformers/flash_attn_3/_C.abi3.so"
    library.write_bytes(b"no library")
    with pytest.raises(OSError, match=r"flash_attn_3/_C\.abi3\.so"):
        load_fa3()


def test_a_machine_without_fa3_is_told_which_packages_have_it(own_path: Path) -> None:
    reason = try_backend("fa3", Shape(1, 64, 2, 2, 64, torch.bfloat16, torch.device("cuda")))[1]
    assert reason is not None and reason.startswith("FlashAttention-3 (flash_attn_3, or xformers up to 0.0.34")
    assert "no module named flash_attn_3, and no flash_attn_3/_C.so in xformers" in reason


@pytest.mark.parametrize("requested", FALLBACKS)
def test_fallback_chain_on_a_cpu(requested: str) -> None:
    """Down to what runs here, with one reason for each step."""
    function, choice = resolve_on_cpu(requested)
    assert choice.requested == requested
    assert choice.used == ("eager" if requested == "eager" else "sdpa")
    assert function is (eager if requested == "eager" else sdpa)
    passed_over = [requested, *FALLBACKS[requested]]
    passed_over = passed_over[: passed_over.index(choice.used)]
    reasons = choice.reason.split("; ") if choice.reason else []
    assert [reason.split(":")[0] for reason in reasons] == passed_over
    assert all("needs a CUDA device, not cpu" in reason for reason in reasons)


def test_fa3_falls_to_fa2_then_sdpa_then_eager() -> None:
    assert FALLBACKS["fa3"] == ("fa2", "sdpa", "eager")


def test_auto_on_a_cpu() -> None:
    function, choice = resolve_on_cpu("auto")
    assert function is sdpa and choice.used == "sdpa" and choice.reason is not None


def resolve_on_cpu(requested: str) -> tuple[attention.AttentionFunction, attention.Choice]:
    return resolve_attention(
        requested,
        device="cpu",
        dtype=torch.float32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        seq_len=32,
    )


def test_reasons_of_a_cuda_device_without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons themselves need no card: float32 is judged before, a missing package at import."""
    cuda = torch.device("cuda")
    for name in ("fa4", "fa3", "fa2", "cudnn"):
        assert "no float32 kernel" in str(try_backend(name, Shape(1, 64, 2, 2, 64, torch.float32, cuda))[1])
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    reason = try_backend("fa2", Shape(1, 64, 2, 2, 64, torch.bfloat16, cuda))[1]
    assert "flash-attn cannot be imported" in str(reason)


def test_broken_build_becomes_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package built for another torch raises something else than ImportError when it is imported."""

    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise OSError("undefined symbol: _ZN3c104cuda9SetDeviceEi\nmore lines")

    monkeypatch.setitem(sys.modules, "flash_attn", Broken("flash_attn"))
    reason = try_backend("fa2", Shape(1, 64, 2, 2, 64, torch.bfloat16, torch.device("cuda")))[1]
    assert reason == ("flash-attn cannot be imported (OSError: undefined symbol: _ZN3c104cuda9SetDeviceEi)")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda q, k, v: sdpa(q, k, v.flip(1)), "gives wrong results here"),
        (lambda q, k, v: q * k.mean() * v.mean(), "gives wrong results here"),
        (lambda q, k, v: q @ k, "does not run on this device"),
    ],
)
def test_kernel_that_does_not_work_is_not_taken(
    function: attention.AttentionFunction, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOADERS, "sdpa", lambda: function)
    chosen, choice = resolve_on_cpu("sdpa")
    assert chosen is eager and choice.used == "eager"
    assert choice.reason is not None and choice.reason.startswith("sdpa: ") and message in choice.reason


def test_kernel_that_cannot_be_traced_is_noticed() -> None:
    """An older build that does not tell torch the shapes of its results."""

    def untraceable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q.detach().numpy()
        return eager(q, k, v)

    shape = Shape(1, 9, 4, 2, 8, torch.float32, torch.device("cpu"))
    assert tracing_obstacle(untraceable, shape) is not None
    assert tracing_obstacle(sdpa, shape) is None and tracing_obstacle(eager, shape) is None


def test_backends_for_the_doctor() -> None:
    backends = attention_backends("cpu")
    assert list(backends) == ["fa4", "fa3", "fa2", "cudnn", "sdpa", "eager"]
    assert backends["sdpa"] is None and backends["eager"] is None
    assert "CUDA" in str(backends["fa3"])


def test_choosing_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    resolve_on_cpu("fa3")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a card where there is none, and an empty cache."""
    monkeypatch.setenv("MFUBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")


TIMES_S = {"cudnn": 0.99, "fa3": 1.5, "fa4": 1.01, "fa2": 2.0, "sdpa": 3.0}


@pytest.mark.parametrize(
    ("works", "used"),
    [
        (("cudnn", "fa3", "fa4", "fa2", "sdpa"), "fa4"),  # within 3 % of the fastest, and first in order
        (("cudnn", "fa3", "fa2", "sdpa"), "cudnn"),  # the fastest, though fa3 comes before it
        (("fa3", "fa2", "sdpa"), "fa3"),
        (("sdpa",), "sdpa"),
        ((), "eager"),
    ],
)
def test_auto_takes_the_fastest_that_works(
    works: tuple[str, ...], used: str, monkeypatch: pytest.MonkeyPatch, a_card: None
) -> None:
    """With times in place of a card."""

    def pretend(name: str, shape: Shape) -> tuple[attention.AttentionFunction | None, str | None]:
        return (sdpa, None) if name in works else (None, f"is missing ({name}!)")

    monkeypatch.setattr(attention, "try_backend", pretend)
    monkeypatch.setattr(attention, "measure", lambda functions, *_, **__: {name: TIMES_S[name] for name in functions})
    shape = Shape(4, 2048, 8, 8, 128, torch.bfloat16, torch.device("cuda"))
    _, choice = attention.choose_fastest(shape)
    assert (choice.requested, choice.used) == ("auto", used)
    for name in attention.AUTO_ORDER:
        expected = f"{name} {TIMES_S[name] * 1e3:.3f} ms" if name in works else f"is missing ({name}!)"
        assert expected in str(choice.reason)


def test_auto_leaves_out_what_fails_at_the_real_shape(monkeypatch: pytest.MonkeyPatch, a_card: None) -> None:
    def measure(functions: dict[str, Any], *_: Any, **options: Any) -> dict[str, float]:
        if "fa3" in functions:
            raise RuntimeError("CUDA out of memory\nsecond line")
        return {name: TIMES_S[name] for name in functions}

    monkeypatch.setattr(attention, "try_backend", lambda name, shape: (sdpa, None))
    monkeypatch.setattr(attention, "measure", measure)
    shape = Shape(4, 2048, 8, 8, 128, torch.bfloat16, torch.device("cuda"))
    _, choice = attention.choose_fastest(shape)
    assert choice.used == "fa4" and "fa3 does not run at B4 T2048 H8/8 D128 bfloat16" in str(choice.reason)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, a_card: None) -> list[dict[str, float]]:
    """Times that the next measurements will find, taken from the front."""
    found: list[dict[str, float]] = []

    def measure(functions: dict[str, Any], shape: Shape, rounds: int = 8, calls: int = 5) -> dict[str, float]:
        return found.pop(0) if rounds else {}

    monkeypatch.setattr(
        attention, "try_backend", lambda name, shape: (sdpa, None) if name in ("fa3", "cudnn") else (None, "")
    )
    monkeypatch.setattr(attention, "measure", measure)
    return found


def choice_at(batch_size: int) -> Choice:
    return attention.choose_fastest(Shape(batch_size, 2048, 8, 8, 128, torch.bfloat16, torch.device("cuda")))[1]


def test_what_is_about_as_fast_is_chosen_alike_in_the_next_process(measured: list[dict[str, float]]) -> None:
    """1.5 % apart, then 20 % by a disturbance: two arms of a comparison would have differed in their attention."""
    measured += [{"fa3": 0.963, "cudnn": 0.939}, {"fa3": 1.152, "cudnn": 0.943}]
    first, second = choice_at(8), choice_at(8)
    assert first.used == second.used == "fa3"
    assert "fa3 963.000 ms" in str(first.reason) and "kept in the cache" not in str(first.reason)
    assert "fa3 963.000 ms" in str(second.reason) and "kept in the cache" in str(second.reason)
    assert choice_at(4).used == "cudnn"  # another shape is measured


@pytest.mark.parametrize("change", ["packages", "card"])
def test_times_hold_for_a_card_and_its_packages(
    change: str, measured: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured += [{"fa3": 1.0, "cudnn": 1.0}, {"fa3": 2.0, "cudnn": 1.0}]
    assert choice_at(8).used == "fa3"
    if change == "card":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    else:
        monkeypatch.setattr(attention_times, "installed_version", lambda package: "99")
    assert choice_at(8).used == "cudnn"


@pytest.mark.parametrize("text", ["", "{", '{"times_s": {"fa3": "soon"}}'])
def test_a_damaged_file_of_times_is_measured_anew(text: str, measured: list[dict[str, float]], tmp_path: Path) -> None:
    measured += [{"fa3": 1.0, "cudnn": 1.0}, {"fa3": 2.0, "cudnn": 1.0}]
    assert choice_at(8).used == "fa3"
    (file,) = tmp_path.glob("attention/*.json")
    file.write_text(text)
    assert choice_at(8).used == choice_at(8).used == "cudnn"  # measured once more, and kept


def test_a_cache_that_cannot_be_written_is_none(measured: list[dict[str, float]], tmp_path: Path) -> None:
    (tmp_path / "attention").write_text("a file where the folder should be")
    measured += [{"fa3": 1.0, "cudnn": 1.0}, {"fa3": 2.0, "cudnn": 1.0}]
    assert [choice_at(8).used, choice_at(8).used] == ["fa3", "cudnn"]


def test_flops_of_a_shape_are_causal() -> None:
    """Forward and backward are 3.5 times the forward: 4 * B * H * T^2 * D / 2."""
    shape = Shape(8, 2048, 18, 18, 128, torch.bfloat16, torch.device("cpu"))
    assert shape.flops == 3.5 * 4 * 8 * 18 * 2048**2 * 128 / 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_auto_measures_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MFUBENCH_CACHE", str(tmp_path))
    _, choice = resolve_attention(
        "auto",
        device="cuda",
        dtype=torch.bfloat16,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        seq_len=2048,
    )
    assert choice.used in attention.AUTO_ORDER
    assert choice.reason is not None and f"{choice.used} " in choice.reason and "TFLOP/s" in choice.reason


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_model_runs_the_kernel_it_was_given(backend: str) -> None:
    decoder = build_model(run_config(QWEN3, attention=backend), device="cpu")
    batch = tokens(2, 25)
    kernels = profile_kernels(lambda: decoder(batch[:, :-1], batch[:, 1:]).backward(), "cpu")
    assert kernels_match(backend, kernels, "cpu") is None
    other = {"sdpa": "eager", "eager": "sdpa"}[backend]
    assert f"attention {other} was claimed" in str(kernels_match(other, kernels, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", LOADERS)
def test_model_on_cuda_runs_the_kernel_it_was_given(backend: str, compiled: bool) -> None:
    """A bfloat16 model, forward and backward, its blocks compiled or not: the kernels' names are the proof."""
    model = {**QWEN3, "head_dim": 64, "hidden_size": 256}
    config = run_config(model, attention=backend, dtype="bfloat16", seq_len=128)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "seq_len": 128}
    function, choice = resolve_attention(backend, device="cuda", dtype=torch.bfloat16, **heads)
    if choice.used != backend:
        pytest.skip(str(choice.reason))
    decoder = build_model(config, device="cuda", attention=function)
    if compiled:
        torch._dynamo.reset()
        for block in decoder.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
    batch = tokens(2, 129).cuda()

    def step() -> None:
        decoder(batch[:, :-1], batch[:, 1:]).backward()

    step()
    assert kernels_match(backend, profile_kernels(step, "cuda"), "cuda") is None
