"""How fast each case trains and how much of the arithmetic it uses, as PNG."""

import sys

from mfubench.analysis.figures.throughput import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
