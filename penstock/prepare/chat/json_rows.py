"""Parses the JSON of rows, with exact integers of any size.

Rows are parsed with `orjson`, which turns integers beyond 64 bits into floats; a row with such a large float is parsed
again by the standard library. Errors are RowErrors that distinguish invalid UTF-8, lone surrogates and invalid JSON,
and give the byte offset.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from penstock.errors import RowError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LARGE = 2**63


class LargeInteger(Exception):
    """A parsed float is so large that it may be an integer in the text, which must be parsed again exactly."""


def parse_row(row: bytes) -> dict[str, Any]:
    """Parses the bytes of a row to a JSON object."""
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
            f"the row is {describe_type(value)}, not a JSON object",
            'Each row must be an object such as {"messages": […]}',
        )
    return value


def with_huge_integers(row: bytes) -> Any:
    """Parses a row whose integers are larger than any float; None if something else is wrong with it."""
    try:
        value = json.loads(row, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # not JSON, a float beyond all bounds, a lone surrogate; or nested too deeply
        return None
    return value


def _refuse(name: str) -> None:
    raise ValueError(name)


def parse_row_exactly(row: bytes) -> dict[str, Any]:
    """Parses a row that `parse_row` has accepted again, with integers of any size."""
    value: dict[str, Any] = json.loads(row.removeprefix(BYTE_ORDER_MARK))
    return value


def parse_text(text: str) -> Any:
    """Parses JSON inside a string. Raises ValueError if it isn't JSON."""
    value = orjson.loads(text)
    try:
        check_integers(value)
    except LargeInteger:
        return json.loads(text)
    return value


def check_integers(value: object) -> None:
    """Raises LargeInteger if a parsed value holds a float that may be an integer in the text."""
    todo = [value]
    for item in todo:  # the list grows during iteration: rows may be nested too deeply for recursion
        if type(item) is dict:
            todo.extend(item.values())
        elif type(item) is list:
            todo.extend(item)
        elif type(item) is float and not -_LARGE < item < _LARGE:
            raise LargeInteger


def describe_type(value: object) -> str:
    """Describes the type of a JSON value for an error."""
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
