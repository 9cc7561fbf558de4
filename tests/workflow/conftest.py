"""The real workflow on a copy of the project, run once for all tests that look at its results."""

import shutil

import pytest
from workflow.project import Project, copy_project


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Project:
    """A project whose study has been run whole. Tests must not change it: see `project`."""
    project = copy_project(tmp_path_factory.mktemp("finished"))
    project.first_output = project.snakemake()
    return project


@pytest.fixture
def project(finished, tmp_path) -> Project:
    """A copy of the finished project, with results and Snakemake's records, to be changed at will."""
    folder = tmp_path / "project"
    shutil.copytree(finished.folder, folder, symlinks=True)
    return Project(folder)
