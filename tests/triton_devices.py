"""Where tests of Triton kernels run: on a CUDA device, or on the CPU under Triton's interpreter.

The interpreter must be chosen before triton is imported, so a test file runs itself again in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])
DEVICES = ["cpu"] if INTERPRETED else [CUDA]


def run_interpreted(file: str) -> None:
    """All tests of a file that take a device, on the CPU."""
    if INTERPRETED:
        pytest.skip("this is the interpreter")
    if torch.cuda.is_available():
        pytest.skip("the kernels run natively here")
    pytest.importorskip(
        "triton", minversion="3.9", reason="needs triton 3.9 or newer, whose interpreter can loop: make test-kernels"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", file]
    variables = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
