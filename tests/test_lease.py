"""Leases: no two holders of a card, all or none, freed by death."""

import subprocess
import sys

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


def test_visible_cards_follow_the_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 6")
    assert visible_cards() == ["5", "6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_cards() == []
