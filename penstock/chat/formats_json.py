"""JSON as rows carry it: bytes or strings enter, Python values leave, with integers of any size kept exact.

`orjson` reads everything; it turns integers beyond 64 bits into floats, so a float that large is read again
by the standard library. What can't be read leaves as a RowError that tells invalid UTF-8, lone surrogates and
invalid JSON apart, with the byte where it happened.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from penstock.errors import RowError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LARGE = 2**63


class LargeInteger(Exception):
    """A float so large that it may have been an integer in the text: read the text again, exactly."""


def parse_row(row: bytes) -> dict[str, Any]:
    """The JSON object that a row's bytes hold."""
    try:
        value = orjson.loads(row)
    except orjson.JSONDecodeError as error:
        if row.startswith(BYTE_ORDER_MARK):  # the first row of a file written on Windows
            return parse_row(row[len(BYTE_ORDER_MARK) :])
        value = with_huge_integers(row) if "infinity" in error.msg else None
        if value is None:
            raise _diagnosis(row, error) from None
    if type(value) is not dict:
        raise RowError(
            "not_an_object",
            f"the row is {a_kind(value)}, not a JSON object",
            'Each row must be an object such as {"messages": […]}',
        )
    return value


def with_huge_integers(row: bytes) -> Any:
    """The value of a row whose integers are larger than any float, or None where something else is wrong with it."""
    try:
        value = json.loads(row, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # not JSON, a float beyond all bounds, a lone surrogate; or nested too deeply
        return None
    return value


def _refuse(name: str) -> None:
    raise ValueError(name)


def parse_row_exactly(row: bytes) -> dict[str, Any]:
    """As `parse_row`, for a row that it has read already, with integers of any size."""
    value: dict[str, Any] = json.loads(row.removeprefix(BYTE_ORDER_MARK))
    return value


def parse_text(text: str) -> Any:
    """The value of JSON inside a string. Raises ValueError where it is not JSON."""
    value = orjson.loads(text)
    try:
        check_integers(value)
    except LargeInteger:
        return json.loads(text)
    return value


def check_integers(value: object) -> None:
    """Raise LargeInteger where a parsed value holds a float that may have been an integer in the text."""
    todo = [value]
    for item in todo:  # grows while it is walked: a row may be nested more deeply than calls can be
        if type(item) is dict:
            todo.extend(item.values())
        elif type(item) is list:
            todo.extend(item)
        elif type(item) is float and not -_LARGE < item < _LARGE:
            raise LargeInteger


def a_kind(value: object) -> str:
    """What a JSON value is, in words for an error."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def _diagnosis(row: bytes, error: orjson.JSONDecodeError) -> RowError:
    try:
        text = row.decode()
    except UnicodeDecodeError as bad:
        return RowError(
            "invalid_utf8",
            f"byte {bad.start} (0x{row[bad.start]:02x}) is not valid UTF-8 ({bad.reason})",
            "Write the file as UTF-8",
        )
    at = len(text[: error.pos].encode())
    if "surrogate" in error.msg:
        return RowError(
            "lone_surrogate",
            f"the escape {text[error.pos : error.pos + 6]} at byte {at} is half of a surrogate pair",
            "Write the whole character, or remove the escape",
        )
    return RowError("invalid_json", f"invalid JSON at byte {at}: {error.msg}", "Each row must be one JSON object")
