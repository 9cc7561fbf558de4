"""Products that are added to a float32 gradient, in one matmul and in two."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_devices import needs_cuda

from mfubench.decisions import ROW_MULTIPLE
from mfubench.model.weight_gradient import add_one_product, add_product, add_product_in_two


def factors(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """left [rows, inner] as the backward pass hands it over, transposed and cut from a wider tensor; right."""
    generator = torch.Generator().manual_seed(0)
    wider = torch.randn(inner, rows + 47, generator=generator)
    right = torch.randn(inner, columns, generator=generator)
    return wider.to(device, dtype)[:, :rows].t(), right.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, ROW_MULTIPLE, ROW_MULTIPLE + 1, 3 * ROW_MULTIPLE - 1])
def test_two_products_are_one(rows: int, dtype: torch.dtype) -> None:
    left, right = factors(rows, 7, 3, dtype)
    one, two = torch.full((rows, 3), torch.nan), torch.full((rows, 3), torch.nan)
    for overwrite in (True, False):
        add_one_product(one, left, right, overwrite)
        add_product_in_two(two, left, right, overwrite)
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(two, 2 * (left @ right).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [5, 50_257, 50_304])
def test_products_of_a_head_on_this_card(rows: int, dtype: torch.dtype) -> None:
    left, right = factors(rows, 512, 256, dtype, "cuda")
    expected = left.double() @ right.double()
    total = torch.full((rows, 256), torch.nan, device="cuda")
    add_product(total, left, right, overwrite=True)
    add_product(total, left, right)
    assert ((total - 2 * expected).abs().max() / expected.abs().max()).item() < 1e-4  # float32 sums, no rounding
