"""Scaling efficiency, as PNG."""

import sys

from mfubench.analysis.figures.scaling import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
