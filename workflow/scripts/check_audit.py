"""Fail where the audit of a study found an impossible number."""

import sys

from mfubench.audit.main import check
from mfubench.endings import faults_told

if __name__ == "__main__":
    with faults_told():
        sys.exit(check())
