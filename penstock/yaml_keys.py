"""Reads YAML in which a mapping may not repeat a key. PyYAML would silently keep the last value."""

from __future__ import annotations

from typing import Any

import yaml


class UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, which raises a YAMLError that names both lines of a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Checks the keys before merges (`<<`), which may stand twice and be overridden."""
        lines: dict[tuple[str, str], int] = {}  # by tag and text: 1 and "1" are different keys
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if first := lines.get((key.tag, key.value)):
                words = f"{key.value} is set twice, first in line {first}. Remove one of them"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            lines[key.tag, key.value] = key.start_mark.line + 1
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def load_yaml(text: str) -> Any:
    """The value of a YAML document; raises YAMLError if it is malformed or repeats a key."""
    return yaml.load(text, UniqueKeyLoader)  # noqa: S506 (a safe loader)
