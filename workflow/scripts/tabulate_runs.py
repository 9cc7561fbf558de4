"""Write a study's tables: runs, expectations, effects, scaling and memory, as CSV."""

import sys

from mfubench.analysis.tables import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
