"""Command-line flags from a typed record of options: each field becomes a flag, its help and default come along."""

from __future__ import annotations

import datetime
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import UsageError

Command = Callable[..., None]


def flag_of(option: Field[Any]) -> str:
    """`messages_key` becomes `--messages-key`; a mapping is given entry by entry (`--role bot=assistant`)."""
    name = option.metadata.get("flag", option.name.replace("_", "-"))
    return f"--{name.removesuffix('s') if option.name == 'roles' else name}"


def with_flags(record: type[Any], *, leave_out: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Give a command one flag for each field of a record; it gets what was said as `given`."""

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(record)
        options = {f.name: f for f in fields(record) if f.name not in leave_out}
        said = typing.get_type_hints(command, include_extras=True)  # in the command's own module
        parameters = inspect.signature(command).parameters.values()
        own = [p.replace(annotation=said[p.name]) for p in parameters if p.name != "given"]
        added = [_parameter(option, hints[name]) for name, option in options.items()]

        def run(**values: Any) -> None:
            given = {name: _value(hints[name], values.pop(name)) for name in options}
            command(**values, given={name: value for name, value in given.items() if value is not None})

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return run

    return decorate


def _plain(hint: Any) -> Any:
    """The type behind `X | None`."""
    if isinstance(hint, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def _is_list(hint: Any) -> bool:
    return typing.get_origin(_plain(hint)) in (tuple, list, Mapping)


def _parameter(option: Field[Any], hint: Any) -> inspect.Parameter:
    text = str(option.metadata.get("help", ""))
    default = option.default
    if default not in (MISSING, None, "") and not isinstance(default, tuple):
        text += f" [default: {default}]"
    kind: Any = list[str] if _is_list(hint) else bool if hint is bool else int if hint is int else str
    names = [f"{flag_of(option)}/--no-{option.name.replace('_', '-')}"] if kind is bool else [flag_of(option)]
    annotation = Annotated[kind | None, typer.Option(*names, help=text, show_default=False)]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _value(hint: Any, said: Any) -> Any:
    """What was said on the command line, as the option's type takes it; None where nothing was said."""
    if said is None or said == []:
        return None
    plain = _plain(hint)
    origin = typing.get_origin(plain)
    if origin is Mapping:
        return dict(_entry(text, typing.get_args(plain)[1]) for text in said)
    if origin in (tuple, list):
        return tuple(part for text in said for part in text.split(","))
    if isinstance(plain, type) and issubclass(plain, (StrEnum, Path, datetime.date)):
        return said  # validated with the others, where the message names the option
    return said


def _entry(text: str, kind: Any) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r}: expected NAME=VALUE")
    return name, value if kind is str else literal(value)


def literal(text: str) -> Any:
    """A value as YAML would read the simple ones: true, false, null, numbers, JSON; else the text itself."""
    import orjson

    known = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
