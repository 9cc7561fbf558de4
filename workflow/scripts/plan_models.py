"""Search the models of lowest predicted loss for a compute budget; what they cost on a machine; two figures."""

import sys

from mfubench.planner_study import main

if __name__ == "__main__":
    sys.exit(main())
