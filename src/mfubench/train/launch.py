"""Start the ranks of a run, watch over them, and turn what they did into an exit code."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from mfubench.train.worker import add_arguments, read_config
from mfubench.train.worker import main as run_rank


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description="Train one run and write its run JSON.")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    config = read_config(arguments.config)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if config.world_size == 1:
        return run_rank(argv)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.world_size}"]
    return subprocess.run([*command, "-m", "mfubench.train.worker", *argv], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
