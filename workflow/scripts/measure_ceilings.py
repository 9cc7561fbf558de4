"""Measure what this machine can do, hot: matmuls, attention, copies, collectives; the study's shapes."""

import sys

from mfubench.ceilings.measure import main
from mfubench.config import ConfigError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"error: {error}")
