"""benchmarks/cases.yaml as typed objects, and the jobs they make. No torch."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import mfubench
from benchmarks.peers.job import Job
from benchmarks.tiny_data import write_tiny_dataset
from mfubench.code_digest import code_digest
from mfubench.config import ConfigError, RunConfig, Strict, parse
from mfubench.presets import load_model
from mfubench.run_log import try_writing
from mfubench.yaml_files import load_yaml

FILE = Path(__file__).parent / "cases.yaml"
PACKAGE = Path(mfubench.__file__).parent
PEERS = Path(__file__).parent / "peers"
RESULTS = Path(__file__).parent / "results"
WORK = Path(__file__).parents[1] / "build" / "benchmarks"
CHECKOUTS = {"torchtitan": "torchtitan", "nanogpt": "nanogpt", "litgpt": "litgpt"}  # system -> option with its path

MicroBatches = tuple[Annotated[int, Field(ge=1)], ...]


class System(Strict):
    driver: str
    settings: dict[str, Any] = {}
    environment: dict[str, str] = {}


class Case(Strict):
    model: str
    sequences_per_step: int = Field(ge=1, description="per GPU and optimizer step")
    micro_batch_sizes: MicroBatches = Field(min_length=1, strict=False)
    best_of: dict[str, MicroBatches] = Field({}, strict=False)
    systems: tuple[str, ...] = Field(min_length=1, strict=False)
    seq_len: int = 2048

    def candidates(self, system: str) -> tuple[int, ...]:
        return self.best_of.get(system, self.micro_batch_sizes)


class Cases(Strict):
    systems: dict[str, System]
    cases: dict[str, Case]


def read_cases(path: Path = FILE) -> Cases:
    """Raises ConfigError naming what is wrong with the file."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; --cases names one in the form of {FILE.name}")
    cases = parse(Cases, load_yaml(path), str(path))
    for name, declared in cases.systems.items():
        if not (PEERS / f"{declared.driver}.py").is_file():
            raise ConfigError(f"{path}: systems.{name}.driver: no driver {declared.driver!r} in {PEERS}")
    for name, case in cases.cases.items():
        load_model(case.model)  # raises for one that no preset names
        for system in case.systems:
            if system not in cases.systems:
                raise ConfigError(f"{path}: cases.{name}.systems: no system {system!r}")
            for size in case.candidates(system):
                if case.sequences_per_step % size:
                    raise ConfigError(f"{path}: cases.{name}: {size} does not divide {case.sequences_per_step}")
    return cases


def check_data(folder: Path | None, tiny: bool) -> Path:
    """The folder that --data names, or a made-up dataset for a tiny run; raises ConfigError where it has no dataset."""
    if folder is None and tiny:
        made_up = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, made_up, ignore_errors=True)
        return write_tiny_dataset(made_up)
    if folder is None:
        raise ConfigError("--data: missing; the folder of a prepared dataset (resources/datasets/NAME) is needed")
    if not (folder / "meta.json").is_file():
        raise ConfigError(f"--data: {folder} is no prepared dataset: it has no meta.json")
    return folder


def results_folder(results: Path | None, work: Path, tiny: bool) -> Path:
    """--results; without it benchmarks/results but for a tiny run, whose results lie below --work: no measurements.

    Raises ConfigError where nothing can be written to it: that would be found after all runs.
    """
    folder = results or (work / "results" if tiny else RESULTS)
    try:
        try_writing(folder)
    except OSError as error:
        raise ConfigError(
            f"--results: {folder}: cannot be written to ({error.strerror}); name another folder"
        ) from None
    return folder


@functools.cache
def code_of(driver: str) -> str:
    """Digest of the engine's code, for its own driver."""
    return code_digest([PACKAGE / "model", PACKAGE / "train"]) if driver == "mfubench_engine" else ""


@dataclass(frozen=True)
class Plan:
    """How a benchmark is run: what does not depend on case or system."""

    data: Path
    work: Path
    device: str = "auto"
    preheat_s: float = 10.0
    measure_s: float = 20.0
    trial_s: float = 3.0
    min_steps: int = 10
    checkouts: dict[str, Path] | None = None  # system -> source tree


def make_run(model: str, seq_len: int, micro_batch_size: int, accumulation: int, device: str, **more: Any) -> RunConfig:
    """The work of a job, as every system does it."""
    on_cpu = device == "cpu"
    values = {
        "name": f"peers/{model}",
        "model": load_model(model).model_dump(mode="json"),
        "dataset": "shared",
        "seq_len": seq_len,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "max_iters": 1,
        "device": device,
        "dtype": "float32" if on_cpu else "bfloat16",
        "measurement": {"profile": "none" if on_cpu else "kernels"},
        **more,
    }
    return parse(RunConfig, values, f"benchmark {model}")


def job_of(plan: Plan, cases: Cases, system: str, run: RunConfig, folder: Path, trial: bool = False) -> Job:
    """A job of `system` that does `run` and lies in `folder`; a trial is short and not preheated."""
    declared = cases.systems[system]
    settings = dict(declared.settings)
    if plan.device == "cpu":
        settings["compile"] = "none" if declared.driver == "mfubench_engine" else False  # minutes, for tiny shapes
    checkout = (plan.checkouts or {}).get(system)
    return Job(
        system=system,
        driver=declared.driver,
        run=run,
        data=str(plan.data.resolve()),
        work=str(folder.resolve()),
        output=str((folder / "record.json").resolve()),
        settings=settings,
        code=code_of(declared.driver),
        checkout=str(checkout.resolve()) if checkout else None,
        preheat_s=0.0 if trial else plan.preheat_s,
        measure_s=plan.trial_s if trial else plan.measure_s,
        min_steps=min(4, plan.min_steps) if trial else plan.min_steps,
    )


def make_job(plan: Plan, cases: Cases, name: str, system: str, micro_batch_size: int, label: str, trial: bool) -> Job:
    """One run of `system` in the case `name`; it lies below work/NAME/SYSTEM/."""
    case = cases.cases[name]
    accumulation = case.sequences_per_step // micro_batch_size
    run = make_run(case.model, case.seq_len, micro_batch_size, accumulation, plan.device)
    return job_of(plan, cases, system, run, plan.work / name / system / label, trial)
