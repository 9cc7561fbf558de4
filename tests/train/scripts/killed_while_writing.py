"""A worker that is killed in the middle of writing the checkpoint after KILL_AT steps, by rank KILL_RANK."""

import os
import signal
import sys

from mfubench.train import checkpoint, worker

dcp_save = checkpoint.dcp.save


def save(state, *, checkpoint_id, **options):
    result = dcp_save(state, checkpoint_id=checkpoint_id, **options)
    if checkpoint_id.name == f".writing-{int(os.environ['KILL_AT']):06d}" and os.environ["RANK"] == os.environ["KILL_RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


checkpoint.dcp.save = save
sys.exit(worker.main())
