"""YAML as people write it by hand: no objects, no key twice, of which the first would be lost without a word, and no
key that is no text: `1.10` would be 1.1, and `yes` true.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mfubench.config import ConfigError


class KeyFault(ValueError):
    """A key that YAML allows and we do not."""


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with a key twice, or with one that is no text. Raises KeyFault."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                written = key_node.value if isinstance(key_node, yaml.ScalarNode) else key
                raise KeyFault(f"line {line}: the key {written} is no text, but {key!r}; write it in quotes")
            if key in seen:
                raise KeyFault(f"line {line}: the key {key!r} stands here a second time")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as plain data.

    Raises ConfigError where the file cannot be read, is not UTF-8 or no YAML, or holds a key twice or one that is no
    text.
    """
    try:
        return StrictLoader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except KeyFault as error:
        raise ConfigError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is no valid YAML ({' '.join(str(error).split())})") from None


def read_within(value: Any) -> Any:
    """The value of one `snakemake --config KEY=VALUE` as a file would give it.

    Snakemake leaves everything within `{…}` and `[…]` as text: of `machine={gpus: 2}` comes the text "2".
    """
    if isinstance(value, dict):
        return {key: read_scalar(item) if isinstance(item, str) else read_within(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_scalar(item) if isinstance(item, str) else read_within(item) for item in value]
    return value


def read_scalar(text: str) -> Any:
    """A number, truth value or null where the text is one; else the text: of it quotes may have made one (`"[SEP]"`,
    `"# x"`), and a date is none of a study's values."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    empty = value is None and text.strip().lower() in ("", "~", "null")
    comment = " #" in text  # which would cut the text short
    return value if empty or (isinstance(value, bool | int | float | str) and not comment) else text
