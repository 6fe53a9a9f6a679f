"""Converts token bytes to text that is safe to print in a terminal or a page.

Escape sequences, control and format characters, unusual white space and invalid UTF-8 are printed as escapes (`\\x1b`,
`\\u202e`), so that data can't control the terminal, reorder a line or hide.
"""

from __future__ import annotations

from penstock.printable import escaped

NEWLINE = "↵"
NEWLINE_BREAKS = "↵\n"
TAB = "⇥"
TRAILING_SPACE = "·"


def visible_lines(data: bytes) -> list[str]:
    """The text as lines; each newline is shown as ↵ and ends a line."""
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    ended = [_visible(line) + NEWLINE for line in lines[:-1]]
    return [*ended, _visible(lines[-1])] if lines[-1] or not ended else ended


def visible_text(data: bytes) -> str:
    """The text of a token or a row; each newline is shown as ↵ and breaks the line."""
    return NEWLINE_BREAKS.join(map(_printable, data.decode("utf-8", "backslashreplace").split("\n")))


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in line)


def _visible(line: str) -> str:
    text = _printable(line)
    bare = text.rstrip(" ")
    return bare + TRAILING_SPACE * (len(text) - len(bare))


def _escaped(char: str) -> str:
    match char:
        case "\t":
            return TAB
        case "\r":
            return "\\r"
    return escaped(char)
