"""Architecture presets: config/models.yaml as `ModelConfig` objects. No torch."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mfubench
from mfubench.config import ConfigError, ModelConfig, parse
from mfubench.yaml_files import load_yaml

# The repository's config folder beside src/; MFUBENCH_CONFIG_DIR points an installed package at another one.
CONFIG_DIR = Path(os.environ.get("MFUBENCH_CONFIG_DIR") or Path(mfubench.__file__).parents[2] / "config")


@functools.cache
def read_presets(path: Path) -> dict[str, dict[str, Any]]:
    """The presets of one YAML file, as plain data."""
    return read_table(path, "must map preset names to mappings of model keys")


def read_table(path: Path, shape: str) -> dict[str, dict[str, Any]]:
    """A YAML file of the config folder that maps names to mappings.

    Raises ConfigError where it is missing, no YAML, or of another shape (then saying `shape`).
    """
    if not path.is_file():
        raise ConfigError(f"{path}: is not there; set MFUBENCH_CONFIG_DIR to the folder with {path.name}")
    rows = load_yaml(path)
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfigError(f"{path}: {shape}")
    return rows


def preset_names() -> list[str]:
    """Names of all presets, in the order of the file."""
    return list(read_presets(CONFIG_DIR / "models.yaml"))


def load_model(name: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The preset `name`, with single keys replaced by `overrides` (keys of ModelConfig).

    What a preset leaves out is derived after the overrides: with another hidden_size, head_dim follows.
    Raises ConfigError for an unknown name (with the nearest one), an unknown key or a value that does not fit.
    """
    path = CONFIG_DIR / "models.yaml"
    presets = read_presets(path)
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{path}: no model preset {name!r}; {hint}presets: {', '.join(presets)}")
    return parse(ModelConfig, {"name": name, **presets[name], **(overrides or {})}, f"model {name}")
