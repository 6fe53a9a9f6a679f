"""Keys and values of a YAML or JSON file, or of a launcher's command line, and the differences between them.

A command line is parsed as HfArgumentParser does: `--key value`, `--key=value`, `--flag`, `--no_flag`, several values
after one key; hyphens and underscores are equivalent. Anything before the first key (a script, a YAML file) is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """Keys and values from one origin: a file or the command line."""

    origin: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A key whose value differs between file and command line."""

    key: str
    reason: str


def read_file(path: Path) -> ConfigValues:
    """Reads the top-level keys of a YAML or JSON file."""
    from penstock.config_files import load_yaml, read_text

    text = read_text(path)
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        values = json.loads(text, object_pairs_hook=_unique) if kind == "JSON" else load_yaml(text)
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply.") from error
    except ValueError as error:
        raise UsageError(f"{path}: not valid {kind}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected a mapping of keys to values, found {type(values).__name__}.")
    for key in values:
        if not isinstance(key, str):
            raise UsageError(f"{path}: the key {key!r} is not a string. Put it in quotes.")
    return ConfigValues(str(path), values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different; parsers would silently keep the last value."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} is set twice. Remove one of them")
        found[key] = value
    return found


def read_command(arguments: Sequence[str]) -> ConfigValues:
    """Parses the keys passed on a command line."""
    values: dict[str, Any] = {}
    for name, words in _grouped(arguments):
        if not words and name.startswith("no_"):
            values[name.removeprefix("no_")] = False
        else:
            values[name] = True if not words else literal(words[0]) if len(words) == 1 else [literal(w) for w in words]
    return ConfigValues("command line", values)


def _grouped(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each key with the words that follow it."""
    name, words = "", list[str]()
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            if name:
                yield name, words
            key, equals, value = argument[2:].partition("=")
            name, words = key.replace("-", "_"), [value] if equals else []
        else:
            words.append(argument)
    if name:
        yield name, words


def literal(text: str) -> Any:
    """Parses a command-line word into a value."""
    from penstock.config_files import load_yaml

    try:
        value = load_yaml(text)
    except ValueError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-5 as text
        except ValueError:
            return value
    return value


def differences(file: ConfigValues, command: ConfigValues) -> list[KeyDifference]:
    """Compares the values passed by a launcher with those in the file."""
    found = []
    for key in dict.fromkeys((*file.values, *command.values)):
        if key not in command.values:
            found.append(
                KeyDifference(key, f"{file.origin} says {_shown(file.values[key])}; the command line does not pass it")
            )
        elif key not in file.values:
            found.append(
                KeyDifference(
                    key, f"the command line passes {_shown(command.values[key])}; {file.origin} has no such key"
                )
            )
        elif not _same(file.values[key], command.values[key]):
            stated, passed = _shown(file.values[key]), _shown(command.values[key])
            found.append(KeyDifference(key, f"{file.origin} says {stated}; the command line passes {passed}"))
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


def _same(one: Any, other: Any) -> bool:
    """Compares values after parsing: the text '1e-5' equals the number."""
    values = [literal(value) if isinstance(value, str) else value for value in (one, other)]
    return bool(values[0] == values[1])
