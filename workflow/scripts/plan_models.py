"""Search the models of lowest predicted loss for a compute budget; what they cost on a machine; two figures."""

import sys

from mfubench.endings import faults_told
from mfubench.planner.study import main

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
