"""Write a study's report (HTML and Markdown) and summary.json."""

import sys

from mfubench.analysis.report import main

if __name__ == "__main__":
    sys.exit(main())
