"""Cards in use by others: found before a measurement, then stop, wait or move; with a driver that is a stand-in."""

import argparse
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pynvml
import pytest

from mfubench import job
from mfubench.config import ConfigError
from mfubench.job import FreeCards, cards_for_job, foreign_processes
from mfubench.lease import lease_cards


class Driver:
    """NVML of a machine with four cards, of which some have users."""

    def __init__(self):
        self.users: dict[int, list[int]] = {}  # card -> process ids

    def processes(self, card):
        return [types.SimpleNamespace(pid=pid) for pid in self.users.get(card, [])]


@pytest.fixture
def driver(monkeypatch, tmp_path):
    stand_in = Driver()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", stand_in.processes)
    monkeypatch.setattr(job, "SETTLE_S", 0.0)
    monkeypatch.setenv("MFUBENCH_LEASES", str(tmp_path))
    for name in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MFUBENCH_LEASE"):
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)
    return stand_in


def arguments(cards, when_busy="stop", wait_s=5.0, devices=None):
    return argparse.Namespace(cards=cards, devices=devices, when_busy=when_busy, wait_s=wait_s)


def lease():
    return json.loads(os.environ["MFUBENCH_LEASE"])


def test_free_cards_are_taken_in_order_and_shown_to_cuda_as_nvml_counts_them(driver):
    with cards_for_job(arguments(2)) as cards:
        assert cards == ["0", "1"]
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")
        assert lease()["busy"] == {} and lease()["unknown"] == []


@pytest.mark.faults
def test_stop_names_card_and_process(driver):
    driver.users = {1: [os.getpid()]}
    with pytest.raises(ConfigError, match=rf"card 1: {os.getpid()} \w+"), cards_for_job(arguments(2)):
        pass


def test_the_processes_of_a_run_that_was_waited_for_get_their_time_to_leave(driver, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(job, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(job, "SETTLE_S", 5.0)
    choose = FreeCards(1, "stop", wait_s=60.0)
    assert choose([]) == []  # another run holds the card's lock
    now_s, driver.users = 130.0, {0: [os.getpid()]}  # it has ended, and a process of its is still there
    assert choose(["0"]) == []
    now_s = 134.0
    assert choose(["0"]) == []
    now_s = 135.0
    with pytest.raises(ConfigError, match="card 0"):
        choose(["0"])
    driver.users = {}
    assert choose(["0"]) == ["0"]
    now_s, driver.users = 158.0, {0: [os.getpid()]}
    assert choose(["0"]) == []
    now_s = 160.0  # no longer than the run may wait at all
    with pytest.raises(ConfigError, match="card 0"):
        choose(["0"])


def test_stop_lets_a_run_go_on_beside_cards_it_does_not_need_and_records_them(driver):
    driver.users = {3: [os.getpid()]}
    with cards_for_job(arguments(2)) as cards:
        assert cards == ["0", "1"]
        assert list(lease()["busy"]) == ["3"]


@pytest.mark.faults
def test_move_takes_other_cards_and_records_why(driver):
    driver.users = {0: [os.getpid()]}
    with cards_for_job(arguments(2, "move")) as cards:
        assert cards == ["1", "2"]
        assert lease()["cards"] == ["1", "2"] and list(lease()["busy"]) == ["0"]


def test_move_waits_where_too_few_cards_are_free_and_then_stops(driver):
    driver.users = {card: [os.getpid()] for card in range(3)}
    with pytest.raises(ConfigError, match="card 0"), cards_for_job(arguments(2, "move", wait_s=0.2)):
        pass


@pytest.mark.faults
def test_wait_goes_on_once_the_others_have_ended(driver, capsys):
    driver.users = {0: [os.getpid()]}
    threading.Timer(0.2, driver.users.clear).start()
    with cards_for_job(arguments(1, "wait")) as cards:
        assert cards == ["0"]
        assert lease()["waited_s"] > 0.1 and list(lease()["busy"]) == ["0"]
    assert capsys.readouterr().err == "waiting for busy cards: 0\n"


def test_wait_has_an_end(driver):
    driver.users = {0: [os.getpid()]}
    with pytest.raises(ConfigError, match="in use by other processes"), cards_for_job(arguments(1, "wait", wait_s=0.1)):
        pass


def test_devices_are_the_only_cards_that_may_be_taken(driver):
    driver.users = {2: [os.getpid()]}
    with cards_for_job(arguments(1, "move", devices="2,3")) as cards:
        assert cards == ["3"]
    with pytest.raises(ConfigError, match="needs 2 GPUs"), cards_for_job(arguments(2, devices="3")):
        pass


def test_within_an_allocation_of_slurm_its_cards_are_taken_without_locks(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with cards_for_job(arguments(1)) as cards:
        assert cards == ["2"]
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_another_container_counts_too(driver):
    driver.users = {0: [2**22 + 1]}  # above any process id
    assert foreign_processes("0") == [f"{2**22 + 1} (outside of this container)"]


def test_a_driver_that_does_not_tell_is_recorded(driver, monkeypatch):
    def refuse(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    with cards_for_job(arguments(1)):
        assert lease()["unknown"] == ["0", "1", "2", "3"]


def test_a_leased_command_that_is_stopped_keeps_its_cards_until_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("MFUBENCH_LEASES", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ends_in_order = (
        "import signal, sys, time\n"
        "def end(*_):\n    print('told', flush=True); sys.stdin.readline(); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, end); print('begun', flush=True); time.sleep(20)"
    )
    script = Path(__file__).parents[1] / "workflow" / "scripts" / "lease_cards.py"
    command = [sys.executable, script, "--cards", "1", "--devices", "0", "--", sys.executable, "-c", ends_in_order]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.terminate()
        assert process.stdout.readline() == "told\n"
        with pytest.raises(TimeoutError), lease_cards(1, ["0"], 0.0):
            pass
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(timeout=30) == 7
    with lease_cards(1, ["0"], 5.0) as cards:
        assert cards == ["0"]
