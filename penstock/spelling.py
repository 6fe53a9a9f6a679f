"""Spells options in messages as the caller does: `--turns faithful` on the command line, `turns='faithful'` in Python.

Messages are written either way, and errors and log messages pass through `spelled`. Only options of known records are
touched, and a word after a flag is its value only if it can be nothing else: a choice, a number, in quotes, a
placeholder in capitals, or before a colon.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any

_records: list[type[Any]] = []
_speaks_flags = False
_import_records: Callable[[], object] = bool

_FLAG = re.compile(r"(?<![\w/-])(with )?--([a-z][a-z-]*[a-z])(?:[ =]('[^']*'|[^\s,;()`]*[^\s.,;:()`]|…)(:?))?")
_ARGUMENT = re.compile(r"(?<![\w.'\"(])([a-z][a-z_]*)=('[^']*'|\"[^\"]*\"|True\b|\d+)")
_PLACEHOLDER = re.compile(r"…|'[^']*'|[A-Z]{2}[\w.:\[\]]*|\d+")


@dataclass(frozen=True)
class _Option:
    name: str
    flag: str
    choices: frozenset[str]
    is_switch: bool
    is_mapping: bool


def learn(record: type[Any]) -> None:
    """Adds the options of a record to those that are respelled."""
    if record not in _records:
        _records.append(record)
        _options.cache_clear()


@contextmanager
def speaking_flags(import_records: Callable[[], object]) -> Iterator[None]:
    """Spells options as flags, for a command. `import_records` is called before the first message is respelled."""
    global _speaks_flags, _import_records
    _speaks_flags, _import_records = True, import_records
    try:
        yield
    finally:
        _speaks_flags = False


def spelled(text: str) -> str:
    """The message with its options spelled as the caller does."""
    if _speaks_flags:
        return as_flags(text) if "=" in text else text
    return as_arguments(text) if "--" in text else text


def as_arguments(text: str) -> str:
    """`--turns faithful` becomes `turns='faithful'`, and `--force` becomes `force=True`."""

    def respell(found: re.Match[str]) -> str:
        preposition, flag, value, colon = found.groups()
        option = _options().get(f"--{flag}")
        if option is None:
            return found[0]
        preposition = preposition or ""
        if option.is_switch:
            return f"{preposition}{option.name}=True{found[0][found.start(3) - found.start() - 1 :] if value else ''}"
        if value and _is_value(option, value, colon):
            return f"{preposition}{option.name}={_argument(option, value)}{colon}"
        rest = found[0][found.start(3) - found.start() - 1 :] if value else ""
        return f"{preposition}{option.name}{'=…' if preposition else ''}{rest}"

    return _FLAG.sub(respell, text)


def as_flags(text: str) -> str:
    """`turns='faithful'` becomes `--turns faithful`."""

    def respell(found: re.Match[str]) -> str:
        option = _options().get(found[1])
        if option is None:
            return found[0]
        value = found[2].strip("'\"")
        return option.flag if option.is_switch else f"{option.flag} {value}"

    if _ARGUMENT.search(text) is None:
        return text
    _import_records()
    return _ARGUMENT.sub(respell, text)


def _is_value(option: _Option, value: str, colon: str) -> bool:
    if option.is_mapping:
        return "=" in value
    return bool(colon) or value in option.choices or _PLACEHOLDER.fullmatch(value) is not None


def _argument(option: _Option, value: str) -> str:
    if option.is_mapping:
        key, _, own = value.partition("=")
        return repr({key: own})
    return value if value.isdigit() or value == "…" or value.startswith("'") else repr(value)


@cache
def _options() -> Mapping[str, _Option]:
    """The known options by flag and by name."""
    found: dict[str, _Option] = {}
    for record in _records:
        hints = typing.get_type_hints(record)
        for entry in fields(record):
            kinds = {hints[entry.name], *typing.get_args(hints[entry.name])}
            enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum)]
            choices = {str(member.value) for kind in enums for member in kind} | {*entry.metadata.get("choices", ())}
            flag = f"--{entry.metadata.get('flag') or entry.name.replace('_', '-')}"
            is_mapping = any(typing.get_origin(kind) is Mapping for kind in kinds)
            option = _Option(entry.name, flag, frozenset(choices), bool in kinds, is_mapping)
            for name in (flag, entry.name):
                known = found.setdefault(name, option)
                if known is not option:
                    found[name] = _Option(known.name, flag, known.choices | choices, known.is_switch, known.is_mapping)
    return found
