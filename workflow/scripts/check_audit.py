"""Fail where the audit of a study found an impossible number."""

import sys

from mfubench.audit.main import check

if __name__ == "__main__":
    sys.exit(check())
