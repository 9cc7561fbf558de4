"""A worker in which something goes wrong: PLANT says what, in which rank (PLANT_RANK) and step (PLANT_STEP)."""

import os
import signal
import sys
import time

import torch

from mfubench.train import step as step_module
from mfubench.train import worker

plant, rank, at = os.environ["PLANT"], int(os.environ.get("PLANT_RANK", "0")), int(os.environ.get("PLANT_STEP", "3"))
take_step = step_module.TrainStep.__call__
steps = 0


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
        if plant == "slow":
            pass
    if plant == "slow":
        time.sleep(0.2)
    return take_step(self, inputs, labels)


step_module.TrainStep.__call__ = planted
sys.exit(worker.main())
