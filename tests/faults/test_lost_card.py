"""A card that disappears: between the jobs of a study, before a run takes it, and while a run is on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from train.train_runs import environment, run_arguments, tiny_config, write_dataset

from mfubench.run_log import read_run_log
from mfubench.telemetry import Sampler

pytestmark = pytest.mark.faults

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
# In the place of NVML: as many cards as CARDS says; from the fifth question on, the first one is lost
NVML = """
import os
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
questions = 0
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "580.95"
def nvmlDeviceGetCount(): return int(os.environ["CARDS"])
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "NVIDIA H100 80GB HBM3"
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetComputeRunningProcesses(handle): return []
def nvmlDeviceGetEnforcedPowerLimit(handle): return 700000
def nvmlDeviceGetMaxClockInfo(handle, kind): return 1980
def nvmlDeviceGetPowerUsage(handle):
    global questions
    questions += 1
    if questions > 5 and handle == 0:
        raise NVMLError("GPU is lost")
    return 650000
def nvmlDeviceGetUtilizationRates(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetClockInfo(handle, kind): return 1755
def nvmlDeviceGetTemperature(handle, sensor): return 50
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return 0
"""


@pytest.fixture
def nvml(tmp_path) -> Path:
    folder = tmp_path / "nvml"
    folder.mkdir()
    (folder / "pynvml.py").write_text(NVML)
    return folder


def script(nvml: Path, cards: int, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    variables = environment(CARDS=str(cards), MFUBENCH_LEASES=str(nvml / "leases"))
    variables["PYTHONPATH"] = f"{nvml}{os.pathsep}{variables['PYTHONPATH']}"
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, SCRIPTS / name, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def test_a_study_does_not_go_on_with_a_card_less(nvml, tmp_path):
    data, machine, work = write_dataset(tmp_path / "data"), tmp_path / "machine.json", tmp_path / "work"
    assert script(nvml, 2, "record_machine.py", "--output", machine).returncode == 0
    run = [*run_arguments(tiny_config(max_iters=2), data, work), "--machine", str(machine)]
    lost = script(nvml, 1, "train_model.py", *run)
    assert lost.returncode == 1 and "describes another machine than this one" in lost.stderr
    assert "cards: was ['NVIDIA H100 80GB HBM3', 'NVIDIA H100 80GB HBM3'], is ['NVIDIA H100 80GB HBM3']" in lost.stderr
    assert not (work / "run.json").exists()
    back = script(nvml, 2, "train_model.py", *run)
    assert back.returncode == 0, back.stderr
    assert read_run_log(work / "run.json").status == "ok"


def test_a_run_that_wants_more_cards_than_are_left_says_so(nvml, tmp_path):
    run = run_arguments(tiny_config(max_iters=2), tmp_path / "data", tmp_path / "work")
    refused = script(nvml, 1, "train_model.py", *run, "--cards", "2")
    assert refused.returncode == 1
    assert "the run needs 2 GPUs, this machine or allocation has 1" in refused.stderr
    assert not (tmp_path / "work" / "run.json").exists()


def test_a_card_lost_while_it_is_watched_costs_its_values_alone(nvml, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(nvml))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CARDS", "2")
    with Sampler(tmp_path / "work", [0, 1], interval_s=0.05) as sampler:
        file = tmp_path / "work" / "telemetry.jsonl"
        while file.read_text().count("\n") < 10:
            assert sampler.process.poll() is None
        summary = sampler.summarize([(0.0, 1e12)])
    assert summary["samples"] >= 8
    assert summary["gpus"][1]["power_w"]["median"] == 650.0
