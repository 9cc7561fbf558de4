"""Where a step's time goes, from the datasheet peak down to the achieved rate, as PNG."""

import sys

from mfubench.analysis.figures.waterfall import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
