"""Memory against throughput, up to the limit, as PNG."""

import sys

from mfubench.analysis.figures.memory import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
