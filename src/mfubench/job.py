"""What a measuring job does around the measurement: the same machine as the rest of the study, and cards of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mfubench.config import ConfigError
from mfubench.lease import lease_cards, visible_cards
from mfubench.machine import check_same_machine

POLL_S = 5.0


def add_card_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cards", type=int, default=0, help="GPUs to take; 0: none")
    parser.add_argument("--devices", default=None, help="indices of the GPUs that may be taken, such as 5,6")
    parser.add_argument("--when-busy", choices=("wait", "move", "stop"), default="stop", help="a card has other users")
    parser.add_argument("--wait-s", type=float, default=3600.0, help="longest wait for free cards, seconds")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    add_card_arguments(parser)
    parser.add_argument("--machine", type=Path, default=None, help="machine.json of the study")
    parser.add_argument("--data", required=True, type=Path, help="folder of the prepared dataset")
    parser.add_argument("--tokenizer", type=Path, default=None, help="folder of the tokenizer")
    parser.add_argument("--ceilings", type=Path, default=None, help="ceilings.json, to show MFU on a CPU")
    parser.add_argument("--work", required=True, type=Path, help="folder for checkpoints, steps and rank logs")
    parser.add_argument("--output", required=True, type=Path, help="result file to write")
    parser.add_argument(
        "--resume", choices=("auto", "never"), default="never", help="auto: go on from the checkpoint in --work"
    )


@contextlib.contextmanager
def cards_for_job(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Check the machine, lease cards, and show only those to this process and its children."""
    if getattr(arguments, "machine", None):
        check_same_machine(arguments.machine)
    if not arguments.cards:
        yield []
        return
    allowed = arguments.devices.split(",") if arguments.devices else visible_cards()
    free = free_cards(allowed, arguments.cards, arguments.when_busy, arguments.wait_s)
    with lease_cards(arguments.cards, free, arguments.wait_s) as cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
        yield cards


def free_cards(allowed: list[str], count: int, when_busy: str, wait_s: float) -> list[str]:
    """Of the allowed cards those without foreign processes, or all of them where that cannot be known.

    Raises ConfigError naming the processes when cards are busy and `when_busy` says stop, or after the wait.
    """
    deadline = time.monotonic() + wait_s
    while True:
        busy = {card: users for card in allowed if (users := foreign_processes(card))}
        free = [card for card in allowed if card not in busy]
        if not busy or (when_busy == "move" and len(free) >= count):
            return free
        if when_busy == "stop" or time.monotonic() > deadline:
            listing = "; ".join(f"card {card}: {', '.join(users)}" for card, users in busy.items())
            raise ConfigError(
                f"cards are in use by other processes, which would falsify a measurement: {listing}. "
                "End them, choose other cards (machine.devices), or set machine.when_busy to wait or move."
            )
        print(f"waiting for busy cards: {', '.join(busy)}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


def foreign_processes(card: str) -> list[str]:
    """Compute processes on a card, as `pid name`; [] for none, or where the driver does not tell (MIG, UUIDs)."""
    import psutil
    import pynvml

    if not card.isdigit():
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(card))
        pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    names = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(f"{pid} {psutil.Process(pid).name()}")
    return names
