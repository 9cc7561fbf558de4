"""A worker in which something goes wrong: PLANT says what, in which rank (PLANT_RANK) and step (PLANT_STEP)."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from mfubench.train import step as step_module
from mfubench.train import training, worker

plant, rank, at = os.environ["PLANT"], int(os.environ.get("PLANT_RANK", "0")), int(os.environ.get("PLANT_STEP", "3"))
take_step = step_module.TrainStep.__call__
steps = 0


def fill(disk):
    """Somebody else takes what is left of a disk."""
    with open(disk / "somebody-elses", "wb", buffering=0) as stream:
        try:
            while stream.write(b"0" * 65536):
                pass
        except OSError:
            return


def planted(self, inputs, labels):
    global steps
    steps += 1
    if steps == at and int(os.environ.get("RANK", "0")) == rank:
        if plant == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        if plant == "cudnn":
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")
        if plant == "error":
            raise ValueError("planted error")
        if plant == "hang":
            time.sleep(3600)
        if plant == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if plant == "clock":  # somebody sets the date
            true_time, jump_s = time.time, float(os.environ["PLANT_JUMP_S"])
            time.time = lambda: true_time() + jump_s
        if plant == "full":
            fill(Path(os.environ["PLANT_DISK"]))
        if plant == "limit":  # no file may grow beyond this: fails as a full disk does
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    if plant == "slow":
        time.sleep(float(os.environ.get("PLANT_SECONDS", "0.2")))
    return take_step(self, inputs, labels)


def out_of_memory(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


if plant == "no compiler" and int(os.environ.get("RANK", "0")) == rank:
    os.environ["PATH"] = ""
if plant == "large model":
    training.build_engine = out_of_memory
step_module.TrainStep.__call__ = planted
sys.exit(worker.main())
