"""What fully_shard sends lies where it was made, and arrives as torch's own copies would have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp  # defines the operators

from mfubench.train.fsdp_buffers import FEW, GatherBuffer, fill_scattered, gathered_from, numel_sent, take_over_copies

SCRIPT = str(Path(__file__).parent / "scripts" / "gathered_weights.py")
SHAPES = [(10, 4), (7,), (1, 3), (64, 8), (5, 2, 3)]  # rows that ranks share evenly, that they don't, and too few


def laid_out(gradients, ranks: int) -> torch.Tensor:
    """A buffer that is nowhere a number yet."""
    a_rank = sum(-(-gradient.shape[0] // ranks) * gradient[0].numel() for gradient in gradients)
    return torch.full((ranks, a_rank), float("nan"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "shapes", [SHAPES[:2], SHAPES[2:4], SHAPES[4:], SHAPES], ids=["two", "other two", "one", "all"]
)
def test_gradients_lie_where_torch_puts_them(shapes, ranks, dtype, monkeypatch):
    torch.manual_seed(ranks)
    gradients = [torch.randn(shape).to(dtype) for shape in shapes]
    expected, found = laid_out(gradients, ranks), laid_out(gradients, ranks)
    torch._chunk_cat(gradients, 0, ranks, out=expected)
    if len(shapes) * ranks <= FEW:
        monkeypatch.delattr(torch, "_chunk_cat")
    fill_scattered(gradients, 0, ranks, found)
    assert torch.equal(found, expected) and found.isfinite().all()


def test_a_transposed_gradient_too():
    gradient = torch.randn(6, 4).t()
    expected, found = torch.empty(2, 12), torch.empty(2, 12)
    torch._chunk_cat([gradient], 0, 2, out=expected)
    fill_scattered([gradient], 0, 2, found)
    assert torch.equal(found, expected)


def test_fully_shard_calls_both(monkeypatch):
    take_over_copies()
    monkeypatch.delattr(torch, "_chunk_cat")  # what torch's own form of the operator calls
    buffer = torch.empty(2, 4)
    torch.ops.fsdp.chunk_cat([torch.arange(8.0).view(4, 2)], dim=0, num_chunks=2, out=buffer)
    assert buffer.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    kept, output = gather_buffer((2, 3), (4,)), torch.empty(20, dtype=torch.bfloat16)
    sent, _ = torch.ops.fsdp.all_gather_copy_in([part.flatten() for part in kept.shards], output, [6, 4], 10, 1)
    assert sent.data_ptr() == kept.buffer.data_ptr()


def gather_buffer(*sizes: tuple[int, ...]) -> GatherBuffer:
    parameters = [
        SimpleNamespace(
            padded_sharded_param_size=torch.Size(size), sharded_param=SimpleNamespace(_local_tensor=torch.zeros(size))
        )
        for size in sizes
    ]
    buffer = GatherBuffer(parameters, torch.zeros(numel_sent(parameters), dtype=torch.bfloat16))
    buffer.buffer.copy_(torch.arange(buffer.buffer.numel()))
    return buffer


def test_only_what_stays_is_sent_from_where_it_lies():
    """Tensors made for the moment lie together as well; their memory is used again before they have been sent."""
    kept, output = gather_buffer((2, 3), (4,)), torch.zeros(20, dtype=torch.bfloat16)
    sent, arrived = gathered_from([part.flatten() for part in kept.shards], output, [6, 4], 10, 1)
    assert sent.data_ptr() == kept.buffer.data_ptr() and arrived.data_ptr() == output.data_ptr()
    made = torch.arange(10, dtype=torch.bfloat16)
    sent, _ = gathered_from(list(made.split([6, 4])), output, [6, 4], 10, 1)
    assert sent.data_ptr() == output[10:].data_ptr() and torch.equal(sent, made)
    sent, _ = gathered_from([kept.shards[0].flatten()], output, [6], 6, 1)  # a part of a buffer
    assert sent.data_ptr() == output[6:].data_ptr()
    gone = kept.buffer
    del kept
    sent, _ = gathered_from([gone], output, [10], 10, 1)
    assert sent.data_ptr() == output[10:].data_ptr()


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_the_rounded_masters(ranks, tmp_path):
    """In each of the processes: masters that have changed, published and gathered, tensor by tensor."""
    commands = [[sys.executable, SCRIPT, str(rank), str(ranks), f"file://{tmp_path}/store"] for rank in range(ranks)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        _, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
