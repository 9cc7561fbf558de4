"""Leases: no two holders of a card, all or none, freed by death."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mfubench.config import ConfigError
from mfubench.lease import lease_cards, visible_cards


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("MFUBENCH_LEASES", str(tmp_path / "leases"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_two_leases_never_share_a_card():
    with lease_cards(2, ["0", "1", "2", "3"], 1.0) as first, lease_cards(2, ["0", "1", "2", "3"], 1.0) as second:
        assert not set(first) & set(second)


def test_a_lease_is_all_or_none_and_waits_no_longer_than_told():
    with lease_cards(1, ["0", "1"], 1.0):
        with pytest.raises(TimeoutError, match="no 2 free GPU"), lease_cards(2, ["0", "1"], 0.1):
            pass
        with lease_cards(1, ["0", "1"], 0.1) as other:  # the failed attempt holds nothing
            assert len(other) == 1


def test_more_cards_than_there_are_is_an_error():
    with pytest.raises(ConfigError, match="needs 3 GPUs"), lease_cards(3, ["0", "1"], 1.0):
        pass


@pytest.mark.faults
def test_a_killed_holder_frees_its_cards():
    program = (
        "import time; from mfubench.lease import lease_cards\n"
        "with lease_cards(1, ['0'], 1.0):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError), lease_cards(1, ["0"], 0.1):
        pass
    holder.kill()
    holder.wait()
    with lease_cards(1, ["0"], 5.0) as cards:  # the holder would have had it for a minute
        assert cards == ["0"]


NOBODY = 65_534


def leased_by_another_user(folder: Path, cards: list[str]) -> str:
    """What a process of another user that wants one of these cards prints: the card, or why it gets none."""
    program = (
        "import os, sys; from mfubench.lease import lease_cards\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "try:\n    with lease_cards(1, sys.argv[1:], 0.1) as cards: print(*cards)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    variables = {**os.environ, "MFUBENCH_LEASES": str(folder)}
    return subprocess.check_output([sys.executable, "-c", program, *cards], env=variables, text=True).strip()


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
def test_users_of_one_machine_see_each_others_leases(monkeypatch):
    with tempfile.TemporaryDirectory() as root:  # not pytest's folder, which is closed to others
        Path(root).chmod(0o711)
        folder = Path(root) / "leases"
        monkeypatch.setenv("MFUBENCH_LEASES", str(folder))
        with lease_cards(1, ["0"], 1.0):
            assert leased_by_another_user(folder, ["0"]).startswith("TimeoutError no 1 free GPU")
            assert leased_by_another_user(folder, ["0", "1"]) == "1"
        assert leased_by_another_user(folder, ["0"]) == "0"
        with lease_cards(2, ["0", "1"], 1.0) as cards:  # of which one's lock the other user has made
            assert cards == ["0", "1"]
        (folder / "card-0.lock").chmod(0o600)
        told = leased_by_another_user(folder, ["0", "1"])
        assert told.startswith(f"ConfigError {folder / 'card-0.lock'}: ") and "MFUBENCH_LEASES" in told


def test_a_lock_that_is_closed_to_this_user_is_told_with_the_way_out(monkeypatch, tmp_path):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"card-0\.lock: .*set MFUBENCH_LEASES"), lease_cards(1, ["0"], 1.0):
        pass


def test_a_lock_can_be_read_by_others_whatever_the_umask(tmp_path):
    earlier = os.umask(0o077)
    try:
        with lease_cards(1, ["0"], 1.0):
            assert (tmp_path / "leases/card-0.lock").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(earlier)


def test_visible_cards_follow_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 6")
    assert visible_cards() == ["5", "6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_cards() == []
