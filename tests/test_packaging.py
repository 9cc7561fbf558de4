"""Lock, environments and bounds say the same."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mfubench
from mfubench import cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(lines):
    """Name -> version of `name==version` lines."""
    found = (re.fullmatch(r"([\w.-]+)==([\w.+]+)", line.strip()) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


LOCK = pins((ROOT / "requirements.lock").read_text().splitlines())
GPU_LOCK = pins((ROOT / "requirements-gpu.lock").read_text().splitlines())
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    ("requirement", "lock"),
    [
        *((text, LOCK) for text in PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["slurm"]),
        *((text, GPU_LOCK) for text in EXTRAS["gpu"]),
    ],
)
def test_the_lock_pins_every_requirement_within_its_bounds(requirement, lock):
    wanted = Requirement(requirement)
    assert wanted.specifier.contains(lock[canonicalize_name(wanted.name)], prereleases=True)


def test_the_conda_environment_is_the_lock_for_the_direct_dependencies():
    environment = yaml.safe_load((ROOT / "envs" / "mfubench.yaml").read_text())
    listed = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    direct = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert pins(listed) == {name: LOCK[name] for name in direct}


def test_the_containers_install_the_locks():
    for recipe in ("Dockerfile", "mfubench.def"):
        text = (ROOT / "envs" / recipe).read_text()
        assert "requirements.lock" in text and "requirements-gpu.lock" in text


def test_make_help_lists_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)[1].split()
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sorted(line.split()[0] for line in shown.stdout.splitlines()) == sorted(targets)


def test_the_command_says_its_version(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mfubench", "--version"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and capsys.readouterr().out == f"{mfubench.__version__}\n"
