"""What each optimisation is worth, with intervals, as PNG."""

import sys

from mfubench.analysis.figures.effects import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
