"""Memory against throughput, up to the limit, as PNG."""

import sys

from mfubench.analysis.figures.memory import main

if __name__ == "__main__":
    sys.exit(main())
