"""What was expected: the files of config/expectations, one a model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mfubench.config import ConfigError, Strict, parse
from mfubench.presets import CONFIG_DIR
from mfubench.yaml_files import load_yaml

Quantity = Literal["mfu", "tokens_per_s", "memory_gb", "loss", "hours", "parameters"]
STATED = re.compile(r"([+−-])(\d+(?:\.\d+)?)(?:(?: to |[-–])(\d+(?:\.\d+)?))? %")  # "+3-5 %" in words
EFFECT_TOLERANCE = 0.03  # rounding of the figures that an effect is computed from
QUANTITIES: tuple[Quantity, ...] = ("mfu", "tokens_per_s", "memory_gb", "loss", "hours", "parameters")


def as_range(value: Any) -> Any:
    """A single number is a range of one point."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (float(value), float(value))
    if isinstance(value, list) and all(isinstance(item, (int, float)) for item in value):
        return tuple(float(item) for item in value)
    return value


def check_rising(value: tuple[float, float]) -> tuple[float, float]:
    if value[1] < value[0]:
        raise ValueError(f"a range is [low, high], found {list(value)}")
    return value


Range = Annotated[tuple[float, float], BeforeValidator(as_range)]


class ExpectedMachine(Strict):
    card: str
    world_size: int = Field(ge=1)


class Target(Strict):
    """A number of tokens to extrapolate to."""

    tokens: int = Field(ge=1)
    label: str


class Expectation(Strict):
    """One statement of a document about one case on one machine."""

    case: str | None = Field(None, description="stage/case; null: about no single case")
    machine: str = Field(description="key under `machines:`")
    rank: Literal["primary", "further"]
    source: str
    mfu: Range | None = Field(None, description="fraction of the dense peak, palm")
    tokens_per_s: Range | None = Field(None, description="over all GPUs")
    memory_gb: Range | None = Field(None, description="peak of a GPU, GB as the document says it")
    loss: Range | None = None
    hours: Range | None = None
    parameters: Range | None = None
    iterations: int | None = Field(None, ge=1, description="of `loss` and `hours`")
    tokens: int | None = Field(None, ge=1, description="trained on in `hours`")
    note: str | None = None

    @model_validator(mode="after")
    def check_ranges(self) -> Expectation:
        stated = [check_rising(value) for name in QUANTITIES if (value := getattr(self, name)) is not None]
        if not stated:
            raise ValueError(f"expects nothing; give one of {', '.join(QUANTITIES)}")
        return self


class ExpectedEffect(Strict):
    """What a document says that one setting is worth."""

    name: str
    arm: str | None = None
    control: str | None = None
    of: Literal["tokens_per_s", "mfu", "memory"]
    rank: Literal["primary", "further"]
    change: Range = Field(description="arm over control: 0.2 is 20 % more")
    source: str
    note: str | None = None

    @model_validator(mode="after")
    def check_change(self) -> ExpectedEffect:
        check_rising(self.change)
        return self


class Expectations(Strict):
    """One model's file."""

    model: str
    seq_len: int = Field(ge=1)
    machines: dict[str, ExpectedMachine]
    targets: tuple[Target, ...] = Field((), strict=False)
    expectations: tuple[Expectation, ...] = Field((), strict=False)
    effects: tuple[ExpectedEffect, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def check_machines(self) -> Expectations:
        for expectation in self.expectations:
            if expectation.machine not in self.machines:
                raise ValueError(
                    f"{expectation.source}: machine {expectation.machine!r} is none of {', '.join(self.machines)}"
                )
        return self

    def of_case(self, case: str) -> list[Expectation]:
        """Statements about a case, the testing guide's first."""
        return sorted(
            (item for item in self.expectations if item.case == case), key=lambda item: item.rank == "further"
        )


def expected_change(arm: str, control: str, expectations: Expectations | None) -> tuple[float, float] | None:
    """What the testing guide says of two cases, in either direction."""
    if expectations is None:
        return None
    for item in expectations.effects:
        if item.rank != "primary" or item.of == "memory":
            continue
        if (item.arm, item.control) == (arm, control):
            return item.change
        if (item.arm, item.control) == (control, arm):
            return (1 / (1 + item.change[1]) - 1, 1 / (1 + item.change[0]) - 1)
    return None


def stated_change(words: str | None) -> tuple[float, float] | None:
    """The change that a study's own words expect, as "+3-5 %" or "-20-30 %"; None of other words ("2x slower")."""
    stated = STATED.fullmatch(words or "")
    if stated is None:
        return None
    sign = 1 if stated[1] == "+" else -1
    ends = [sign * float(end) / 100 for end in stated.group(2, 3) if end is not None]
    return (min(ends), max(ends))


def judged_change(expected: tuple[float, float]) -> tuple[float, float]:
    """The range in which an effect is as expected: of a single figure 3 points to either side."""
    low, high = expected
    return (low - EFFECT_TOLERANCE, high + EFFECT_TOLERANCE) if low == high else expected


def load_expectations(name: str, folder: Path = CONFIG_DIR / "expectations") -> Expectations:
    """Read config/expectations/<name>.yaml. Raises ConfigError naming file, key and what is allowed."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise ConfigError(f"expectations: found {name!r}, but there is no {path}; there are: {known}")
    expectations: Expectations = parse(Expectations, load_yaml(path), str(path))
    return expectations
