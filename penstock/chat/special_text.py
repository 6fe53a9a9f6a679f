"""Special tokens that stand in the text of rows, before any template has seen it.

Enter the JSON bytes of many rows; leave the numbers of those with a special token, and the first one of each. Costs one
pass of numpy over the bytes for each pair of bytes that a special token begins with; only rows with one are searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import orjson

from penstock.chat.formats_json import with_huge_integers

_ESCAPES = (b"\\u", b"\\/")


class SpecialTextFinder:
    """Finds the texts of special tokens in rows."""

    def __init__(self, contents: Iterable[str]) -> None:
        # One-character and white-space tokens (such as "\n") are ordinary text that templates print, too.
        needles = sorted({c.encode() for c in contents if len(c) > 1 and not c.isspace()}, key=lambda c: (-len(c), c))
        self._pattern = re.compile(b"|".join(map(re.escape, needles))) if needles else None
        self._beginnings = {needle[:2] for needle in needles}
        # Many files escape all that is not ASCII; such an escape hides nothing of a token that is.
        self._hiding = re.compile(rb"\\u00[0-7]|\\/" if all(map(bytes.isascii, needles)) else rb"\\[u/]")

    def find(self, rows: Sequence[bytes]) -> tuple[dict[int, str], set[int]]:
        """The rows whose text has special tokens: number -> the first of them. And the rows with escapes."""
        pairs = _Pairs(rows)
        escaped = pairs.rows_with(_ESCAPES)
        if self._pattern is None:
            return {}, escaped
        found = {number: self._first(rows[number]) for number in sorted(escaped | pairs.rows_with(self._beginnings))}
        return {number: token for number, token in found.items() if token is not None}, escaped

    def _first(self, row: bytes) -> str | None:
        assert self._pattern is not None
        if self._hiding.search(row):
            try:
                row = orjson.dumps(orjson.loads(row))
            except (orjson.JSONDecodeError, TypeError):
                value = with_huge_integers(row)
                if value is None:
                    return None  # the format stage will report it
                row = json.dumps(value, ensure_ascii=False).encode()
        found = self._pattern.search(row)
        return found[0].decode() if found else None


class _Pairs:
    """Every two bytes that stand side by side in rows."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        self._ends = np.cumsum([len(row) + 1 for row in rows])
        data = b"\n".join([*rows, b"\n\n"])
        self._views = [np.frombuffer(data, np.uint16, (len(data) - start) // 2, start) for start in (0, 1)]

    def rows_with(self, pairs: Iterable[bytes]) -> set[int]:
        """The numbers of the rows that have one of these pairs."""
        found: set[int] = set()
        for pair in pairs:
            wanted = np.frombuffer(pair, np.uint16)[0]
            for shift, view in enumerate(self._views):
                places = np.flatnonzero(view == wanted) * 2 + shift
                found.update(np.searchsorted(self._ends, places, side="right").tolist())
        return found
