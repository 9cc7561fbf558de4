"""Arithmetic intensity against achieved rate of each kernel group, as PNG."""

import sys

from mfubench.analysis.figures.roofline import main

if __name__ == "__main__":
    sys.exit(main())
