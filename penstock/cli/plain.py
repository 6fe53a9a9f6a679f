"""The flags of options, and simple lines of `penstock prepare`, read without typer.

Importing typer takes as long as a hit. Lines that are not simple (help, an unknown flag, a missing value) are left to
it.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, NamedTuple

from penstock.build.options import PrepareOptions
from penstock.errors import UsageError
from penstock.options import bare_type, type_hints


class Plain(NamedTuple):
    """A line of `penstock prepare`."""

    sources: list[str]
    given: dict[str, Any]
    json: bool


def plain_arguments(arguments: list[str]) -> Plain | None:
    """Reads the arguments that follow `penstock`; None if they are not simple."""
    names = {flag_of(option): option.name for option in fields(PrepareOptions)}
    hints = {**type_hints(PrepareOptions), "json": bool}
    sources: list[str] = []
    found: dict[str, list[str]] = {}
    left = arguments[:0:-1]
    while left:
        argument = left.pop()
        if not argument.startswith("-"):
            sources.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        name = "json" if flag == "--json" else names.get(flag, "")
        hint = hints.get(name, int)
        if bare_type(hint) is int or (name in found and not is_list(hint)):
            return None
        if bare_type(hint) is not bool:
            value = value if equals or not left else left.pop()
            if not value or value.startswith("-"):
                return None
        elif equals:
            return None
        found.setdefault(name, []).append(value)
    if not sources or "_PENSTOCK_COMPLETE" in os.environ:
        return None
    json = found.pop("json", None) is not None
    return Plain(sources, {name: _given(hints[name], values) for name, values in found.items()}, json)


def _given(hint: Any, values: list[str]) -> Any:
    return True if bare_type(hint) is bool else value_of(hint, values if is_list(hint) else values[0])


def flag_of(option: Field[Any]) -> str:
    """`messages_key` becomes `--messages-key`; repeatable options have a singular flag (`--role bot=assistant`)."""
    return f"--{option.metadata.get('flag') or option.name.replace('_', '-')}"


def is_list(hint: Any) -> bool:
    """Whether a flag may be given several times."""
    return typing.get_origin(bare_type(hint)) in (tuple, list, Mapping)


def value_of(hint: Any, value: Any) -> Any:
    """A command-line value converted towards the option's type; None if the flag was not given."""
    if value is None or value == []:
        return None
    plain = bare_type(hint)
    origin = typing.get_origin(plain)
    if origin is Mapping:
        return dict(_entry(text, typing.get_args(plain)[1]) for text in value)
    if origin in (tuple, list):
        return tuple(part for text in value for part in text.split(","))
    return value  # validated with the other options, where the error can name it


def _entry(text: str, kind: Any) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r}: expected NAME=VALUE")
    return name, value if kind is str else literal(value)


def literal(text: str) -> Any:
    """Parse true, false, null, numbers and JSON as YAML would; return anything else as text."""
    import orjson

    known = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
