"""One rank of a run: `python -m mfubench.train.worker`, started by `launch` (through torchrun for several)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mfubench.config import RunConfig, parse
from mfubench.run_log import write_run_log
from mfubench.train.loop import Paths, train
from mfubench.train.process import end_process, start_process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="RunConfig as JSON")
    parser.add_argument("--data", required=True, type=Path, help="folder of a prepared dataset")
    parser.add_argument("--output", required=True, type=Path, help="run JSON to write")
    parser.add_argument("--work", required=True, type=Path, help="folder for logs, checkpoints and live state")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, to show sampled tokens as text")
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto: go on from the last checkpoint in WORK; never: start anew and remove WORK's checkpoints",
    )


def read_config(text: str) -> RunConfig:
    """The RunConfig of --config. Raises ConfigError."""
    return parse(RunConfig, __import__("json").loads(text), "--config")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train as one rank of a run.")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    config = read_config(arguments.config)
    paths = Paths(arguments.data, arguments.work, arguments.output, arguments.tokenizer)
    process = start_process(config, float(os.environ.get("MFUBENCH_TIMEOUT_S", "600")))
    try:
        log = train(config, paths, process)
        if process.is_main:
            write_run_log(paths.output, log)
    finally:
        end_process()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
