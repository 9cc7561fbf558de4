"""What is used beside what was asked for: every setting that may fall back, resolved before anything is built."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._triton import has_triton

from mfubench.config import ConfigError, OptimizerConfig, RunConfig
from mfubench.decisions import ROW_MULTIPLE, WITHOUT_WHOLE_GRADIENTS, may_exchange, no_exchange
from mfubench.model import resolve_attention, resolve_loss
from mfubench.model.decoder import DTYPES
from mfubench.model.operations import Operations, join_split_and_attention, not_running, resolve_operations
from mfubench.model.weight_gradient import add_product
from mfubench.run_log import Choice
from mfubench.train.exchange import missing_on, not_by_itself
from mfubench.train.fsdp import no_whole_gradients
from mfubench.train.parallel import Piece
from mfubench.train.process import Process

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Resolved:
    """The functions that were chosen, and the record of every choice under the names of `config.Fallible`."""

    used: dict[str, Choice]
    attention: Function
    loss: Function
    operations: Operations
    contrast: Choice | None = None  # what the attention ends in that this run is to be compared with

    def fall_back(self, name: str, used: str, reason: str) -> None:
        """Note that a setting turned out not to be had, after it was chosen."""
        self.used[name] = Choice(requested=self.used[name].requested, used=used, reason=reason)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.used["dtype"].used]

    def is_on(self, switch: str) -> bool:
        return self.used[switch].used == "true"

    def missing(self, config: RunConfig) -> str | None:
        """Why this run would not be what its name says, as a sentence; None where it is.

        A required setting is not to be had here, or the run differs in attention from another that ends in the same
        kernel on this machine: their comparison would measure nothing.
        """
        attention = self.used["attention"].used
        if self.contrast is not None and self.contrast.used == attention:
            asked, reason = self.contrast.requested, self.contrast.reason
            return f"no contrast: {asked}, which it is compared with, ends in {attention} here as well ({reason})"
        lost = []
        for name in config.requires:
            choice = self.used[name]
            if choice.requested not in ("auto", choice.used):
                found = f"{choice.used} is what there is ({choice.reason})"
                lost.append(f"{name}: {choice.requested} was asked for, {found}")
        return f"required, but not to be had here: {'; '.join(lost)}" if lost else None


def resolve(config: RunConfig, process: Process) -> Resolved:
    """Decide every fallible setting for this machine."""
    model, device = config.model, process.device
    dtype = resolve_dtype(config, device)
    compiled = resolve_compile(config, device)
    fp8 = resolve_fp8(config, device)
    parallelism = resolve_parallelism(config)
    cuda_graphs = resolve_cuda_graphs(config, device, parallelism.used)

    def attention_of(requested: str) -> tuple[Function, Choice]:
        return resolve_attention(
            requested,
            device=device,
            dtype=DTYPES[dtype.used],
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            seq_len=config.seq_len,
            batch_size=config.micro_batch_size,
        )

    attention, attention_choice = attention_of(config.attention)
    contrast = attention_of(config.contrast_attention)[1] if config.contrast_attention else None
    loss, loss_choice, cross_entropy = resolve_loss_and_cross_entropy(
        config,
        device,
        DTYPES[dtype.used],
        compile_backend=config.compile_backend if compiled.used != "none" else None,
        capturable=cuda_graphs.used == "true",
    )
    # selective checkpointing keeps what matmuls have written; float8's outputs are views, which nothing may overwrite
    in_place = config.activation_checkpointing != "selective" and fp8.used == "false"
    operations, operation_choices = resolve_operations(
        config.kernels, model=model, device=device, dtype=DTYPES[dtype.used], in_place=in_place
    )
    operations, operation_choices["rope"] = join_split_and_attention(
        operations,
        operation_choices["rope"],
        attention_choice.used,
        attention,
        model=model,
        device=device,
        dtype=DTYPES[dtype.used],
        in_place=in_place,
    )
    weight_gradient = resolve_weight_gradient(config, device, DTYPES[dtype.used], parallelism.used, fp8.used)
    used = {
        "attention": attention_choice,
        "compile": compiled,
        "cuda_graphs": cuda_graphs,
        "loader": Choice(requested=config.loader.kind, used=config.loader.kind),
        "loss": loss_choice,
        "parallelism": parallelism,
        "dtype": dtype,
        "tf32": resolve_tf32(config, device),
        "fp8": fp8,
        **operation_choices,
        "cross_entropy": cross_entropy,
        "weight_gradient": weight_gradient,
        "reduction": resolve_reduction(config, process, weight_gradient.used),
        "adamw": resolve_adamw(config, device),
    }
    return Resolved(used=used, attention=attention, loss=loss, operations=operations, contrast=contrast)


def refuse_unlike(resolved: Resolved, process: Process) -> None:
    """Raises ConfigError, on all ranks, where they do not use the same of every choice. Collective.

    The run log tells of rank 0. A rank that fell back by itself would hold the others up unseen, or leave them waiting.
    """
    used = {name: (choice.used, choice.reason) for name, choice in resolved.used.items()}
    if resolved.contrast is not None:
        used["contrast_attention"] = resolved.contrast.used, resolved.contrast.reason
    first, *others = process.gather(used)
    for rank, other in enumerate(others, start=1):
        for name, (there, why_there) in other.items():
            here, why_here = first[name]
            if there != here:
                raise ConfigError(
                    f"the ranks would not compute alike: {name}: {here} on rank 0 ({why_here or 'as asked'}), {there} "
                    f"on rank {rank} ({why_there or 'as asked'}); give all nodes the same cards, packages and "
                    "programs, or ask for what every rank has"
                )


def switch(requested: bool, obstacle: str | None) -> Choice:
    """A boolean setting: off with a reason where it was asked for and something stands in its way."""
    used = requested and obstacle is None
    return Choice(
        requested=str(requested).lower(), used=str(used).lower(), reason=obstacle if requested and not used else None
    )


def resolve_dtype(config: RunConfig, device: torch.device) -> Choice:
    wanted = config.dtype
    if device.type == "cuda" and wanted == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        return Choice(requested=wanted, used="float16", reason=f"{name} has no bfloat16 arithmetic")
    return Choice(requested=wanted, used=wanted)


def resolve_tf32(config: RunConfig, device: torch.device) -> Choice:
    obstacle = None
    if device.type != "cuda":
        obstacle = "a CPU has no TF32"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        obstacle = f"{torch.cuda.get_device_name(device)} has no TF32"
    return switch(config.tf32, obstacle)


def resolve_compile(config: RunConfig, device: torch.device) -> Choice:
    wanted = config.compile
    reason = None
    if wanted != "none" and config.compile_backend == "inductor":
        if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            reason = "torch.compile on a CPU needs a C++ compiler (g++ or clang++), and none is on the PATH"
        elif device.type == "cuda" and not has_triton():
            reason = "torch.compile on CUDA needs triton, which is not installed or knows no such card"
    return Choice(requested=wanted, used="none" if reason else wanted, reason=reason)


def resolve_cuda_graphs(config: RunConfig, device: torch.device, parallelism: str) -> Choice:
    obstacle = None
    if device.type != "cuda":
        obstacle = "a CPU has no CUDA graphs"
    elif parallelism == "fsdp":
        obstacle = "fsdp allocates its gathered weights anew in each step; ddp and zero1 can be captured"
    return switch(config.cuda_graphs, obstacle)


def resolve_parallelism(config: RunConfig) -> Choice:
    if config.world_size == 1 and config.parallelism != "none":
        return Choice(requested=config.parallelism, used="none", reason="one process")
    return Choice(requested=config.parallelism, used=config.parallelism)


def resolve_fp8(config: RunConfig, device: torch.device) -> Choice:
    obstacle = None
    if config.fp8:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
            obstacle = "float8 matmuls need a CUDA device of compute capability 8.9 or newer"
        else:
            try:
                import torchao.float8  # noqa: F401
            except Exception as error:  # a wheel built for another torch fails with more than ImportError
                obstacle = f"torchao.float8 cannot be imported ({error})"
    return switch(config.fp8, obstacle)


def resolve_reduction(config: RunConfig, process: Process, weight_gradient: str) -> Choice:
    wanted, obstacle = config.communication.reduction, no_exchange(config)
    if wanted == "collective" or config.world_size == 1:
        return Choice(requested=wanted, used="collective", reason=obstacle if wanted == "exchange" else None)
    if wanted == "auto" and obstacle is None:
        obstacle = not_by_itself(config, process.device)
    if obstacle is None and config.parallelism == "fsdp" and weight_gradient != "accumulate":
        obstacle = WITHOUT_WHOLE_GRADIENTS
    if process.on_cuda and no_exchange(config) is None and may_exchange(config):
        obstacle = missing_on(process, obstacle)  # all ranks ask, also those that know of an obstacle
    return Choice(requested=wanted, used="collective" if obstacle else "exchange", reason=obstacle)


def resolve_weight_gradient(
    config: RunConfig, device: torch.device, dtype: torch.dtype, parallelism: str, fp8: str
) -> Choice:
    """auto: where it saves a pass over memory, on CUDA."""
    wanted, obstacle = config.kernels.weight_gradient, None
    if wanted == "plain":
        return either(wanted, "accumulate", None)
    if parallelism == "fsdp" and (reason := no_whole_gradients(config, dtype, device)) is not None:
        obstacle = reason
    elif fp8 == "true":
        obstacle = "float8 matmuls do not accumulate in float32"
    elif config.compile != "none" and config.compile_mode == "reduce-overhead":
        obstacle = "reduce-overhead captures graphs that cannot tell the first micro-step from the others"
    elif device.type == "cuda":
        obstacle = failure_of(lambda: try_accumulating(device, dtype))
    elif wanted == "auto":
        obstacle = "no CUDA"
    return either(wanted, "accumulate", obstacle)


def resolve_loss_and_cross_entropy(
    config: RunConfig, device: torch.device, dtype: torch.dtype, *, compile_backend: str | None, capturable: bool
) -> tuple[Function, Choice, Choice]:
    """The loss function, its choice and that of the own cross-entropy, each of which may decide about the other.

    A fused loss has a cross-entropy of its own, so that none else is tried; where it is not to be had, the loss that
    takes its place can have the own one. Any other loss is resolved after it: `auto` goes by whether it runs.
    """

    def loss_of(fused_cross_entropy: bool) -> tuple[Function, Choice]:
        return resolve_loss(
            config.loss,
            device=device,
            vocab_size=config.model.vocab_size,
            compile_backend=compile_backend,
            capturable=capturable,
            fused_cross_entropy=fused_cross_entropy,
        )

    if config.loss == "fused":
        loss, choice = loss_of(fused_cross_entropy=False)
        if choice.used == "fused":
            taken = "loss: fused has a cross-entropy of its own"
            return loss, choice, either(config.kernels.cross_entropy, "fused", taken)
    cross_entropy = resolve_cross_entropy(config, device, dtype)
    loss, choice = loss_of(fused_cross_entropy=cross_entropy.used == "fused")
    return loss, choice, cross_entropy


def resolve_cross_entropy(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Choice:
    """For a loss without a cross-entropy of its own."""
    obstacle = None
    if device.type != "cuda":
        obstacle = f"Triton's kernels need a CUDA device, not {device.type}"
    elif config.kernels.cross_entropy != "plain":
        obstacle = failure_of(lambda: try_fused_cross_entropy(device, dtype))
    return either(config.kernels.cross_entropy, "fused", obstacle)


def resolve_adamw(config: RunConfig, device: torch.device) -> Choice:
    obstacle = None
    if device.type != "cuda":
        obstacle = f"Triton's kernels need a CUDA device, not {device.type}"
    elif config.kernels.adamw != "plain":
        obstacle = failure_of(lambda: try_fused_adamw(device))
    return either(config.kernels.adamw, "fused", obstacle)


def either(requested: str, better: str, obstacle: str | None) -> Choice:
    """A kernel that is `plain` where it is asked for or where something stands in the better one's way."""
    if requested == "plain":
        return Choice(requested=requested, used="plain")
    return Choice(requested=requested, used="plain" if obstacle else better, reason=obstacle)


def failure_of(attempt: Callable[[], bool]) -> str | None:
    """Why a small try on the device says no, or None."""
    try:
        return None if attempt() else "gives wrong results here"
    except Exception as error:
        return not_running(error)


def try_accumulating(device: torch.device, dtype: torch.dtype) -> bool:
    """Of a number of rows that makes one product, and of one that makes two."""
    right = torch.ones(16, 24, device=device, dtype=dtype)
    totals = []
    for rows in (ROW_MULTIPLE, ROW_MULTIPLE + 1):
        left, total = torch.ones(rows, 16, device=device, dtype=dtype), torch.full((rows, 24), torch.nan, device=device)
        add_product(total, left, right, overwrite=True)
        add_product(total, left, right)
        totals.append(total)
    return all(bool((total == 32).all()) for total in totals)


def try_fused_cross_entropy(device: torch.device, dtype: torch.dtype) -> bool:
    """Loss and gradient of a few rows, padded on the right, against torch's in float32."""
    from mfubench.model.fused.cross_entropy import mean_cross_entropy

    values = torch.randn(5, 9001, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
    labels = torch.arange(5, device=device) * 1800
    leaf, exact = values.clone().requires_grad_(), values[:, :9000].float().requires_grad_()
    found, expected = mean_cross_entropy(leaf.clone(), labels, 9000), F.cross_entropy(exact, labels)
    (gradient,), (other,) = torch.autograd.grad(found, leaf), torch.autograd.grad(expected, exact)
    close = torch.allclose(gradient[:, :9000].float(), other, rtol=2**-6, atol=1e-6)
    return close and bool((gradient[:, 9000:] == 0).all()) and torch.allclose(found, expected, rtol=1e-4)


def try_fused_adamw(device: torch.device) -> bool:
    """One step of both forms from the same state, in numbers whose rounding does not show."""
    from mfubench.train.fused_adamw import fused_adamw

    options = OptimizerConfig(learning_rate=0.125)
    master, gradient, average, square = (torch.full((300,), x, device=device) for x in (1.0, 6.0, 0.0, 0.0))
    rate, divisor, step = (torch.full((), x, device=device) for x in (options.learning_rate, 3.0, 0.0))
    compute = torch.zeros(300, dtype=torch.bfloat16, device=device)
    fused_adamw(
        [Piece(master, decay=True, compute=compute)],
        [gradient],
        [average],
        [square],
        [step],
        config=options,
        learning_rate=rate,
        divisor=divisor,
        found_inf=None,
    )
    plain = torch.ones(300, device=device, requires_grad=True)
    plain.grad = torch.full_like(plain, 2.0)
    betas = (options.beta1, options.beta2)
    torch.optim.AdamW(
        [plain], lr=options.learning_rate, betas=betas, eps=options.eps, weight_decay=options.weight_decay, fused=True
    ).step()
    close = torch.allclose(master, plain.detach(), rtol=1e-6)
    return close and torch.equal(compute, master.bfloat16())
