"""What a measuring job does around the measurement: the same machine as the rest of the study, and cards of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from mfubench.config import ConfigError
from mfubench.lease import lease_cards, visible_cards
from mfubench.machine import check_same_machine
from mfubench.run_log import write_text_atomically
from mfubench.train.arguments import ResumeMode

SETTLE_S = 5.0  # for the processes of a run that has just ended to leave their cards


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
    parser.add_argument("--stamp-file", type=Path, default=None, help="file that gets --stamp once --output is written")
    parser.add_argument("--stamp", default="", help="what the result is made with")
    parser.add_argument("--work", required=True, type=Path, help="folder for checkpoints, steps and rank logs")
    parser.add_argument("--output", required=True, type=Path, help="result file to write")
    parser.add_argument(
        "--resume",
        choices=get_args(ResumeMode),
        default="never",
        help="auto: go on from the checkpoint in --work, or anew where it is of other data; always: refuse other data",
    )


def write_stamp(arguments: argparse.Namespace) -> None:
    """Note beside a finished result what it was made with, for whoever asks whether it is up to date."""
    if arguments.stamp_file is not None:
        write_text_atomically(arguments.stamp_file, arguments.stamp)


@contextlib.contextmanager
def cards_for_job(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Check the machine, lease cards, and show only those to this process and its children.

    What was found goes into the run JSON with the environment variables that matter, as MFUBENCH_LEASE.
    """
    if getattr(arguments, "machine", None):
        check_same_machine(arguments.machine)
    if not arguments.cards:
        yield []
        return
    allowed = arguments.devices.split(",") if arguments.devices else visible_cards()
    choice = FreeCards(arguments.cards, arguments.when_busy, arguments.wait_s)
    with lease_cards(arguments.cards, allowed, arguments.wait_s, choice) as cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML counts so, CUDA by speed where it is not told
        os.environ["MFUBENCH_LEASE"] = json.dumps(choice.record(cards))
        yield cards


class FreeCards:
    """Chooses cards without foreign processes among those that no other run of ours holds.

    The first `count` cards are the wanted ones. Where somebody else uses one of them, the run moves to others, waits or
    stops, as `when_busy` says.
    """

    def __init__(self, count: int, when_busy: str, wait_s: float):
        self.count, self.when_busy, self.wait_s = count, when_busy, wait_s
        self.started = time.monotonic()
        self.busy_since: float | None = None  # None: no card that is wanted was busy when last looked at
        self.seen: dict[str, list[str]] = {}  # card -> foreign processes, whenever they were seen
        self.unknown: set[str] = set()  # cards of which the driver does not tell
        self.told: set[str] = set()  # cards whose waiting was said

    def __call__(self, cards: list[str]) -> list[str]:
        """Those of `cards` that may be taken now. Raises ConfigError naming the processes where waiting has an end."""
        busy = {}
        for card in cards:
            users = foreign_processes(card)
            if users is None:
                self.unknown.add(card)
            elif users:
                busy[card] = self.seen[card] = users
        wanted = cards if self.when_busy == "move" else cards[: self.count]
        free = [card for card in wanted if card not in busy]
        if len(free) >= self.count or not busy:
            self.busy_since = None
            return free
        if self.patience_is_over():
            listing = "; ".join(f"card {card}: {', '.join(users)}" for card, users in busy.items())
            raise ConfigError(
                f"cards are in use by other processes, which would falsify a measurement: {listing}. "
                "End them, choose other cards (machine.devices), or set machine.when_busy to wait or move."
            )
        if set(busy) != self.told:
            self.told = set(busy)
            print(f"waiting for busy cards: {', '.join(busy)}", file=sys.stderr, flush=True)
        return []

    def patience_is_over(self) -> bool:
        """Asked while cards are busy. The run whose lock was waited for may have ended just now: its processes get
        their time to leave from when they are seen, not from when the wait began."""
        now = time.monotonic()
        if self.busy_since is None:
            self.busy_since = now
        last = self.started + self.wait_s
        return now >= (min(self.busy_since + SETTLE_S, last) if self.when_busy == "stop" else last)

    def record(self, cards: list[str]) -> dict[str, Any]:
        return {
            "cards": cards,
            "waited_s": round(time.monotonic() - self.started, 1),
            "when_busy": self.when_busy,
            "busy": self.seen,
            "unknown": sorted(self.unknown),
        }


def foreign_processes(card: str) -> list[str] | None:
    """Compute processes on a card, as `pid name`; None where the driver does not tell.

    This process has not touched a card yet, so that every process found is somebody else's.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(card)) if card.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(card)
        )
        return [describe_process(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def describe_process(pid: int) -> str:
    import psutil

    try:
        return f"{pid} {psutil.Process(pid).name()}"
    except psutil.NoSuchProcess:
        return f"{pid} (outside of this container)"
