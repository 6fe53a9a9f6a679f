"""Finding the row format: sample rows and the user's options enter, the column mapping leaves.

Where several formats fit, the order of `Format` decides; options narrow the choice to the formats that have
such a column. Where none fits, the error lists the columns there are, what each format needs, and the nearest
names. A column counts where some sample row has a value other than null in it. Costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from penstock.chat.formats import (
    LABEL_COLUMN,
    MEDIA_COLUMNS,
    ROLES,
    SHAREGPT_ROLES,
    Format,
    FormatOptions,
    Mapping,
    label_of,
)
from penstock.errors import SourceError, UsageError

_MESSAGE_KEYS = (("role", "content"), ("from", "value"))
_LIST_COLUMNS = ("messages", "conversations", "conversation")
_CHAT = ("tools", "system", "variables")
_DEFAULT_COLUMNS: dict[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "system": ("system",),
    "variables": ("chat_template_kwargs",),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "label": (LABEL_COLUMN,),
    "input": ("input",),
    "history": ("history",),
    "text": ("text",),
}


@dataclass(frozen=True, slots=True)
class _Shape:
    """One way to read a format: what it must have, what it may have, and under which names."""

    format: Format
    needs: dict[str, tuple[str, ...]]  # purpose -> column names, the first one found is taken
    may_have: tuple[str, ...]
    message_keys: tuple[str, str] | None = None  # its messages must have these, unless the user says otherwise
    has_messages: bool = True


def _needs(*purposes: str) -> dict[str, tuple[str, ...]]:
    return {purpose: _DEFAULT_COLUMNS[purpose] for purpose in purposes}


_PAIR = _needs("chosen", "rejected")
_SHAPES = (
    _Shape(Format.PREFERENCE, _PAIR | _needs("prompt"), _CHAT),
    _Shape(Format.PREFERENCE, _PAIR | {"prompt": _LIST_COLUMNS}, _CHAT),
    _Shape(Format.PREFERENCE, _PAIR | {"query": ("instruction", "query", "question")}, (*_CHAT, "input", "history")),
    _Shape(Format.PREFERENCE, _PAIR, (*_CHAT, "prompt")),
    _Shape(Format.KTO, _needs("prompt", "completion", "label"), _CHAT),
    _Shape(Format.KTO, {"messages": _LIST_COLUMNS} | _needs("label"), _CHAT, _MESSAGE_KEYS[0]),
    _Shape(Format.MESSAGES, {"messages": _LIST_COLUMNS}, _CHAT, _MESSAGE_KEYS[0]),
    _Shape(Format.SHAREGPT, {"messages": ("conversations", "conversation", "messages")}, _CHAT, _MESSAGE_KEYS[1]),
    _Shape(Format.PROMPT_COMPLETION, _needs("prompt", "completion"), _CHAT),
    _Shape(
        Format.ALPACA,
        {"query": ("instruction",), "response": ("output",)},
        (*_CHAT, "input", "history"),
        has_messages=False,
    ),
    _Shape(
        Format.QUERY_RESPONSE,
        {"query": ("query",), "response": ("response",)},
        (*_CHAT, "history"),
        has_messages=False,
    ),
    _Shape(Format.TEXT, _needs("text"), (), has_messages=False),
)


def detect(rows: Sequence[dict[str, Any]], options: FormatOptions | None = None) -> Mapping:
    """The mapping that fits the columns of sample rows."""
    options = options or FormatOptions()
    if not rows:
        raise SourceError("there are no rows, so their format can't be found. Check the files and the split.")
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
    candidates = [shape for shape in _asked_for(options) if _admits(shape, options)]
    if not candidates:
        named = ", ".join(f"--{purpose}-key" for purpose in _named(options))
        raise UsageError(f"no row format has all the columns that {named} name. Formats: {_catalogue()}.")
    _check_named(rows, options)
    for shape in candidates:
        found = {purpose: _find(purpose, names, columns, options) for purpose, names in shape.needs.items()}
        if all(found.values()) and _messages_fit(shape, found, rows, options):
            return _mapping(shape, {p: c for p, c in found.items() if c}, columns, rows, options)
    raise SourceError(_no_fit(candidates, columns, rows, options))


def format_columns(options: FormatOptions) -> frozenset[str]:
    """Every column that some format reads; of other columns, `detect` needs no more than the names."""
    usual = {name for shape in _SHAPES for names in shape.needs.values() for name in names}
    usual.update(name for names in _DEFAULT_COLUMNS.values() for name in names)
    return frozenset(
        {*usual, *MEDIA_COLUMNS, LABEL_COLUMN, *(options.column(purpose) or "" for purpose in _named(options))}
    )


def _asked_for(options: FormatOptions) -> list[_Shape]:
    if options.format == "auto":
        return list(_SHAPES)
    if options.format not in {f.value for f in Format}:
        near = get_close_matches(options.format, [f.value for f in Format], 1, 0)
        expected = ", ".join(("auto", *Format))
        raise UsageError(f"--format {options.format} is unknown; expected {expected}. Nearest: {near[0]}.")
    return [shape for shape in _SHAPES if shape.format == options.format]


def _named(options: FormatOptions) -> Iterator[str]:
    for purpose in (*_DEFAULT_COLUMNS, "messages", "query", "response"):
        if options.column(purpose) is not None:
            yield purpose


def _check_named(rows: Sequence[dict[str, Any]], options: FormatOptions) -> None:
    """A column that the user names must be there: a typo must not become a row without its tools."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for purpose in _named(options):
        name = options.column(purpose) or ""
        if name not in columns:
            near = get_close_matches(name, columns, 1)
            hint = f" Nearest: {near[0]}." if near else ""
            raise SourceError(f"--{purpose}-key: there is no column {name!r} in {', '.join(columns)}.{hint}")


def _admits(shape: _Shape, options: FormatOptions) -> bool:
    """Whether the format has a place for every column that the user named."""
    places = {*shape.needs, *shape.may_have}
    if shape.needs.get("prompt") == _LIST_COLUMNS:
        places.add("messages")  # the prompt of a preference row may be named so too
    return places.issuperset(_named(options))


def _find(purpose: str, names: tuple[str, ...], columns: list[str], options: FormatOptions) -> str | None:
    if purpose == "prompt" and names == _LIST_COLUMNS:
        asked = options.messages_key or options.prompt_key
    else:
        asked = options.column(purpose)
    return next((name for name in ((asked,) if asked else names) if name in columns), None)


def _first_message(columns: list[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    for row in rows:
        for column in columns:
            value = row.get(column)
            message = value[0] if isinstance(value, list) and value else value
            if isinstance(message, dict):
                return message
    return None


def _keys_of(message: dict[str, Any], options: FormatOptions) -> tuple[str, str] | None:
    """The keys of role and content: the user's, or the first usual pair whose role key is there."""
    if options.role_key or options.content_key:
        return options.role_key or "role", options.content_key or "content"
    return next((keys for keys in _MESSAGE_KEYS if keys[0] in message), None)


def _messages_fit(
    shape: _Shape, found: dict[str, str | None], rows: Sequence[dict[str, Any]], options: FormatOptions
) -> bool:
    """Where only the keys inside the messages tell formats apart, whether they are this format's.

    A label makes an answer KTO's where every sample row has one that is true or false: numbers may be classes.
    """
    if "label" in shape.needs and options.format == "auto" and not options.label_key:
        labels = [row.get(found["label"] or "") for row in rows]
        if any(type(label) is int or label_of(label) is None for label in labels):
            return False
    if shape.message_keys is None or options.format != "auto":
        return True
    message = _first_message([found["messages"] or ""], rows)
    if message is None:
        return False
    keys = _keys_of(message, options)
    return keys is not None and (keys[0] == "from") == (shape.message_keys[0] == "from")


def _mapping(
    shape: _Shape, found: dict[str, str], columns: list[str], rows: Sequence[dict[str, Any]], options: FormatOptions
) -> Mapping:
    mapped = dict(found)
    for purpose in shape.may_have:
        mapped[purpose] = options.column(purpose) or _DEFAULT_COLUMNS[purpose][0]
    seen = tuple(name for name in columns if name in mapped.values())
    unused = tuple(name for name in columns if name not in mapped.values())
    ordered = tuple(sorted(mapped.items()))
    if not shape.has_messages:
        return Mapping(shape.format, ordered, seen=seen, unused=unused)
    message = _first_message(list(found.values()), rows)
    keys = (message and _keys_of(message, options)) or shape.message_keys or _keys_of({"role": ""}, options)
    assert keys is not None
    known = SHAREGPT_ROLES if shape.format is Format.SHAREGPT or keys[0] == "from" else ROLES
    return Mapping(
        shape.format,
        ordered,
        role_key=keys[0],
        content_key=keys[1],
        roles=tuple(sorted({**known, **options.roles}.items())),
        weight_keys=tuple(options.weight_keys),
        seen=seen,
        unused=unused,
        renamed=tuple(sorted(options.roles.items())),
    )


def _catalogue() -> str:
    """Every format with the columns it needs."""
    lines: dict[str, list[str]] = {}
    for shape in _SHAPES:
        needs = " + ".join("|".join(names) for names in shape.needs.values())
        lines.setdefault(shape.format.value, []).append(needs)
    keys = {"messages": " of {role, content}", "sharegpt": " of {from, value}"}  # of the lists
    return "; ".join(f"{name} ({', or '.join(needs)}{keys.get(name, '')})" for name, needs in lines.items())


def _no_fit(
    candidates: list[_Shape], columns: list[str], rows: Sequence[dict[str, Any]], options: FormatOptions
) -> str:
    listed = [name for name in (options.messages_key, *_LIST_COLUMNS) if name in columns]
    message = _first_message(listed, rows)
    if message is not None and any(shape.message_keys for shape in candidates) and _keys_of(message, options) is None:
        return (
            f"the messages in column {listed[0]!r} have the keys {', '.join(message)}; expected role and content, or "
            "from and value. Name them with --role-key and --content-key."
        )
    asked = "no row format fits" if options.format == "auto" else f"format {options.format} does not fit"
    text = f"{asked} the columns {', '.join(columns) or '(none with a value)'}. Formats: {_catalogue()}."
    for shape in candidates:
        for purpose, names in shape.needs.items():
            near = get_close_matches(names[0], columns, 1, 0.75)
            if near and near[0] not in names:
                flag = "messages" if names == _LIST_COLUMNS else purpose
                return f"{text} Column {near[0]!r} is near {names[0]!r}: name it with --{flag}-key {near[0]}."
    if options.format != "auto":
        return text
    lists = [c for c in columns if any(isinstance(v := r.get(c), list) and v and isinstance(v[0], dict) for r in rows)]
    nearest = lists or sorted(columns, key=lambda c: -max(_likeness(c, name) for name in _LIST_COLUMNS))[:1]
    return f"{text} If {nearest[0]!r} holds the conversation, say so: --messages-key {nearest[0]}." if nearest else text


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other).ratio()
