"""Is a smoke run what its configuration says? The gate before a model's longer runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mfubench.config import ConfigError, ModelConfig
from mfubench.data.meta import MORE_VALIDATION
from mfubench.flops import count_parameters
from mfubench.run_log import RunLog, read_run_log

FIRST_LOSS_TOLERANCE = 0.3


def untrained_loss(model: ModelConfig) -> float:
    """Expected cross-entropy of an untrained model: ln(vocabulary) + hidden_size initializer_range^2 / 2, in nats.

    The last norm gives vectors of length sqrt(hidden_size), the head's weights are N(0, initializer_range^2), so logits
    are N(0, s^2) with s^2 = hidden_size initializer_range^2, and the mean of exp(logit) is exp(s^2 / 2).
    """
    return math.log(model.vocab_size) + model.hidden_size * model.initializer_range**2 / 2


def find_faults(log: RunLog, evaluated_length: int = 0) -> list[str]:
    """What is wrong with a smoke run, a sentence each; [] when it passed.

    evaluated_length: of the sequences that later runs evaluate on its dataset; 0: none does.
    """
    if log.status != "ok":
        return [f"the run ended with status {log.status}: {log.reason}"]
    faults = []
    expected = count_parameters(log.config.model).total
    counted = log.parameters.total if log.parameters else None
    if counted != expected:
        faults.append(f"the model has {counted} parameters, its dimensions give {expected}")
    if len(log.steps) != log.config.max_iters:
        faults.append(f"{len(log.steps)} steps were run, max_iters is {log.config.max_iters}")
    first_loss, chance = log.steps[0].loss, untrained_loss(log.config.model)
    if first_loss is None or abs(first_loss - chance) > FIRST_LOSS_TOLERANCE:
        faults.append(
            f"the first loss is {first_loss}, an untrained model of this width and vocabulary gives {chance:.2f} "
            f"within {FIRST_LOSS_TOLERANCE}: initialisation, labels or tokenizer are not as they should be"
        )
    if evaluated_length and log.dataset is not None and log.dataset.val_tokens <= evaluated_length:
        faults.append(
            f"later runs evaluate sequences of {evaluated_length} tokens on the dataset {log.dataset.name}, whose val "
            f"holds {log.dataset.val_tokens}; {MORE_VALIDATION}"
        )
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Run `check_smoke.py RUN.json [--evaluated-length TOKENS]`; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a smoke run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--evaluated-length", type=int, default=0, help="of sequences that later runs evaluate")
    arguments = parser.parse_args(argv)
    try:
        log = read_run_log(arguments.run)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    faults = find_faults(log, arguments.evaluated_length)
    for fault in faults:
        print(f"{log.name}: {fault}", file=sys.stderr)
    if not faults:
        print(f"{log.name}: passed, {log.config.model.name}, {count_parameters(log.config.model).total:,} parameters")
    return 1 if faults else 0
