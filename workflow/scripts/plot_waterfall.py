"""Where a step's time goes, from the datasheet peak down to the achieved rate, as PNG."""

import sys

from mfubench.analysis.figures.waterfall import main

if __name__ == "__main__":
    sys.exit(main())
