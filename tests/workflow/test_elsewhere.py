"""The workflow run from another folder, and from one with an inconvenient name; studies that are no study."""

import json
import os
import subprocess
import sys

import pytest
from workflow.project import STUDY, copy_project


def snakemake(*arguments, cwd):
    command = [sys.executable, "-m", "snakemake", "--cores", "1", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False, encoding="utf-8"
    )


def test_results_may_lie_elsewhere_and_folders_be_named_as_people_do(tmp_path):
    project, elsewhere = copy_project(tmp_path / "grö ße" / "project").folder, tmp_path / "else where"
    elsewhere.mkdir()
    where = ("--snakefile", project / "Snakefile", "--directory", elsewhere)
    ended = snakemake("results/minimal/machine.json", *where, "--configfile", project / "study.yaml", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (elsewhere / "results/minimal/machine.json").exists()
    assert not (project / "results").exists()
    default = snakemake("-n", "smoke", *where, cwd=tmp_path)
    assert default.returncode == 0, default.stdout + default.stderr
    assert "results/default/runs/smoke" in default.stdout + default.stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("base: {}\n", "study: missing; this key must be given"),
        (STUDY.read_text().replace("study:", "studdy:", 1), "studdy: unknown key"),
        (STUDY.read_text() + "\nbase: {}\n", "the key 'base' stands here a second time"),
    ],
)
def test_a_file_that_is_no_study_is_not_mixed_with_the_default_one(text, complaint, tmp_path):
    project = copy_project(tmp_path / "project").folder
    (project / "other.yaml").write_text(text)
    ended = snakemake("-n", "--configfile", "other.yaml", cwd=project)
    assert ended.returncode != 0
    assert complaint in ended.stdout + ended.stderr and "other.yaml" in ended.stdout + ended.stderr


def test_a_study_that_only_extends_another_is_that_one(tmp_path):
    project = copy_project(tmp_path / "project").folder
    (project / "other.yaml").write_text("extends: short\n")
    ended = snakemake("-n", "smoke", "--configfile", "other.yaml", cwd=project)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout + ended.stderr
    assert "results/short/runs/smoke" in printed and "results/default" not in printed


def test_braces_in_a_description_are_text(tmp_path):
    project = copy_project(tmp_path / "project").folder
    study = STUDY.read_text()
    (project / "other.yaml").write_text('description: "loss of {x} and {wildcards.case}"\n' + study)
    ended = snakemake("results/minimal/study.json", "--configfile", "other.yaml", cwd=project)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "{x} and {wildcards.case}" in (project / "results/minimal/study.json").read_text()


def test_a_project_below_a_name_with_braces_is_refused_in_a_line(tmp_path):
    project = copy_project(tmp_path / "br{x}ace").folder
    ended = snakemake("-n", "smoke", cwd=project)
    assert ended.returncode != 0 and "NameError" not in ended.stdout + ended.stderr
    assert f"the project's folder, {project}, has braces in its name" in ended.stdout + ended.stderr


def test_numbers_within_what_the_command_line_sets_are_numbers(tmp_path):
    """Snakemake itself hands them over as text; the file's other values of the section stay."""
    project = copy_project(tmp_path / "project").folder
    section = "base={seed: 7, optimizer: {learning_rate: 1.0e-4}}"
    ended = snakemake("results/minimal/study.json", "--config", section, "--configfile", "study.yaml", cwd=project)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    cases = json.loads((project / "results/minimal/study.json").read_text())["cases"]
    assert {(case["seed"], case["optimizer"]["learning_rate"]) for case in cases.values()} == {(7, 1e-4)}
