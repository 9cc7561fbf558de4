"""Every rule that runs a program declares its environment, for conda and for apptainer."""

import os
import re

import pytest
from workflow.project import ROOT, copy_project

# In the place of apptainer: notes what it is asked for, and runs the command as it is (SHELL -c COMMAND come last)
APPTAINER = """#!/bin/bash
[ "$1" = --version ] && { echo "apptainer version 1.3.4"; exit; }
echo "$*" >> "$APPTAINER_LOG"
exec "${@: -3:1}" "${@: -2:1}" "${@: -1}"
"""


@pytest.mark.parametrize("path", sorted((ROOT / "rules").glob("*.smk")), ids=lambda path: path.stem)
def test_every_rule_with_a_command_names_the_conda_environment(path):
    rules = re.split(r"^(?=rule |use rule )", path.read_text(), flags=re.MULTILINE)[1:]
    for rule in rules:
        if "    shell:" in rule:
            assert '    conda:\n        "../envs/mfubench.yaml"' in rule, rule.splitlines()[0]


def test_the_container_recipe_makes_the_image_that_rules_run_in():
    assert 'container: "mfubench.sif"' in (ROOT / "Snakefile").read_text()
    assert "apptainer build mfubench.sif envs/mfubench.def" in (ROOT / "envs" / "mfubench.def").read_text()


@pytest.mark.slow
def test_commands_run_within_the_image(tmp_path, monkeypatch):
    project = copy_project(tmp_path / "project")
    (project.folder / "mfubench.sif").touch()
    stand_in, log = tmp_path / "bin" / "apptainer", tmp_path / "log"
    stand_in.parent.mkdir()
    stand_in.write_text(APPTAINER)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    project.snakemake("tokenizers", "--sdm", "apptainer", APPTAINER_LOG=str(log))
    (asked,) = [line for line in log.read_text().splitlines() if line.startswith("exec ")]
    assert " mfubench.sif " in asked and "set -euo pipefail" in asked and "get_tokenizer.py" in asked
