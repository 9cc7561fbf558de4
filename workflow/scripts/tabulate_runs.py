"""Write a study's tables: runs, expectations, effects, scaling and memory, as CSV."""

import sys

from mfubench.analysis.tables import main

if __name__ == "__main__":
    sys.exit(main())
