"""Which cards a job may use, exclusively.

Snakemake's `gpu` resource only counts: two one-GPU jobs would both land on card 0. A lease is one file lock a card,
taken all or none, so that jobs of several workflows and users on one machine never share a card. The kernel drops
the locks when the holder ends, also after SIGKILL. Inside a SLURM allocation the cards are already exclusive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mfubench.config import ConfigError

POLL_S = 0.5


def visible_cards() -> list[str]:
    """Cards of this machine or allocation, as CUDA_VISIBLE_DEVICES names them; [] on a machine without GPUs."""
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        return [card.strip() for card in stated.split(",") if card.strip() not in ("", "-1", "NoDevFiles")]
    return [str(index) for index in range(count_gpus())]


def processes_per_node(stated: object = "auto") -> int:
    """GPUs of a node that measures, or processes that a machine without GPUs holds (one a core, two at least).

    `stated` is the study's machine.gpus; "auto" asks this machine. What the main process finds it hands to its jobs
    by environment: a job may see fewer cards, and must still expand the same study.
    """
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    if "MFUBENCH_PROCESSES_PER_NODE" not in os.environ:
        os.environ["MFUBENCH_PROCESSES_PER_NODE"] = str(len(visible_cards()) or max(2, os.cpu_count() or 1))
    return int(os.environ["MFUBENCH_PROCESSES_PER_NODE"])


def count_gpus() -> int:
    """Cards that the NVIDIA driver lists; 0 where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def lock_folder() -> Path:
    folder = Path(os.environ.get("MFUBENCH_LEASES", Path(tempfile.gettempdir()) / "mfubench-leases"))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # made by another user, who has already opened it to all
        folder.chmod(0o1777)
    return folder


@contextlib.contextmanager
def lease_cards(
    count: int, cards: list[str], wait_s: float, choose: Callable[[list[str]], list[str]] | None = None
) -> Iterator[list[str]]:
    """Hold `count` of `cards` until the block ends; yields them.

    choose: of the cards that no other run holds, in order, those that may be taken now (all of them by default). It is
    asked again until there are enough, and may raise to end the wait.

    Raises ConfigError when there are not that many cards or `count` is negative, TimeoutError when none came free
    within wait_s seconds.
    """
    if count < 0:
        raise ConfigError(f"--cards: found {count}; give how many GPUs are to be taken, 0 for none")
    if count > len(cards):
        raise ConfigError(f"the run needs {count} GPUs, this machine or allocation has {len(cards)}: {cards}")
    alone = "SLURM_JOB_ID" in os.environ  # the allocation is nobody else's
    deadline = time.monotonic() + wait_s
    while True:
        held = dict.fromkeys(cards) if alone else lock_free_cards(cards)
        wanted: list[str] = []
        try:
            unheld = list(held)
            wanted = (choose(unheld) if choose is not None else unheld)[:count]
        finally:
            release(held, keep=wanted if len(wanted) == count else [])
        if len(wanted) == count:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} free GPU(s) among {cards} within {wait_s:.0f} s; other runs hold them")
        time.sleep(POLL_S)
    try:
        yield wanted
    finally:
        release({card: held[card] for card in wanted}, keep=[])


def lock_free_cards(cards: list[str]) -> dict[str, int | None]:
    """Lock every card that nobody holds; card -> file descriptor. Raises ConfigError where a lock cannot be opened."""
    held: dict[str, int | None] = {}
    try:
        folder = lock_folder()
        for card in cards:
            handle = open_lock(folder / f"card-{card.replace('/', '_')}.lock")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[card] = handle
            except BlockingIOError:
                os.close(handle)
    except PermissionError as error:
        release(held, keep=[])
        raise ConfigError(
            f"{error.filename}: the cards' locks are closed to this user ({error.strerror}). Open the folder to all "
            "(chmod 1777) and the locks in it for reading, or set MFUBENCH_LEASES to another folder, the same one for "
            "all users of this machine"
        ) from None
    except OSError as error:
        release(held, keep=[])
        raise ConfigError(
            f"{error.filename or folder}: the cards cannot be locked there ({error.strerror}). Set MFUBENCH_LEASES to "
            "another folder, on a disk of this machine, the same one for all of its users"
        ) from None
    return held


def open_lock(path: Path) -> int:
    """File descriptor of a lock file, made where it is missing.

    Of another user's it is opened for reading, which is enough to lock it but on NFS, where that wants one for writing.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        return os.open(path, os.O_RDONLY)
    if os.fstat(handle).st_uid == os.geteuid():
        os.fchmod(handle, 0o644)  # whatever the umask: other users lock it too
    return handle


def release(held: dict[str, int | None], keep: list[str]) -> None:
    """Unlock the cards that are not to be kept."""
    for card, handle in held.items():
        if handle is not None and card not in keep:
            os.close(handle)
