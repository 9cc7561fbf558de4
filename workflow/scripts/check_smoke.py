"""Check a smoke run: status, architecture's parameter count, number of steps, first loss near ln(vocabulary)."""

import sys

from mfubench.endings import faults_told
from mfubench.smoke import main

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
