"""Arithmetic intensity against achieved rate of each kernel group, as PNG."""

import sys

from mfubench.analysis.figures.roofline import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
