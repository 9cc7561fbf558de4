"""YAML as people write it by hand: no objects, and no key twice, of which the first would be lost without a word."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mfubench.config import ConfigError


class UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a mapping with a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here a second time", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """The content of a YAML file as plain data.

    Raises ConfigError where the file cannot be read, is not UTF-8 or no YAML, or holds a key twice.
    """
    try:
        return UniqueKeyLoader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is no valid YAML ({' '.join(str(error).split())})") from None
