"""What each rung of the ladder of optimisations adds, as PNG."""

import sys

from mfubench.analysis.figures.ladder import main

if __name__ == "__main__":
    sys.exit(main())
