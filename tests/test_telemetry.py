"""The sampling process, and what its samples say about steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mfubench import telemetry
from mfubench.telemetry import Sampler, physical_card
from mfubench.telemetry.summary import read_samples, summarize_samples

CARD = {"card": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-0", "power_limit_w": 700.0, "max_sm_clock_mhz": 1980}


def make_samples(count: int = 20, **changes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A header and samples every half second from time 100 on, of one busy card; a list changes each sample."""
    header = {"interval_s": 0.5, "cpu_count": 8, "cards": [CARD], "nvml_problem": None}
    samples = []
    for i in range(count):
        values = {key: change[i] if isinstance(change, list) else change for key, change in changes.items()}
        card = {
            "power_w": 650.0,
            "sm_clock_mhz": 1755,
            "memory_clock_mhz": 2619,
            "temperature_c": 61,
            "throttle_bits": 0,
            "utilization_percent": 100,
        }
        host = {
            "cpu_percent": 12.0,
            "process_cpu_s": {"1": 0.3 * i, "2": 0.01 * i},
            "disk_read_bytes": 10_000_000 * i,
            "disk_write_bytes": 0,
            "network_sent_bytes": None,
            "network_received_bytes": None,
        }
        card |= {key: value for key, value in values.items() if key in card}
        host |= {key: value for key, value in values.items() if key in host}
        samples.append({"time": 100 + 0.5 * i, **host, "cards": [card], "sampler_cpu_s": 0.001 * i})
    return header, samples


STEPS = [(100.0, 104.9), (104.9, 109.6)]


def test_spread_of_all_quantities() -> None:
    powers = [600.0 + 10 * i for i in range(20)]
    summary = summarize_samples(*make_samples(power_w=powers), STEPS)
    (card,) = summary["gpus"]
    assert card["power_w"] == {"median": 695.0, "q1": 647.5, "q3": 742.5, "max": 790.0}
    assert card["sm_clock_mhz"]["median"] == 1755 and card["temperature_c"]["max"] == 61
    assert (summary["samples"], summary["steps_sampled"]) == (20, 2)
    assert summary["host"]["disk_read_mb_s"]["median"] == 20.0
    assert summary["host"]["network_sent_mb_s"] is None
    assert summary["host"]["busiest_process_cores"]["median"] == pytest.approx(0.6)
    assert summary["sampler_cpu_share"] == pytest.approx(0.002)


def test_samples_outside_steps_do_not_count() -> None:
    powers = [100.0] * 10 + [700.0] * 10
    summary = summarize_samples(*make_samples(power_w=powers), [(105.0, 110.0)])
    assert summary["gpus"][0]["power_w"]["q1"] == 700.0


def test_throttled_steps_and_their_reasons() -> None:
    bits = [0] * 10 + [0x4, 0x4 | 0x20] + [0x1] * 8  # idle is no throttling
    summary = summarize_samples(*make_samples(throttle_bits=bits), STEPS)
    assert summary["throttled"] == {
        "power_cap": {"steps": 1, "share": 0.5, "positions": [1]},
        "software_thermal": {"steps": 1, "share": 0.5, "positions": [1]},
    }


def test_short_steps_are_judged_by_the_nearest_sample() -> None:
    bits = [0x4 if i == 4 else 0 for i in range(20)]
    steps = [(101.9, 101.95), (102.05, 102.1), (150.0, 150.1)]
    summary = summarize_samples(*make_samples(throttle_bits=bits), steps)
    assert summary["throttled"]["power_cap"]["positions"] == [0, 1]
    assert summary["steps_sampled"] == 2


@pytest.mark.parametrize(
    ("changes", "limited", "word"),
    [
        ({}, False, "100 %"),
        ({"utilization_percent": 40, "process_cpu_s": [{"1": 0.5 * i} for i in range(20)]}, True, "1.00 cores"),
        ({"utilization_percent": 40, "cpu_percent": 99.0}, True, "99 % busy"),
        ({"utilization_percent": 40}, None, "waiting for batches"),
        ({"utilization_percent": None}, None, "no GPU utilisation"),
    ],
)
def test_whether_the_host_was_the_limit(changes: dict[str, Any], limited: bool | None, word: str) -> None:
    summary = summarize_samples(*make_samples(**changes), STEPS)
    assert summary["host_limited"] is limited
    assert word in summary["host_limited_reason"]


def test_no_samples_at_all() -> None:
    header, _ = make_samples()
    summary = summarize_samples(header, [], STEPS)
    assert summary["samples"] == 0 and summary["gpus"][0]["power_w"] is None and summary["throttled"] == {}


def test_a_run_of_one_sample_is_compared_with_the_one_before() -> None:
    """Half a second of steps: the cores that the run got must not go unseen."""
    summary = summarize_samples(*make_samples(), [(101.9, 102.1)])
    assert summary["samples"] == 1
    assert summary["host"]["run_cores"]["median"] == pytest.approx(0.62)


def test_sampling_process_without_nvml(tmp_path: Path) -> None:
    """Samples come, the cost stays below a percent of a core, the file is whole, the process ends."""
    began_s = time.time()
    with Sampler(tmp_path, [0], interval_s=0.1) as sampler:
        pid = sampler.process.pid
        assert "torch" not in loaded_libraries(pid)
        while time.time() - began_s < 1.2:
            sum(range(10_000))
        summary = sampler.summarize([(began_s, time.time())])
    assert not psutil.pid_exists(pid)
    assert summary["samples"] >= 3
    assert summary["host"]["cpu_percent"]["max"] > 0
    assert summary["host"]["run_cores"]["max"] > 0.1, "this process's own work is seen"
    header, samples = read_samples(tmp_path / "telemetry.jsonl")
    assert header["interval_s"] == 0.1
    if not summary["gpus"]:
        assert header["nvml_problem"] and summary["host_limited"] is None
    used_s = samples[-1]["sampler_cpu_s"] - samples[0]["sampler_cpu_s"]
    assert used_s / (samples[-1]["time"] - samples[0]["time"]) < 0.03, "0.1 s is five times the usual rate"
    json.dumps(summary, allow_nan=False)


def loaded_libraries(pid: int) -> str:
    return " ".join(mapping.path for mapping in psutil.Process(pid).memory_maps())


FAKE_PYNVML = """
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0


class Rates:
    gpu = 97


def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return 7
def nvmlDeviceGetEnforcedPowerLimit(handle): return 700000
def nvmlDeviceGetName(handle): return "NVIDIA H100 80GB HBM3"
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetMaxClockInfo(handle, kind): return 1980
def nvmlDeviceGetPowerUsage(handle): return 650500 + handle
def nvmlDeviceGetUtilizationRates(handle): return Rates
def nvmlDeviceGetClockInfo(handle, kind): return {1: 1755, 2: 2619}[kind]
def nvmlDeviceGetTemperature(handle, sensor): raise RuntimeError("Not Supported")
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return 4
"""


def test_sampling_process_with_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards, as a driver reports them; what one value lacks costs that value alone."""
    (tmp_path / "pynvml.py").write_text(FAKE_PYNVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    began_s = time.time()
    with Sampler(tmp_path / "work", [0, 1], interval_s=0.05) as sampler:
        time.sleep(0.4)
        summary = sampler.summarize([(began_s, time.time())])
    assert [card["uuid"] for card in summary["gpus"]] == ["GPU-3", "GPU-7"]
    assert summary["gpus"][0]["power_w"]["median"] == pytest.approx(650.503)
    assert summary["gpus"][1]["sm_clock_mhz"]["max"] == 1755
    assert summary["gpus"][0]["temperature_c"] is None
    assert summary["throttled"]["power_cap"]["share"] == 1.0
    assert summary["host_limited"] is False


def test_a_driver_that_hangs_costs_the_samples_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = FAKE_PYNVML.replace("def nvmlInit(): pass", "def nvmlInit(): import time; time.sleep(4)")
    assert hangs != FAKE_PYNVML
    (tmp_path / "pynvml.py").write_text(hangs)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(telemetry, "START_TIMEOUT_S", 0.2)
    began_s = time.monotonic()
    with Sampler(tmp_path / "work", [0]) as sampler:
        assert time.monotonic() - began_s < 3
        assert sampler.summarize([(0.0, 1e12)])["samples"] == 0


def test_sampler_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys; from mfubench.telemetry import Sampler; s = Sampler(sys.argv[1], []); s.__enter__(); "
        "print(s.process.pid, flush=True); os._exit(9)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    deadline_s = time.monotonic() + 10
    while is_running(int(found.stdout)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(int(found.stdout))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_line_cut_off_is_left_out(tmp_path: Path) -> None:
    header, samples = make_samples(3)
    path = tmp_path / "telemetry.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in (header, *samples)) + '\n{"time": 1')
    assert read_samples(path) == (header, samples)


def test_cards_are_named_as_cuda_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert physical_card(2) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert [physical_card(0), physical_card(1)] == [5, 6]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc, MIG-def")
    assert [physical_card(0), physical_card(1)] == ["GPU-abc", "MIG-def"]


def test_all_ranks_of_a_node_are_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Sampler(tmp_path, []).request["pid"] == os.getpid()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Sampler(tmp_path, []).request["pid"] == os.getppid()
