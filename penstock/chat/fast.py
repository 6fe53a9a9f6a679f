"""The fast renderer: minijinja (Rust) with transformers' filters and globals, on source that emit.py made.

Importing this module needs minijinja; the engine works without it. An error of this renderer never reaches a user: the
row goes to the reference, which words it. Work is bounded by minijinja's fuel.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import minijinja
from jinja2 import filters

from penstock.chat.emit import BLOCK_END, BLOCK_START, COMMENT_END, COMMENT_START, VARIABLE_END, VARIABLE_START
from penstock.chat.emit_rules import PREFIX, PYTHON_METHODS
from penstock.chat.sandbox import MAX_OUTPUT, Numbers, Sandbox, mark_filters, raise_exception, strftime_on, tojson
from penstock.chat.sentinels import CONTROL

FUEL: Final = 10_000_000  # instructions of one render
_dumps = json.JSONEncoder(ensure_ascii=False).encode


class Refused(Exception):
    """The value is one on which the engines differ: let the reference render this row."""


def refuse() -> None:
    raise Refused


def fast_tojson(value: Any, *args: Any, **kwargs: Any) -> str:
    return tojson(value, *args, **kwargs) if args or kwargs else _dumps(value)


def attribute(value: Any, name: str) -> Any:
    """`mapping.items` without a call: jinja2 finds the method, not the key."""
    if not isinstance(value, dict):
        raise Refused
    return getattr(value, name)


def method(value: Any, name: str, *args: Any) -> Any:
    """A method that is left to Python."""
    if not isinstance(value, str) or name not in PYTHON_METHODS | {"split"}:
        raise Refused
    return getattr(value, name)(*args)


def integer(value: Any, *args: Any, **kwargs: Any) -> int:
    result = filters.do_int(value, *args, **kwargs)
    if isinstance(value, float) or not isinstance(result, int) or abs(result) >> 62:
        raise Refused
    return result


def percent(pattern: str, value: Any) -> str:
    return str(pattern % value)


def pluck(values: Any, name: str) -> list[Any]:
    """`map(attribute=name)`, of mappings that all have it."""
    if not all(isinstance(value, dict) and name in value for value in values):
        raise Refused
    return [value[name] for value in values]


def map_filter(values: Any, name: str) -> list[str]:
    """`map("name")`, of strings (of anything with tojson)."""
    if name == "tojson":
        return [_dumps(value) for value in values]
    return [TEXT_FUNCTIONS[name](value) for value in values]


def text_filter(function: Callable[[str], str]) -> Callable[[Any], str]:
    def apply(value: Any) -> str:
        if not isinstance(value, str):
            raise Refused
        return function(value)

    return apply


TEXT_FUNCTIONS: Final = {
    "title": text_filter(filters.do_title),
    "capitalize": text_filter(filters.do_capitalize),
    "upper": text_filter(filters.do_upper),
    "lower": text_filter(filters.do_lower),
    "trim": text_filter(filters.do_trim),
}


def python_filters(sandbox: Sandbox) -> dict[str, Callable[..., Any]]:
    """jinja2's own filters, for those that the engines disagree about."""

    def sort(value: Any, *args: Any, **kwargs: Any) -> Any:
        if value is None:
            raise Refused
        return filters.do_sort(sandbox, value, *args, **kwargs)

    def indent(value: Any, *args: Any, **kwargs: Any) -> str:
        if not isinstance(value, str):
            raise Refused
        return filters.do_indent(value, *args, **kwargs)

    own: dict[str, Callable[..., Any]] = {
        "tojson": fast_tojson,
        "dictsort": filters.do_dictsort,
        "sort": sort,
        "indent": indent,
        "int": integer,
        "format": filters.do_format,
        "pluck": pluck,
        "map": map_filter,
        **TEXT_FUNCTIONS,
    }
    return {PREFIX + name: function for name, function in own.items()}


class FastRenderer:
    """One template's sources, ready to render."""

    def __init__(self, sources: Mapping[str, str], date: datetime.date) -> None:
        self.numbers = Numbers()
        self._environment = minijinja.Environment(
            templates=dict(sources),
            filters={**python_filters(Sandbox(date, CONTROL)), **mark_filters(CONTROL, self.numbers)},
            globals={
                f"{PREFIX}refuse": refuse,
                f"{PREFIX}attribute": attribute,
                f"{PREFIX}method": method,
                f"{PREFIX}percent": percent,
                "raise_exception": raise_exception,
                "strftime_now": strftime_on(date),
            },
            debug=False,
            fuel=FUEL,
            keep_trailing_newline=True,
            pycompat=True,
            block_start_string=BLOCK_START,
            block_end_string=BLOCK_END,
            variable_start_string=VARIABLE_START,
            variable_end_string=VARIABLE_END,
            comment_start_string=COMMENT_START,
            comment_end_string=COMMENT_END,
        )

    def render(self, name: str, context: Mapping[str, Any]) -> str | None:
        """The text, or None where the engine fails for whatever reason, a panic included."""
        try:
            text = self._environment.render_template(name, **context)
            return text if len(text) <= MAX_OUTPUT else None
        except (KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit):
            raise
        except BaseException:  # a Rust panic is not an Exception
            return None
