"""The one place where text from data becomes safe to print: errors, log messages, terminals, JSON and pages use it.

Roles, column names, file names and texts come from strangers. An escape sequence in them could recolour or rewrite the
terminal, and a bidirectional override could reorder a line; both are printed as escapes (`\\x1b`, `\\u202e`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.spelling import spelled


def printable(text: str) -> str:
    """The text with every unprintable character escaped, except for newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else escaped(char) for char in text)


def escaped(char: str) -> str:
    """`\\x1b`, `\\u202e` or `\\U000e0001`."""
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def printable_json(value: Any, *, sort_keys: bool = False, default: Callable[[Any], Any] | None = None) -> str:
    """Indented JSON. Unprintable characters are JSON escapes, so that a reader gets the same values."""
    import orjson

    option = orjson.OPT_INDENT_2 | (orjson.OPT_SORT_KEYS if sort_keys else 0)
    text = orjson.dumps(value, default, option).decode()
    return "".join(char if char.isprintable() or char == "\n" else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


class _PrintableLog(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(spelled(record.getMessage())), ()
        return True


logging.getLogger("penstock").addFilter(_PrintableLog())
