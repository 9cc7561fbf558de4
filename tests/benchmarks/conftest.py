"""The benchmarks are no part of the package: the repository's root goes on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
