"""MFU of every step, warm-up marked, as PNG."""

import sys

from mfubench.analysis.figures.mfu_over_time import main

if __name__ == "__main__":
    sys.exit(main())
