"""Loss curves and gradient norms, as PNG."""

import sys

from mfubench.analysis.figures.loss import main

if __name__ == "__main__":
    sys.exit(main())
