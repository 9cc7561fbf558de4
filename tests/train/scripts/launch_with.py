"""The launcher with another worker: `launch_with.py SCRIPT ARGUMENTS...`; SCRIPT stands beside this file."""

import sys
from pathlib import Path

from mfubench.train.arguments import make_parser
from mfubench.train.launch import launch

script, argv = str(Path(__file__).parent / sys.argv[1]), sys.argv[2:]
sys.exit(launch(make_parser("").parse_args(argv), argv, worker=[script]))
