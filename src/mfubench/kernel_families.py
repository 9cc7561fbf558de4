"""The kernels of each attention backend on CUDA, by their names. No torch.

Sources: flash-attention's namespaces (its own build is flash::, torch's copy pytorch_flash::), the class names of
FlashAttention-3 (C++) and -4 (CuTe), the engine names of cuDNN's SDPA, torch's memory-efficient kernels (sdpa in
float32). Plain attention has no kernel of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

CUDA_FAMILIES = {
    "fa4": r"flash_?attn_?cute|FlashAttention(Forward|Backward)Sm\d+",
    "fa3": r"FlashAttn(Fwd|Bwd)Sm\d+",
    "fa2": r"(?<!\w)flash::flash_(fwd|bwd)",
    "cudnn": r"cudnn\w*sdpa",
    "sdpa": r"pytorch_flash::|fmha_cutlass",
}


def families_of(kernels: Iterable[str], families: Mapping[str, str] = CUDA_FAMILIES) -> list[str]:
    """The backends whose kernels are among these names, in the order of `families`."""
    kernels = list(kernels)
    return [name for name, pattern in families.items() if any(re.search(pattern, kernel) for kernel in kernels)]
