"""What a kernel or an operator is for, by its name and the operators it was launched under. No torch.

Names alone tell matmuls, attention, collectives, the optimizer and compiled (inductor, triton) kernels. Plain
elementwise kernels of eager mode are told by what launched them. What neither tells is `elementwise` (a copy, a sum or
a product of unknown purpose) or `other`; both are shown, never spread over the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

MATMUL = "matmul"
ATTENTION = "attention"
NORM = "norm"
ROPE = "rope"
ACTIVATION = "activation"
RESIDUAL = "residual"
CAST = "cast"
ACCUMULATION = "gradient accumulation"
EMBEDDING = "embedding"
ELEMENTWISE = "elementwise"
LOSS = "loss"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
COPY = "copy"  # memcpy on the card, memset, fills: what no arithmetic asks for
OTHER = "other"
HOST = "host"  # a CPU's Python and autograd engine between operators; the GPU's gaps while the host was behind
QUEUE = "queue"  # gaps although the next kernel had been launched: the device's own, or a wait for another stream
DATA = "data"  # waiting for the batch

# In the order in which a step is told. Groups of elementwise work, whose ideal is memory traffic:
ELEMENTWISE_GROUPS = (NORM, ROPE, ACTIVATION, RESIDUAL, CAST, ACCUMULATION, EMBEDDING, ELEMENTWISE)
COMPUTE = (MATMUL, ATTENTION, *ELEMENTWISE_GROUPS, LOSS, OPTIMIZER, OTHER)
CATEGORIES = (*COMPUTE, COMMUNICATION, COPY, HOST, QUEUE, DATA)

COLLECTIVE = re.compile(r"nccl(Dev)?Kernel|^gloo:|^nccl:|^c10d::|RingLL|multimem_|one_shot_all_reduce", re.I)
BETWEEN_CARDS = "Memcpy PtoP"  # what a copy engine sends to another card
# Inductor names fused kernels after operators they stand next to, attention and matmuls included; its real matmuls
# are triton_tem_*.
FUSED = re.compile(r"triton_(poi|red|per|for)_|cpp_fused_")
FLASH = re.compile(r"flash|fmha|sdpa|scaled_dot_product|compute_dot_do_o|convert_dq|efficient_attention", re.I)
GEMM = re.compile(
    r"gemm|gemv|nvjet|xmma|splitk|cublas|triton_tem_|dot_kernel|"
    r"^aten::(mm|addmm|addmm_|bmm|baddbmm|_scaled_mm|linear|matmul|mkldnn_\w*)$",
    re.I,
)
ADAM = re.compile(r"adam|multi_tensor_apply|LpNorm|lpnorm|NormTwoOps|_foreach_|linalg_vector_norm", re.I)

# Compiled kernels by the operators in their names, first match first: the loss and activations carry casts and sums of
# their neighbours, a residual sum is whatever adds and does nothing else.
FUSED_FOR = (
    (LOSS, r"log_softmax|nll_loss|cross_entropy|softmax_online|logsumexp"),
    (ATTENTION, r"(?<!log)_softmax"),
    (OPTIMIZER, r"adamw?|clip"),
    (ACTIVATION, r"silu|gelu|relu|swiglu|sigmoid|tanh"),
    (NORM, r"rms_?norm|layer_norm|native_layer_norm|rsqrt"),
    (EMBEDDING, r"embedding|index_put|(?<!unsafe_)index"),
    (ROPE, r"rope|_cat_|_cat$|cat_mul|cos|sin"),
    (RESIDUAL, r"_add(_|$)"),
    (CAST, r"to_copy|copy"),
)
# Kernels of this project and of liger-kernel, by name.
NAMED = (
    (OPTIMIZER, r"adamw"),
    (ACTIVATION, r"swiglu|geglu"),
    (NORM, r"(add|rms)_?norm|layer_?norm|GammaBeta|cuCompute\w*Norm"),
    (ROPE, r"rope|rotary"),
    (LOSS, r"cross_entropy|nll_loss|LogSoftMax|log_softmax|prepare_softmax"),
    (ATTENTION, r"SoftMax|softmax"),
    (EMBEDDING, r"embedding|compute_grad_weight|sum_and_scatter|partial_segment|partials_per_segment|indexSelect|"
                r"unique_by_key|radix_sort|DeviceScan|DeviceCompactInit|vectorized_gather|arange|searchsorted"),
    (ACTIVATION, r"silu|gelu|sigmoid_kernel|sigmoid_backward"),
)  # fmt: skip
# The operators around an elementwise kernel, first match first.
AROUND = (
    (ACCUMULATION, r"AccumulateGrad"),
    (OPTIMIZER, r"Optimizer\.step|adamw|_amp_update|clip_grad|linalg_vector_norm|_foreach_norm"),
    (LOSS, r"cross_entropy|log_softmax|LogSoftmax|Nll|nll_loss"),
    (EMBEDDING, r"[Ee]mbedding"),
    (NORM, r"(add|rms|layer)_norm|(Rms|RMS|Layer)Norm"),
    (ACTIVATION, r"silu|Silu|gelu|Gelu|relu|Relu|swiglu"),
    (ATTENTION, r"softmax|Softmax|scaled_dot_product|ScaledDotProduct|flash_attention|bmm"),
    (ROPE, r"aten::cat$|CatBackward|rotate"),
)
PLAIN = re.compile(r"elementwise|reduce_kernel|CatArray|index_|scatter|gather|Functor|copy_kernel|where", re.I)
FILL = re.compile(r"FillFunctor|fill_kernel|zero_|memset", re.I)
# fsdp packs and unpacks with copies, of which some cast; multi_tensor_apply alone would say optimizer.
PACKING = re.compile(r"split_with_sizes_copy|chunk_cat|multi_tensor_apply.*\b(Copy<|ZeroFunctor)", re.I)
MIXED_ADD = re.compile(r"CUDAFunctor_add<float>.*LoadWithCast")  # float32 += bfloat16: a gradient's sum
CONVERSION = re.compile(r"(bfloat16|float16|half)_copy_kernel|direct_copy_kernel.*LoadWithCast")

# Operators of a CPU, by their own name; the rest of aten is elementwise, and what is not aten is the host's own work.
OPERATORS = (
    (COPY, r"aten::(empty|zeros|zero_|fill_|ones|full|new_)\w*"),
    (OPTIMIZER, r"aten::(_fused_adam|_foreach_|_amp_|linalg_vector_norm)"),
    (NORM, r"aten::(_fused_)?(rms_norm|native_layer_norm|layer_norm)"),
    (ACTIVATION, r"aten::(silu|gelu|relu|threshold)"),
    (LOSS, r"aten::(_?log_softmax|nll_loss|cross_entropy|logsumexp)|mfubench::chunked_cross_entropy"),
    (ATTENTION, r"aten::(_?softmax|_?scaled_dot_product)"),
    (EMBEDDING, r"aten::(embedding|index_add|index_select)"),
    (ROPE, r"aten::cat$"),
)
VIEWS = re.compile(  # of a CPU: no arithmetic, only bookkeeping
    r"aten::(t|transpose|view|as_strided|reshape|_unsafe_view|_reshape_alias|expand|unsqueeze|squeeze|select|slice|detach|"
    r"alias|split\w*|chunk|permute|narrow|result_type|resolve_\w+|item|_local_scalar_dense|is_\w+|unflatten|flatten)_?$"
)
COPIES = re.compile(r"aten::(copy_|to|_to_copy|contiguous|clone|type_as)$")
COMPILED = re.compile(
    r"CompiledFunction|Torch-Compiled Region|CompiledFxGraph|TorchDynamo Cache|Inductor|AOTDispatcher"
)


def first_match(rules: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((category for category, pattern in rules if compiled(pattern).search(text)), None)


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@functools.lru_cache(maxsize=65536)
def category_of_kernel(name: str, host: tuple[str, ...] = ()) -> str:
    """What a kernel on a GPU is for. `host`: the operators it was launched under, outermost first."""
    if COLLECTIVE.search(name) or name.startswith(BETWEEN_CARDS):
        return COMMUNICATION
    if name.startswith(("Memcpy", "Memset")):
        return COPY
    if FUSED.search(name):
        return category_of_fused(name, host)
    if PACKING.search(name):
        return COPY
    if FLASH.search(name):
        return ATTENTION
    if ADAM.search(name):
        return OPTIMIZER
    if GEMM.search(name):
        return MATMUL
    around = category_around(host)
    if around == ACCUMULATION or (around is not None and PLAIN.search(name)):
        return around
    named = first_match(NAMED, name)
    if named is not None:
        return named
    if FILL.search(name):
        return COPY
    if MIXED_ADD.search(name):
        return ACCUMULATION
    if CONVERSION.search(name):
        return CAST
    return ELEMENTWISE if PLAIN.search(name) else OTHER


@functools.lru_cache(maxsize=65536)
def category_of_operator(name: str, host: tuple[str, ...] = ()) -> str:
    """What the own time of an operator on a CPU is for. `host`: the operators around it, outermost first."""
    if COLLECTIVE.search(name):
        return COMMUNICATION
    if GEMM.search(name):
        return MATMUL
    if COMPILED.search(name):
        return ELEMENTWISE  # the compiled loops between the matmuls: one piece, whose purposes cannot be told apart
    if FLASH.search(name):
        return ATTENTION
    if name.startswith("mfubench::data"):
        return DATA
    if not re.match(r"(aten|mfubench|prims|inductor)::", name) and not FUSED.search(name):
        return HOST
    if name == "mfubench::step" or VIEWS.match(name):
        return HOST
    if FUSED.search(name):
        return category_of_fused(name, host)
    own = first_match(OPERATORS, name)
    if own == COPY or own is None:
        around = category_around(host)
        if around is not None:
            return around
    if own is not None:
        return own
    return CAST if COPIES.match(name) else ELEMENTWISE


def category_of_fused(name: str, host: tuple[str, ...]) -> str:
    """A compiled kernel by the operators in its name; one that only casts or adds, by what it is part of."""
    own = first_match(FUSED_FOR, name)
    if own in (None, CAST, RESIDUAL) and (around := category_around(host)) in (LOSS, OPTIMIZER, ACCUMULATION):
        return around
    return own or ELEMENTWISE


def category_around(host: tuple[str, ...]) -> str | None:
    """The purpose that the enclosing operators name, the innermost first."""
    return next((category for name in reversed(host) if (category := first_match(AROUND, name)) is not None), None)
