"""A copy of the project, in which snakemake runs and files may be changed."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("Snakefile", "rules", "workflow", "config", "profiles", "src", "envs", "pyproject.toml")
STUDY = Path(__file__).parent / "study.yaml"


@dataclass
class Project:
    """A copy of the project in a folder of its own, where files may be changed."""

    folder: Path
    first_output: str = ""  # of the run that made the results

    @property
    def results(self) -> Path:
        return self.folder / "results" / "minimal"

    def snakemake(self, *arguments: str, check: bool = True, **variables: str) -> str:
        """Output of one call of snakemake with the test study."""
        process = self.start_snakemake(*arguments, **variables)
        output, _ = process.communicate()
        if check and process.returncode:
            raise AssertionError(output[-8000:])
        return output

    def start_snakemake(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """The same, as it runs: in a session of its own, with further environment variables."""
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments, "--configfile", "study.yaml"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MFUBENCH_CONFIG_DIR": "", **variables}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, env=environment, text=True, start_new_session=True, **output)

    def stale(self, *arguments: str) -> list[str]:
        """`rule output` of each job that a dry run would run."""
        printed = self.snakemake("-n", *arguments)
        jobs = re.findall(r"^(?:local)?rule (\w+):\n(?:    input: .*\n)?(?:    output: (.*)\n)?", printed, re.MULTILINE)
        return sorted(f"{rule} {output}".strip() for rule, output in jobs if rule != "all")

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text that must be there, once."""
        file = self.folder / path
        text = file.read_text()
        assert old in text, f"{path} holds no {old!r}"
        file.write_text(text.replace(old, new, 1))


def copy_project(folder: Path) -> Project:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        source, target = ROOT / part, folder / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy2(source, target)
    shutil.copy2(STUDY, folder / "study.yaml")
    return Project(folder)
