"""Judge all runs of a study and write what was found."""

import sys

from mfubench.audit.main import main

if __name__ == "__main__":
    sys.exit(main())
