"""A worker that is killed in the middle of writing the checkpoint after KILL_AT steps, in rank KILL_RANK: its tensors
are on the disk, what makes them a checkpoint is not."""

import os
import signal
import sys

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from mfubench.train import worker

write_data = FileSystemWriter.write_data


def planted(self, plan, planner):
    result = write_data(self, plan, planner)
    at, rank = f".writing-{int(os.environ['KILL_AT']):06d}", os.environ["KILL_RANK"]
    if at in str(self.path) and os.environ["RANK"] == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


FileSystemWriter.write_data = planted
sys.exit(worker.main())
