"""Loss curves and gradient norms, as PNG."""

import sys

from mfubench.analysis.figures.loss import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
