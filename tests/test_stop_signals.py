"""A signal to stop reaches the command that a process waits for, whenever it comes."""

import os
import signal
import subprocess
import sys

import pytest

from mfubench.stop_signals import on_stop, run_handing_on

NUMBERS = [signal.SIGTERM, signal.SIGINT]
# Says which signal came, as its exit code
CHILD = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: sys.exit(number))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", NUMBERS)
def test_the_command_gets_the_signal(number):
    command = [sys.executable, "-c", CHILD]
    program = f"import sys; from mfubench.stop_signals import run_handing_on; sys.exit(run_handing_on({command!r}))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == number


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_that_comes_before_the_process_is_handed_on_once_it_exists(number, monkeypatch):
    start, handed_on = subprocess.Popen, []

    def interrupted_start(*arguments, **options):
        os.kill(os.getpid(), number)
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted_start)
    assert run_handing_on([sys.executable, "-c", ""], lambda process, number: handed_on.append(number)) == 0
    assert handed_on == [number]


@pytest.mark.parametrize("number", NUMBERS)
def test_handlers_are_those_of_before_afterwards(number):
    before, seen = signal.getsignal(number), []
    with on_stop(seen.append):
        os.kill(os.getpid(), number)
    assert seen == [number] and signal.getsignal(number) is before


def test_a_process_that_listens_once_is_ended_before_and_deaf_afterwards():
    before, after = listen_once_in_a_process("before"), listen_once_in_a_process("after")
    assert (before, after) == (-signal.SIGTERM, 7)


def listen_once_in_a_process(moment: str) -> int:
    stop = "os.kill(os.getpid(), signal.SIGTERM)"
    lines = ["import os, signal, sys", "from mfubench.stop_signals import listen_once, on_stop", "listen_once()"]
    lines += [stop] * (moment == "before") + ["with on_stop(lambda number: None): pass"]
    return subprocess.run([sys.executable, "-c", "\n".join([*lines, stop, "sys.exit(7)"])], timeout=60).returncode
