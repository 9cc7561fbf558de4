"""Is a smoke run what its configuration says? The gate before a model's longer runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.flops import count_parameters
from mfubench.run_log import RunLog, read_run_log

# The first loss of an untrained model is near ln(vocabulary): it knows nothing and says so.
FIRST_LOSS_TOLERANCE = 0.3


def find_faults(log: RunLog) -> list[str]:
    """What is wrong with a smoke run, a sentence each; [] when it passed."""
    if log.status != "ok":
        return [f"the run ended with status {log.status}: {log.reason}"]
    faults = []
    expected = count_parameters(log.config.model).total
    counted = log.parameters.total if log.parameters else None
    if counted != expected:
        faults.append(f"the model has {counted} parameters, its dimensions give {expected}")
    if len(log.steps) != log.config.max_iters:
        faults.append(f"{len(log.steps)} steps were run, max_iters is {log.config.max_iters}")
    first_loss, chance = log.steps[0].loss, math.log(log.config.model.vocab_size)
    if first_loss is None or abs(first_loss - chance) > FIRST_LOSS_TOLERANCE:
        faults.append(
            f"the first loss is {first_loss}, an untrained model gives ln(vocabulary) = {chance:.2f} "
            f"within {FIRST_LOSS_TOLERANCE}: initialisation, labels or tokenizer are not as they should be"
        )
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Run `check_smoke.py RUN.json`; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a smoke run.")
    parser.add_argument("run", type=Path)
    arguments = parser.parse_args(argv)
    try:
        log = read_run_log(arguments.run)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faults = find_faults(log)
    for fault in faults:
        print(f"{log.name}: {fault}", file=sys.stderr)
    if not faults:
        print(f"{log.name}: passed, {log.config.model.name}, {count_parameters(log.config.model).total:,} parameters")
    return 1 if faults else 0
