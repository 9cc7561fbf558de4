"""Keep the trace of a run's profiled step; of a run that could not be profiled, the reason."""

import sys

from mfubench.endings import faults_told
from mfubench.profiling.keep import main

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
