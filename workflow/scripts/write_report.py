"""Write a study's report (HTML and Markdown) and summary.json."""

import sys

from mfubench.analysis.report import main
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(main())
