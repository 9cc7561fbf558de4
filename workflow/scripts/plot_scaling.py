"""Scaling efficiency, as PNG."""

import sys

from mfubench.analysis.figures.scaling import main

if __name__ == "__main__":
    sys.exit(main())
