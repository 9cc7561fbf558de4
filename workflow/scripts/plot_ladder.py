"""What each rung of the ladder of optimisations adds, as PNG."""

import sys

from mfubench.analysis.figures.ladder import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
