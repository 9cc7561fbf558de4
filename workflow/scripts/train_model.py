"""Train one run of a study and write its run JSON: takes cards, starts one process a GPU, records what happened."""

import sys

from mfubench.stop_signals import listen_once
from mfubench.training_job import main

if __name__ == "__main__":
    listen_once()
    sys.exit(main())
