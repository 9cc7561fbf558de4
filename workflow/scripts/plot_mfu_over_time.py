"""MFU of every step, warm-up marked, as PNG."""

import sys

from mfubench.analysis.figures.mfu_over_time import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
