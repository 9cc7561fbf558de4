"""The process that samples: run by path, with the standard library, psutil and pynvml alone, so that it stays small.

Reads a request as one JSON line from standard input, appends one JSON line a sample to the output, and ends when
standard input is closed, which the death of its parent does too. It keeps its own cost below a percent of one core by
sampling less often where samples are dear (many cards).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

import psutil

LARGEST_CPU_SHARE = 0.008  # of one core; the promise is 0.01
CHILDREN_INTERVAL_S = 10.0  # finding a process's children reads all of /proc
SAMPLES_AN_EFOLD = 20_000  # a run of days is sampled more and more rarely: the file stays small


def open_cards(wanted: list[int | str]) -> tuple[Any, list[Any], str | None]:
    """(pynvml, handles of the wanted cards, None), or (None, [], why there are none). `wanted`: index or UUID."""
    if not wanted:
        return None, [], "no GPU was asked for"
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByUUID(card) if isinstance(card, str) else pynvml.nvmlDeviceGetHandleByIndex(card)
            for card in wanted
        ]
    except Exception as error:  # no library, no driver, no permission, no such card: sampled without NVML
        return None, [], f"{type(error).__name__}: {error}"
    return pynvml, handles, None


def ask(call: Any, *arguments: Any) -> Any:
    """An NVML value, or None where this card or driver does not tell it."""
    try:
        return call(*arguments)
    except Exception:  # each pynvml release raises classes of its own
        return None


def describe_card(nvml: Any, handle: Any, card: int | str) -> dict[str, Any]:
    power_limit_mw = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "card": card,
        "name": ask(nvml.nvmlDeviceGetName, handle),
        "uuid": ask(nvml.nvmlDeviceGetUUID, handle),
        "power_limit_w": power_limit_mw / 1e3 if power_limit_mw is not None else None,
        "max_sm_clock_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
    }


def sample_card(nvml: Any, handle: Any) -> dict[str, Any]:
    power_mw = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    return {
        "power_w": power_mw / 1e3 if power_mw is not None else None,
        "sm_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        "temperature_c": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_bits": ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        "utilization_percent": rates.gpu if rates is not None else None,
    }


class Host:
    """CPU, disk and network of this node, and the CPU time of one process and its descendants."""

    def __init__(self, pid: int) -> None:
        self.root = pid
        self.processes: list[psutil.Process] = []
        self.scanned_at = -CHILDREN_INTERVAL_S
        psutil.cpu_percent()  # the first call has nothing to compare with

    def sample(self) -> dict[str, Any]:
        disk = psutil.disk_io_counters()  # None where the kernel does not tell
        network = psutil.net_io_counters()
        return {
            "cpu_percent": psutil.cpu_percent(),
            "process_cpu_s": self.process_times(),
            "disk_read_bytes": disk.read_bytes if disk else None,
            "disk_write_bytes": disk.write_bytes if disk else None,
            "network_sent_bytes": network.bytes_sent if network else None,
            "network_received_bytes": network.bytes_recv if network else None,
        }

    def process_times(self) -> dict[str, float]:
        """CPU seconds so far of each process, by its id."""
        if time.monotonic() - self.scanned_at >= CHILDREN_INTERVAL_S:
            self.scanned_at = time.monotonic()
            try:
                root = psutil.Process(self.root)
                self.processes = [root, *root.children(recursive=True)]
            except psutil.Error:
                self.processes = []
        times = {}
        for process in self.processes:
            if process.pid == os.getpid():
                continue
            try:
                used = process.cpu_times()
            except psutil.Error:
                continue
            times[str(process.pid)] = used.user + used.system
        return times


def main() -> None:
    request = json.loads(sys.stdin.readline())
    interval_s: float = request["interval_s"]
    nvml, handles, problem = open_cards(request["cards"])
    host = Host(request["pid"])
    with open(request["output"], "w", encoding="utf-8", buffering=1) as stream:
        header = {
            "interval_s": interval_s,
            "cpu_count": psutil.cpu_count(),
            "cards": [
                describe_card(nvml, handle, card) for handle, card in zip(handles, request["cards"], strict=False)
            ],
            "nvml_problem": problem,
        }
        stream.write(json.dumps(header) + "\n")
        print("ready", flush=True)
        began_s, cpu_began_s = time.monotonic(), time.process_time()
        while not select.select([sys.stdin], [], [], interval_s)[0]:
            sample = {
                "time": time.time(),
                **host.sample(),
                "cards": [sample_card(nvml, handle) for handle in handles],
                "sampler_cpu_s": time.process_time() - cpu_began_s,
            }
            stream.write(json.dumps(sample) + "\n")
            elapsed_s = time.monotonic() - began_s
            interval_s = max(interval_s, elapsed_s / SAMPLES_AN_EFOLD)
            if (time.process_time() - cpu_began_s) / elapsed_s > LARGEST_CPU_SHARE:
                interval_s *= 1.2


if __name__ == "__main__":
    main()
