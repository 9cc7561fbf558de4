"""What a study file holds."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from mfubench.config import Strict
from mfubench.data.config import DatasetConfig, TokenizerConfig
from mfubench.experiments.overrides import Overrides
from mfubench.machine_config import MachineConfig
from mfubench.planner.study import PlanRequest

Stage = Literal["smoke", "baseline", "scaling", "tiers", "ablations", "memory", "training"]
STAGES: tuple[Stage, ...] = get_args(Stage)

# What a study's files must not come to lie in: the folders of this project itself, and the results that it ships.
OWN_FOLDERS = ("benchmarks", "config", "docs", "envs", "profiles", "rules", "src", "tests", "workflow")
SHIPPED_RESULTS = "results/reference"

# Names become files, and folders are written to and named in shell commands: of a stranger's study too.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
FOLDER = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*$"
LONGEST_NAME = 100  # characters: names become files, beside endings, of a length that every file system takes
Name = Annotated[str, Field(pattern=NAME, max_length=LONGEST_NAME)]
PlanName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=LONGEST_NAME)]


class CeilingsConfig(Strict):
    """How long the card's own limits are measured."""

    seconds: float = Field(2.0, gt=0, description="hot time per measured kernel")
    micro_batch_size: int = Field(8, ge=1)


class StageConfig(Strict):
    base: Overrides = {}
    cases: dict[str, Overrides | None] = {}
    ladder: dict[str, Overrides | None] = {}
    grid: dict[str, Overrides] = {}
    search: dict[str, Overrides] = {}
    repeats: int = Field(1, ge=1, description="whole processes per case, interleaved, to tell differences from noise")


class EffectConfig(Strict):
    """What one setting is worth: two cases that differ in it alone."""

    name: str
    arm: str
    control: str
    expected: str | None = None


class StudyConfig(Strict):
    """A study file. `extends: NAME` (not part of the schema: resolved before) takes another one as its base."""

    study: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=LONGEST_NAME)
    description: str = ""
    results_dir: str = Field(
        "results", pattern=FOLDER, description="below the project's folder; a link leads elsewhere"
    )
    resources_dir: str = Field("resources", pattern=FOLDER, description="likewise")
    machine: MachineConfig = MachineConfig()
    tokenizers: dict[Name, TokenizerConfig]
    datasets: dict[Name, DatasetConfig]
    ceilings: CeilingsConfig = CeilingsConfig()
    base: Overrides
    experiments: dict[Stage, StageConfig]
    plans: dict[PlanName, PlanRequest] = {}
    effects: tuple[EffectConfig, ...] = Field((), strict=False)
    expectations: str | None = Field(None, pattern=NAME, description="a file of config/expectations, without .yaml")
    price_per_gpu_hour: float | None = Field(None, ge=0)

    @field_validator("results_dir", "resources_dir")
    @classmethod
    def check_folder(cls, folder: str) -> str:
        if folder.split("/")[0] in OWN_FOLDERS:
            raise ValueError(f"found {folder!r}, where this project's own files are; name another folder")
        return folder

    @model_validator(mode="after")
    def check_results(self) -> StudyConfig:
        if f"{self.results_dir}/{self.study}/".startswith(f"{SHIPPED_RESULTS}/"):
            raise ValueError(
                f"study: found {self.study!r} in results_dir {self.results_dir!r}, but {SHIPPED_RESULTS} holds the "
                "results that come with this project; give the study another name"
            )
        return self
