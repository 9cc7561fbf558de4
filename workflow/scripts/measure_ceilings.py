"""Measure what this machine can do, hot: matmuls, attention, copies, collectives; the study's shapes."""

import sys

from mfubench.ceilings.measure import main

if __name__ == "__main__":
    sys.exit(main())
