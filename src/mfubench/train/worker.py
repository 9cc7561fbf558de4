"""One rank of a run: `python -m mfubench.train.worker`, started by `launch` (or by torchrun: the same variables)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from mfubench.config import ConfigError
from mfubench.run_log import write_json, write_run_log
from mfubench.stop_signals import listen_once
from mfubench.train.arguments import make_parser, paths_of, read_config
from mfubench.train.failures import failure_of, ranks_folder, write_failure
from mfubench.train.loop import Stopped, train
from mfubench.train.process import end_process, start_process
from mfubench.train.progress import Display
from mfubench.train.watchdog import Watchdog, read_timeout_s


def run_rank(
    arguments: argparse.Namespace, display: Display | None = None, last_words: Callable[[], object] | None = None
) -> int:
    """Train as the rank that the environment names; 0, or 1 with a record of the failure in WORK/ranks."""
    config = read_config(arguments.config)
    paths = paths_of(arguments)
    rank = int(os.environ.get("RANK", "0"))
    timeout_s = read_timeout_s()
    # torch 2.13 renames them; 2.11 has only the old names
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
    # a checkpoint of one process is meant to be one of one process
    warnings.filterwarnings("ignore", message=".*in a single process.*", category=UserWarning)
    ranks_folder(paths.work).mkdir(parents=True, exist_ok=True)
    watchdog = Watchdog(paths.work, rank, timeout_s, last_words)
    try:
        # collectives time out later than the watchdog, which can say more
        process = start_process(config, 2 * timeout_s + 60)
        log = train(config, paths, process, watchdog, resume=arguments.resume, display=display)
        if process.is_main:
            write_run_log(paths.output, log)
    except Stopped as stopped:
        if rank == 0:
            write_json(paths.stopped, {"step": stopped.done, "checkpoint": str(stopped.folder)})
    except BaseException as error:
        write_failure(paths.work, failure_of(rank, error, paths.work))
        if not isinstance(error, ConfigError):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            os._exit(1)  # leaving the process group in order would wait for ranks that are stuck
        return 1
    finally:
        watchdog.close()
        with contextlib.suppress(Exception):
            end_process()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_rank(make_parser("Train as one rank of a run.").parse_args(argv))


if __name__ == "__main__":
    listen_once()
    sys.exit(main())
