"""What is used instead of what was asked for, with its reason; and the state that follows from it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import types

import pytest
import torch
from train.train_runs import losses, run_here, tiny_config

from mfubench.config import ConfigError
from mfubench.model import loss as loss_forms
from mfubench.run_log import Step
from mfubench.train import choices, loop, training
from mfubench.train.choices import resolve, resolve_loss_and_cross_entropy
from mfubench.train.optimizer import Optimizer
from mfubench.train.process import Process, choose_device
from mfubench.train.setup import build_engine, inductor_cache
from mfubench.train.step import TrainStep
from mfubench.train.trackers import log_steps, open_trackers

ALONE = Process(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))


def test_every_fallback_has_its_reason():
    used = resolve(tiny_config(cuda_graphs=True, tf32=True, fp8=False, parallelism="zero1"), ALONE).used
    for name, reason in (
        ("cuda_graphs", "a CPU has no CUDA graphs"),
        ("tf32", "a CPU has no TF32"),
        ("parallelism", "one process"),
    ):
        assert used[name].used in ("false", "none")
        assert used[name].reason == reason
    assert used["fp8"].reason is None  # was not asked for
    fp8 = resolve(tiny_config(dtype="bfloat16", fp8=True), ALONE).used["fp8"]
    assert (fp8.requested, fp8.used) == ("true", "false")
    assert "8.9" in fp8.reason


def test_without_rope_its_key_says_what_became_of_the_split():
    gpt2 = {"norm": "layernorm", "position": "learned", "mlp": "gelu"}
    for attention in ("eager", "sdpa"):
        resolved = resolve(tiny_config(model=gpt2, attention=attention, kernels={"rope": "auto"}), ALONE)
        rope = resolved.used["rope"]
        found = f"the model has no RoPE, and {attention} attention does not write its three gradients side by side"
        assert (rope.requested, rope.used, rope.reason) == ("auto", "plain", found)
        assert resolved.operations.packed_attention is None
    rope = resolve(tiny_config(model=gpt2), ALONE).used["rope"]
    assert (rope.used, rope.reason) == ("plain", None)  # was not asked for
    rope = resolve(tiny_config(kernels={"rope": "auto"}), ALONE).used["rope"]
    assert (rope.used, rope.reason) == ("plain", "Triton's kernels need a CUDA device, not cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_try_of_accumulating_matmuls_sees_a_wrong_product(monkeypatch, dtype):
    cpu = torch.device("cpu")
    assert choices.try_accumulating(cpu, dtype)
    right = choices.add_product

    def without_the_last_row(total, left, right_factor, overwrite=False):
        rows = slice(0, total.shape[0] // 64 * 64)
        right(total[rows], left[rows], right_factor, overwrite)

    monkeypatch.setattr(choices, "add_product", without_the_last_row)
    assert not choices.try_accumulating(cpu, dtype)


@pytest.mark.parametrize(
    "asked, liger, runs, loss, cross_entropy, reason",
    [
        ("fused", True, True, "fused", "plain", "loss: fused has a cross-entropy of its own"),
        ("fused", False, True, "chunked", "fused", None),
        ("fused", False, False, "chunked", "plain", "gives wrong results here"),
        ("auto", True, True, "full", "fused", None),  # in one kernel: not liger's
        ("auto", True, False, "fused", "plain", "gives wrong results here"),
    ],
)
def test_the_own_cross_entropy_goes_by_the_loss_that_runs(monkeypatch, asked, liger, runs, loss, cross_entropy, reason):
    """As on a card, not compiled; with or without liger-kernel, and a try of the own kernel that agrees or not."""
    found = (lambda hidden, weight, labels: hidden.sum(), "") if liger else (None, "needs liger-kernel")
    monkeypatch.setattr(loss_forms, "try_fused", lambda device, capturable: found)
    monkeypatch.setattr(choices, "try_fused_cross_entropy", lambda device, dtype: runs)
    config = tiny_config(loss=asked, kernels={"cross_entropy": "fused"})
    card = torch.device("cuda")
    function, chosen, own = resolve_loss_and_cross_entropy(
        config, card, torch.bfloat16, compile_backend=None, capturable=False
    )
    assert (chosen.requested, chosen.used) == (asked, loss)
    assert (own.requested, own.used, own.reason) == ("fused", cross_entropy, reason)
    if loss == "chunked":
        assert chosen.reason == "fused needs liger-kernel" and function.keywords["fused"] is (cross_entropy == "fused")
    if loss == "fused":
        assert function is found[0]


def test_without_cuda_no_loss_is_blamed_for_the_plain_cross_entropy():
    used = resolve(tiny_config(loss="fused", kernels={"cross_entropy": "fused"}), ALONE).used
    assert (used["loss"].used, used["cross_entropy"].used) == ("chunked", "plain")
    assert used["cross_entropy"].reason == "Triton's kernels need a CUDA device, not cpu"


def test_compile_without_a_compiler_falls_back_and_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    choice = resolve(tiny_config(compile="block"), ALONE).used["compile"]
    assert choice.used == "none"
    assert "C++ compiler" in choice.reason
    eager = resolve(tiny_config(compile="block", compile_backend="aot_eager"), ALONE).used["compile"]
    assert eager.used == "block"


def test_graphs_that_cannot_be_captured_fall_back_or_skip(monkeypatch, data, tmp_path):
    def as_on_a_card(config, device, parallelism):
        return choices.switch(config.cuda_graphs, None)

    def fail(step, inputs, labels):
        step.forward_backward(inputs, labels)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(choices, "resolve_cuda_graphs", as_on_a_card)
    monkeypatch.setattr(loop, "stream_of_the_run", lambda resolved: contextlib.nullcontext())
    monkeypatch.setattr(training, "GraphedStep", fail)
    eager = run_here(tiny_config(max_iters=6), data, tmp_path / "eager")
    log = run_here(tiny_config(max_iters=6, cuda_graphs=True), data, tmp_path / "graphs")
    assert log.used["cuda_graphs"].used == "false"
    assert log.used["cuda_graphs"].reason.endswith("operation not permitted when stream is capturing")
    assert losses(log) == losses(eager)
    skipped = run_here(tiny_config(cuda_graphs=True, requires=("cuda_graphs",)), data, tmp_path / "skipped")
    assert skipped.status == "skipped" and "capture failed" in skipped.reason


def test_an_error_before_the_capture_is_none_of_the_capture(monkeypatch, data, tmp_path):
    """A rank that fails in the warm-up has left the sums over the ranks that the others are in: it has to end."""

    def fail(step, inputs, labels):
        raise RuntimeError("planted: a link is down")

    monkeypatch.setattr(choices, "resolve_cuda_graphs", lambda config, *_: choices.switch(config.cuda_graphs, None))
    monkeypatch.setattr(loop, "stream_of_the_run", lambda resolved: contextlib.nullcontext())
    monkeypatch.setattr(training, "warm_up", fail)
    with pytest.raises(AssertionError, match="planted: a link is down"):
        run_here(tiny_config(max_iters=6, cuda_graphs=True), data, tmp_path)


def test_a_run_without_contrast_is_skipped_with_its_reason(data, tmp_path):
    """Where FlashAttention ends in torch's kernel, comparing that kernel with it would measure nothing."""
    same = run_here(tiny_config(attention="sdpa", contrast_attention="fa2"), data, tmp_path / "same")
    assert same.status == "skipped" and not same.steps
    assert same.reason.startswith("no contrast: fa2, which it is compared with, ends in sdpa here as well")
    other = run_here(tiny_config(attention="eager", contrast_attention="fa2", max_iters=2), data, tmp_path / "other")
    assert other.status == "ok"


def test_settings_that_change_kernels_have_compile_caches_of_their_own():
    folders = {
        inductor_cache(config, resolve(config, ALONE))
        for config in (
            tiny_config(),
            tiny_config(attention="eager"),
            tiny_config(dtype="bfloat16"),
            tiny_config(loss="chunked"),
            tiny_config(compile="block", compile_backend="aot_eager"),
            tiny_config(compile_mode="max-autotune-no-cudagraphs"),
        )
    }
    assert len(folders) == 6
    config = tiny_config(max_iters=7, name="test/other", seed=9)
    assert inductor_cache(config, resolve(config, ALONE)) in folders


def test_blocks_share_compiled_graphs_however_many_there_are():
    config = tiny_config(model={"num_hidden_layers": 12}, compile="block", compile_backend="aot_eager")
    model, engine = build_engine(config, resolve(config, ALONE), ALONE)
    optimizer = Optimizer(engine, config.optimizer, process=ALONE, scale_loss=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tokens = torch.randint(97, (3, 2, 17))
    TrainStep(model, engine, optimizer)(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert all("_orig_mod" not in name for name, _ in model.named_parameters())


def test_a_device_that_is_not_there_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device(tiny_config(device="cuda"), 0)


class FakeWriter:
    """Stands in for torch.utils.tensorboard.SummaryWriter, which needs a package of its own."""

    values: list[tuple[str, float, int]] = []

    def __init__(self, folder: str):
        self.folder = folder

    def add_text(self, name: str, text: str) -> None:
        assert name == "config" and "hidden_size" in text

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.append((name, value, step))

    def close(self) -> None:
        self.values.append(("closed", 0.0, 0))


def test_tensorboard_gets_every_step(monkeypatch, data, tmp_path):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setenv("MFUBENCH_TRACKERS", "tensorboard")
    log = run_here(tiny_config(max_iters=5), data, tmp_path)
    values = [(step, value) for name, value, step in FakeWriter.values if name == "loss"]
    assert values == [(step.step, step.loss) for step in log.steps]
    assert FakeWriter.values[-1][0] == "closed"


def test_wandb_gets_the_config_and_finite_values(monkeypatch, tmp_path):
    logged = []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("finished")
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: logged.append(options["config"]["seq_len"]) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("MFUBENCH_TRACKERS", "wandb")
    trackers = open_trackers(tiny_config(), tmp_path)
    step = Step(
        step=3,
        phase="measured",
        step_time_s=0.5,
        data_time_s=0,
        tokens=100,
        loss=None,
        learning_rate=0.1,
        grad_norm=1.0,
    )
    log_steps(trackers, [step])
    trackers[0].close()
    assert logged[0] == 16 and logged[-1] == "finished"
    assert logged[1] == (3, {"grad_norm": 1.0, "learning_rate": 0.1, "step_time_s": 0.5, "tokens_per_s": 200.0})


def test_trackers_that_are_unknown_or_missing_are_errors(monkeypatch, tmp_path):
    monkeypatch.setenv("MFUBENCH_TRACKERS", "mlflow")
    with pytest.raises(ConfigError, match="unknown tracker 'mlflow'"):
        open_trackers(tiny_config(), tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("MFUBENCH_TRACKERS", "wandb")
    with pytest.raises(ConfigError, match="wandb is not installed"):
        open_trackers(tiny_config(), tmp_path)
