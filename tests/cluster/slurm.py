"""snakemake with profiles/slurm in a copy of the project, and what the tests ask SLURM."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from workflow.project import Project

TRAINING = "results/minimal/runs/training/pretrain.json"


@dataclass
class ClusterProject(Project):
    processes: list[subprocess.Popen] = field(default_factory=list)

    def write_study(self, study: dict) -> None:
        (self.folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))

    def edit_study(self, change: Callable[[dict], None]) -> None:
        study = yaml.safe_load((self.folder / "study.yaml").read_text())
        change(study)
        self.write_study(study)

    def command(self, *arguments: str) -> list[str]:
        options = ["--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "1"]
        profile = ["--workflow-profile", "profiles/slurm", "--configfile", "study.yaml", "--latency-wait", "5"]
        return [sys.executable, "-m", "snakemake", *profile, *options, *arguments]

    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, "MFUBENCH_CONFIG_DIR": ""}

    def slurm(self, *arguments: str, check: bool = True, timeout_s: float = 900) -> str:
        """Output of one call of snakemake that submits to SLURM."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=timeout_s)
        if check and process.returncode:
            raise AssertionError(output[-8000:])
        return output

    def start(self, *arguments: str) -> subprocess.Popen:
        process = subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen) -> None:
        """SIGKILL to snakemake and what it has started on this machine; its jobs live on."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def abandon(self, process: subprocess.Popen) -> None:
        """End a call and its jobs, without waiting until it has noticed that they ended; leave no lock."""
        self.kill(process)
        for line in queue():
            ask("scancel", line.split()[0])
        wait_until(lambda: not queue(), "the jobs did not end")
        self.slurm("--unlock", TRAINING)

    def training(self) -> Path:
        """Work folder of the training as the study stands now: other values have another one."""
        parent = self.folder / "results" / "minimal" / "work" / "training" / "pretrain"
        return max(parent.iterdir(), key=lambda folder: folder.stat().st_mtime)

    def steps_saved(self) -> int:
        """Steps of the latest checkpoint of the training."""
        folders = (self.training() / "checkpoints").glob("step-*")
        return max((int(folder.name.removeprefix("step-")) for folder in folders), default=0)

    def wait_for_checkpoint_after(self, steps: int) -> None:
        wait_until(lambda: self.steps_saved() > steps, f"no checkpoint after step {steps}")


def wait_until(condition: Callable[[], object], complaint: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{complaint} within {timeout_s:.0f} s"
        time.sleep(0.3)


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def administer(*command: str) -> str:
    """`ask` what only SLURM's own user may."""
    return ask(*([] if os.geteuid() == 0 else ["sudo", "-n"]), *command)


def submitted(output: str) -> list[str]:
    """Numbers of the jobs that a call of snakemake has submitted."""
    return re.findall(r"has been submitted with SLURM jobid (\d+)", output)


def job(number: str) -> dict[str, str]:
    """What SLURM says of a job."""
    return dict(re.findall(r"(\S+?)=(\S*)", ask("scontrol", "show", "job", number)))


def queue() -> list[str]:
    """`number state` of the jobs that have not ended."""
    return ask("squeue", "--noheader", "--format=%i %T").splitlines()


def jobs_named(comment: str) -> list[str]:
    """Numbers of the jobs of a rule, oldest first, ended ones too."""
    lines = ask("squeue", "--noheader", "--states=all", "--sort=i", "--format=%i %k").splitlines()
    return [line.split()[0] for line in lines if line.split(maxsplit=1)[1].startswith(comment)]
