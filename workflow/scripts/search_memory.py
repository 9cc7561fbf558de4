"""Find the largest micro-batch of a setting that trains: candidates in order, then bisection; one process a trial."""

import sys

from mfubench.memory_search import main

if __name__ == "__main__":
    sys.exit(main())
