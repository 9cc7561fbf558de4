"""Judge all runs of a study; an impossible number is told, and fails."""

import sys

from mfubench.audit.main import main

if __name__ == "__main__":
    sys.exit(main())
