"""What each optimisation is worth, with intervals, as PNG."""

import sys

from mfubench.analysis.figures.effects import main

if __name__ == "__main__":
    sys.exit(main())
