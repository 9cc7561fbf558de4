"""Measure what this machine can do, hot: matmuls, attention, copies, collectives; the study's shapes."""

import sys

from mfubench.ceilings.measure import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
