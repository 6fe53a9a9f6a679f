"""How options are declared: once, as the fields of a frozen record.

A record is a frozen dataclass whose fields are made with `option`. Everything else is derived from it: the flags of a
command (`penstock.cli.flags`), the keys of a YAML file, the typed keyword arguments of the Python functions
(`penstock.arguments`, generated), the tables in the docs. `read_options` turns names and values from any of these into
a record. Every mistake is reported at once, each with the value, what is accepted and the nearest known name.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, SupportsIndex, TypeVar

from annotated_types import Ge

from penstock.errors import UsageError
from penstock.other_names import SYNONYMS, VALUES
from penstock.spelling import learn

Record = TypeVar("Record")
Function = TypeVar("Function", bound=Callable[..., Any])


def option(
    text: str,
    default: Any = None,
    *,
    panel: str = "",
    flag: str = "",
    expects: str = "",
    also: str = "",
    choices: Iterable[str] = (),
    required: bool = False,
) -> Any:
    """A field of a record of options.

    `panel` groups flags in a command's help. `flag` names the flag where it differs from the field. `expects` says what
    to give instead of a wrong value where the type alone does not. `also` is another type that callers may give.
    `choices` are the values that a shell completes, unless the type is an enumeration. `required`: signatures show no
    default, and the command asks for it in its own words.
    """
    metadata: dict[str, Any] = {
        "help": text,
        "panel": panel,
        "flag": flag,
        "expects": expects,
        "also": also,
        "choices": list(choices),
    }
    metadata["required"] = required
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def read_options(record: type[Record], values: Mapping[str, Any], of: str) -> Record:
    """Build a record from names and values. `of` names what the options belong to, for error messages."""
    _refuse(list(_unknown_names(record, values, "")), of)
    _refuse(list(_wrong_kinds(record, values, "")), of)
    values = _plain_values(record, values)
    if (ready := _ready_values(record, values)) is not None:
        return record(**ready)
    from pydantic import ValidationError

    try:
        options: Record = _adapter(record).validate_python(values)
    except ValidationError as error:
        problems = {_location(record, entry["loc"]): entry for entry in error.errors()}
        _refuse([_explain(record, name, entry, of) for name, entry in problems.items()], of)
        raise
    return options


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """` Did you mean …?` for an unknown name that resembles a known one, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def bare_type(hint: Any) -> Any:
    """The type behind `X | None` and `Annotated[X, …]`; of other unions, the first."""
    if typing.get_origin(hint) is typing.Annotated:
        return bare_type(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return bare_type(next(part for part in typing.get_args(hint) if part is not type(None)))
    return hint


def _members(hint: Any) -> set[Any]:
    """The types of a union."""
    return {bare_type(part) for part in typing.get_args(hint)}


def with_signature(record: type[Any]) -> Callable[[Function], Function]:
    """Gives a function that takes `**options` a signature with the record's fields, for completion and `help()`."""

    learn(record)

    def decorate(function: Function) -> Function:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [
            inspect.Parameter(
                entry.name, inspect.Parameter.KEYWORD_ONLY, default=_shown_default(entry), annotation=entry.type
            )
            for entry in fields(record)
        ]
        signature = inspect.signature(function).replace(parameters=[*own, *added])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def _shown_default(entry: Field[Any]) -> Any:
    default = entry.default_factory() if callable(entry.default_factory) else entry.default
    if default is MISSING or entry.metadata.get("required"):
        return inspect.Parameter.empty
    return default.value if isinstance(default, StrEnum) else default


# -- checks -----------------------------------------------------------------------------------------------------------


def _refuse(problems: list[str], of: str) -> None:
    if len(problems) == 1:
        raise UsageError(problems[0])
    if problems:
        raise UsageError(f"{len(problems)} options of {of} are wrong:\n  " + "\n  ".join(problems))


def _unknown_names(record: type[Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    known = {entry.name: entry.metadata.get("help", "") for entry in fields(record)}
    for name in values:
        if name not in known:
            hint = _synonym(str(name), known) or nearest(str(name), known) or f" There are: {', '.join(known)}."
            yield f"unknown option {prefix + str(name)!r}.{hint}"
    for name, inner, value in _sections(record, values, prefix):
        if isinstance(value, Mapping):
            yield from _unknown_names(inner, value, f"{name}.")
        elif value is not None and not is_dataclass(value):
            yield f"{name}={value!r}: expected a section with keys."


def _synonym(name: str, known: Mapping[str, str]) -> str:
    """Names our option that another tool calls so, with its help."""
    ours = SYNONYMS.get(name, "")
    return f" Here it is {ours!r}: {known[ours]}." if ours in known else ""


def _wrong_kinds(record: type[Any], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Refuse booleans for numbers and fractions for counts, although Python would convert them."""
    hints = type_hints(record)
    for name, value in values.items():
        kind = bare_type(hints[name])
        if kind is bool and not isinstance(value, bool):
            yield f"{prefix}{name}={value!r} is neither True nor False."
            continue
        fraction = isinstance(value, float) and value >= 1 and {int, float} <= _members(hints[name])
        if fraction or (kind in (int, float) and isinstance(value, bool)):
            yield f"{prefix}{name}={value!r} is not possible. Use {_expected(record, name)}."
    for name, inner, value in _sections(record, values, prefix):
        if isinstance(value, Mapping):
            yield from _wrong_kinds(inner, value, f"{name}.")


def _sections(record: type[Any], values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, type[Any], Any]]:
    """The nested records among the values: full name, type and value of each."""
    hints = type_hints(record)
    for name, value in values.items():
        kind = hints.get(name)
        if is_dataclass(kind):
            yield prefix + name, typing.cast(type[Any], kind), value
        inner = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
        if is_dataclass(inner) and isinstance(value, (list, tuple)):
            for number, entry in enumerate(value):
                yield f"{prefix}{name}.{number}", typing.cast(type[Any], inner), entry


def _location(record: type[Any], path: tuple[int | str, ...]) -> str:
    """The dotted name of an invalid value, without the parts that pydantic adds for union members."""
    parts: list[str] = []
    kind: Any = record
    for step in path:
        if is_dataclass(kind):
            kind = type_hints(typing.cast(type[Any], kind)).get(str(step))
            parts.append(str(step))
        elif isinstance(step, int) and typing.get_origin(kind) is tuple:
            kind = typing.get_args(kind)[0]
            parts.append(str(step))
    return ".".join(parts)


def _explain(record: type[Any], location: str, problem: Mapping[str, Any], of: str) -> str:
    """Describe what is wrong with a value and what would be valid."""
    owner, name = record, location
    for step in location.split(".")[:-1]:
        hint = bare_type(type_hints(owner).get(step)) if not step.isdigit() else owner
        owner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    name = location.rsplit(".", 1)[-1]
    hint = type_hints(owner).get(name) if is_dataclass(owner) else None
    if problem["type"] == "missing":
        text = next(entry.metadata["help"] for entry in fields(owner) if entry.name == name)
        return f"{of} needs {location}: {text[0].lower()}{text[1:]}."
    value, kind = problem["input"], bare_type(hint)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        known = [member.value for member in kind]
        meant = VALUES.get(name, {}).get(str(value).lower())
        close = f"; did you mean {meant!r}?" if meant else nearest(str(value), known, 0.6).replace(" Did", "; did")
        return f"{location}={value!r} is unknown{close or '.'} Use one of: {', '.join(known)}."
    expected = _expected(owner, name) if hint is not None else ""
    if expected:
        return f"{location}={value!r} is not possible. Use {expected}."
    return f"{location}={value!r}: {problem['msg'].removeprefix('Value error, ')}."


def _expected(record: type[Any], name: str) -> str:
    """What an option accepts, in words; '' if its type says nothing helpful."""
    described = next(entry.metadata.get("expects", "") for entry in fields(record) if entry.name == name)
    if described:
        return str(described)
    hint = type_hints(record)[name]
    kind = bare_type(hint)
    if kind not in (int, float):
        return ""
    least = [m.ge for part in (hint, *typing.get_args(hint)) for m in typing.get_args(part) if isinstance(m, Ge)]
    words = "an integer" if kind is int else "a number"
    optional = ", or nothing" if type(None) in typing.get_args(hint) else ""
    return f"{words}{f' of {least[0]} or more' if least else ''}{optional}"


# -- values -----------------------------------------------------------------------------------------------------------


def _plain_values(record: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    hints = type_hints(record)
    return {name: _plain(value, hints[name]) for name, value in values.items()}


def _plain(value: Any, hint: Any) -> Any:
    """Normalise values from Python code (paths, numpy integers, numbers) to those of a command line."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, SupportsIndex) and not isinstance(value, (bool, int)):
        return operator.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and bare_type(hint) is str:
        return str(value)
    return value


_HINTS: dict[type[Any], dict[str, Any]] = {}
_UNCLEAR = object()


def type_hints(record: type[Any]) -> Mapping[str, Any]:
    """The types of a record's fields."""
    if record not in _HINTS:
        _HINTS[record] = typing.get_type_hints(record, include_extras=True)
    return _HINTS[record]


def _ready_values(record: type[Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values as the record's types, if that is obvious; else None. Importing pydantic takes as long as a hit."""
    needed = {entry.name for entry in fields(record) if entry.default is MISSING and entry.default_factory is MISSING}
    ready = {name: _ready(value, type_hints(record)[name]) for name, value in values.items()}
    return ready if needed <= ready.keys() and _UNCLEAR not in ready.values() else None


def _ready(value: Any, hint: Any) -> Any:
    kind, given = bare_type(hint), type(value)
    match value:
        case None if type(None) in typing.get_args(hint):
            return None
        case str() | bool() if given is kind:
            return value
        case str() if isinstance(kind, type) and issubclass(kind, StrEnum) and value in [*kind]:
            return kind(value)
        case tuple() | list() if kind == tuple[str, ...] and _are_texts(value):
            return tuple(value)
        case dict() if kind == Mapping[str, Any] and _are_texts(value):
            return dict(value)
        case dict() if kind == Mapping[str, str] and _are_texts(value) and _are_texts(value.values()):
            return dict(value)
    return _UNCLEAR


def _are_texts(values: Iterable[Any]) -> bool:
    return all(type(value) is str for value in values)


_ADAPTERS: dict[type[Any], Any] = {}  # building one takes milliseconds


def _adapter(record: type[Any]) -> Any:
    from pydantic import TypeAdapter

    if record not in _ADAPTERS:
        _ADAPTERS[record] = TypeAdapter(record)
    return _ADAPTERS[record]
