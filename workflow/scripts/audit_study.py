"""Judge all runs of a study and write what was found."""

import sys

from mfubench.audit.main import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
