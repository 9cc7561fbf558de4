"""Which kernels ran: names from one profiled step, and whether they are the ones an attention backend claims."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mfubench.kernel_families import CUDA_FAMILIES, families_of
from mfubench.run_log import Kernels

CPU_FAMILIES = {"sdpa": r"scaled_dot_product"}

# Inductor names its fused elementwise kernels after operators they stand next to, attention and matmuls included;
# its real matmuls are triton_tem_*.
INDUCTOR_FUSED = re.compile(r"triton_(poi|red|per|for)_|_cpp_fused_")
ATTENTION = re.compile(r"flash|fmha|sdpa|scaled_dot_product|compute_dot_do_o|convert_dq", re.IGNORECASE)
MATMUL = re.compile(r"gemm|gemv|nvjet|xmma|splitk|cublas|triton_tem_|aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$", re.I)
SOFTMAX = re.compile(r"(?<!log)(?<!log_)softmax(?!.*LogSoftMax)", re.IGNORECASE)  # not the loss's


def profile_kernels(step: Callable[[], None], device: torch.device | str) -> Kernels:
    """Run `step` once under the profiler and name what ran: kernels on CUDA, operators on a CPU.

    `attention` holds the fused attention kernels or, where none ran, the softmax kernels (plain attention); names are
    distinct and sorted, `other_count` counts distinct names too.
    """
    quiet_profiler()
    cuda = torch.device(device).type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    names = {event.name for event in profiler.events() if event.device_type == wanted}
    if cuda:
        return classify({name for name in names if not name.startswith(("Memcpy", "Memset"))})
    return classify({name for name in names if "::" in name and not name.startswith("autograd::")})


def quiet_profiler() -> None:
    """Before the first profile of a process, or the profiler reports its own start and stop."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def classify(names: set[str]) -> Kernels:
    """Sort kernel names into attention, matmul and the rest."""
    single = {name for name in names if not INDUCTOR_FUSED.search(name)}
    attention = {name for name in single if ATTENTION.search(name)}
    matmul = {name for name in single - attention if MATMUL.search(name)}
    if not attention:
        attention = {name for name in names if SOFTMAX.search(name)}
    return Kernels(attention=sorted(attention), matmul=sorted(matmul), other_count=len(names - attention - matmul))


def kernels_match(used: str, kernels: Kernels, device: torch.device | str) -> str | None:
    """None where the kernels that ran are those of the attention backend `used`, else a sentence saying how not."""
    cuda = torch.device(device).type == "cuda"
    families = CUDA_FAMILIES if cuda else CPU_FAMILIES
    if not kernels.attention and not kernels.matmul:
        return "the profiler saw no kernels, so nothing proves which attention ran"
    ran = families_of(kernels.attention, families)
    if ran == ([] if used == "eager" else [used]):
        return None
    seen = ", ".join(kernels.attention[:3]) or "no attention kernel"
    return f"attention {used} was claimed, but the kernels of {' and '.join(ran) or 'no fused backend'} ran: {seen}"
