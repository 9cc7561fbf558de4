"""Settings laid over settings: nested mappings, dotted keys, `key=value` words, studies that extend others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mfubench.config import ConfigError
from mfubench.yaml_files import load_yaml

Overrides = dict[str, Any]  # values by RunConfig key, nested like RunConfig


def resolve_extends(values: dict[str, Any], folder: Path, source: str) -> dict[str, Any]:
    """A study that names another in `extends` is that one, with its own keys merged over it.

    folder: where studies are found as NAME.yaml. Raises ConfigError for an unknown name or a circle.
    """
    layers = [values]
    seen: list[str] = []
    while (name := layers[-1].get("extends")) is not None:
        path = folder / f"{name}.yaml"
        if not isinstance(name, str) or not path.is_file():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            raise ConfigError(f"{source}: extends: found {name!r}; studies in {folder}: {known}")
        if name in seen:
            raise ConfigError(f"{source}: extends: {' -> '.join([*seen, name])} is a circle")
        seen.append(name)
        extended = load_yaml(path)
        if not isinstance(extended, dict):
            raise ConfigError(f"{path}: must be a study, a mapping of keys")
        layers.append(extended)
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = merge_plain(merged, {key: value for key, value in layer.items() if key != "extends"})
    return merged


def merge_plain(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings key by key; a null takes a key away; anything else is replaced."""
    merged = dict(under)
    for key, value in over.items():
        if value is None and key in merged:
            del merged[key]
        elif isinstance(merged.get(key), dict) and isinstance(value, dict):
            merged[key] = merge_plain(merged[key], value)
        else:
            merged[key] = value
    return merged


def merge(under: Overrides, over: Overrides) -> Overrides:
    """Nested mappings key by key, anything else replaced. Dotted keys are nested first; a model preset replaces."""
    merged = dict(under)
    for key, value in nest(over).items():
        below = merged.get(key)
        if key == "model" and isinstance(below, str):
            below = {"preset": below}
        replaces = key == "model" and isinstance(value, dict) and "preset" in value
        if isinstance(below, dict) and isinstance(value, dict) and not replaces:
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def nest(overrides: Overrides) -> Overrides:
    """`{"loader.kind": "memmap"}` as `{"loader": {"kind": "memmap"}}`."""
    nested: Overrides = {}
    for key, value in overrides.items():
        head, *others = str(key).split(".")
        tail = ".".join(others)
        for above in (".".join([head, *others[:end]]) for end in range(len(others))):
            if above in overrides:
                raise ConfigError(f"{above} and {key} are both given; write one mapping, or dotted keys alone")
        nested[head] = merge(nested.get(head, {}), {tail: value}) if tail else value
    return nested


def parse_overrides(pairs: list[str]) -> Overrides:
    """`key=value` words of a command line as overrides; values are YAML.

    Raises ConfigError on another form, and for a key that is given twice.
    """
    overrides: Overrides = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"{pair!r}: write key=value, such as micro_batch_size=8 or loader.kind=memmap")
        if key in overrides:
            raise ConfigError(f"{pair!r}: {key} is given twice; keep one of them")
        try:
            overrides[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{pair!r}: the value is not YAML ({' '.join(str(error).split())})") from None
    return nest(overrides)
