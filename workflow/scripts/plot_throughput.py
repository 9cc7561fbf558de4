"""How fast each case trains and how much of the arithmetic it uses, as PNG."""

import sys

from mfubench.analysis.figures.throughput import main

if __name__ == "__main__":
    sys.exit(main())
