"""Reads configuration files: YAML in which no mapping repeats a key, within limits that no real configuration reaches.

A few lines of YAML aliases can expand to billions of values, and deep nesting overflows the stack. Size, depth and the
number of values, counting aliases each time, are checked while the document is read. Every error is one line.
"""

from __future__ import annotations

import os
from typing import Any

import yaml

from penstock.addresses import local_path
from penstock.errors import UsageError

MAX_BYTES, MAX_DEPTH, MAX_VALUES, MAX_DIGITS = 1_000_000, 64, 20_000, 100
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a configuration file."""
    place = local_path(path, "configuration")
    try:
        with place.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Pass the path of a YAML file.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}. Pass the path of a YAML file.") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES:,} bytes, so it can't be a configuration.")
    return text


def load_yaml(text: str) -> Any:
    """The value of a YAML document; raises ValueError in one line if it is malformed, too large or repeats a key."""
    try:
        return yaml.load(text, BoundedLoader)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise ValueError(f"{line}{_one_line(error.problem or error)}") from error
    except Exception as error:  # PyYAML raises whatever int(), chr() or datetime() do
        raise ValueError(_one_line(error)) from error


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:199]}…"


class BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader with limits, which raises a YAMLError that names both lines of a repeated key."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        self._extents: dict[int, tuple[int, int]] = {}  # of finished nodes: values with aliases expanded, and levels

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes a node; raises an error if the document is too deep or has too many values so far."""
        event = self.peek_event()
        self._depth += 1
        self._nodes += 1
        self._limit(self._nodes, self._depth, event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if id(node) not in self._extents:
            if isinstance(event, yaml.AliasEvent):
                raise yaml.composer.ComposerError(None, None, f"*{event.anchor} contains itself", event.start_mark)
            inner = [self._extents[id(child)] for child in _children(node)]
            values, levels = 1 + sum(size for size, _ in inner), 1 + max((deep for _, deep in inner), default=0)
            self._limit(values, levels, event)
            self._extents[id(node)] = values, levels
        return node

    def _limit(self, values: int, levels: int, event: Any) -> None:
        for number, most, what in ((levels, MAX_DEPTH, "levels"), (values, MAX_VALUES, "values, aliases included")):
            if number > most:
                raise yaml.composer.ComposerError(None, None, f"more than {most:,} {what}", event.start_mark)

    def construct_scalar(self, node: Any) -> Any:
        """Refuses numbers that can be neither computed with nor printed."""
        if node.tag in _NUMBERS and len(node.value) > MAX_DIGITS:
            words = f"a number of {len(node.value):,} characters"
            raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Checks the keys before merges (`<<`), which may occur twice and be overridden."""
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


def _children(node: Any) -> list[Any]:
    match node:
        case yaml.MappingNode():
            return [child for pair in node.value for child in pair]
        case yaml.SequenceNode():
            return list(node.value)
        case _:
            return []
