"""Special tokens that stand in the text of rows, before any template has seen it.

Enter the JSON bytes of many rows; leave the numbers of those with a special token, and the first one of each. Costs one
pass of numpy over the bytes; only rows with the first two bytes of a special token are searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import orjson

from penstock.chat.formats_json import with_huge_integers

_BACKSLASH = ord("\\")


class SpecialTextFinder:
    """Finds the texts of special tokens in rows."""

    def __init__(self, contents: Iterable[str]) -> None:
        # One-character and white-space tokens (such as "\n") are ordinary text that templates print, too.
        needles = sorted({c.encode() for c in contents if len(c) > 1 and not c.isspace()}, key=lambda c: (-len(c), c))
        self._pattern = re.compile(b"|".join(map(re.escape, needles))) if needles else None
        # What to look for: a first byte, and the bytes that may follow it. Escapes may hide any character.
        self._follow = {_BACKSLASH: _table(b"u/")}
        for first in {needle[0] for needle in needles}:
            self._follow[first] = _table(bytes(needle[1] for needle in needles if needle[0] == first))

    def find(self, rows: Sequence[bytes]) -> tuple[dict[int, str], set[int]]:
        """The rows whose text has special tokens: number -> the first of them. And the rows with escapes."""
        ends = np.cumsum([len(row) + 1 for row in rows])
        data = np.frombuffer(b"\n".join([*rows, b""]), np.uint8)
        suspects: dict[int, set[int]] = {}
        for first, follow in self._follow.items():
            places = np.flatnonzero(data[:-1] == first)
            hits = places[follow[data[places + 1]]]
            suspects[first] = set(np.searchsorted(ends, hits, side="right").tolist())
        escaped = suspects[_BACKSLASH]
        if self._pattern is None:
            return {}, escaped
        found = {number: self._first(rows[number]) for number in sorted(set().union(*suspects.values()))}
        return {number: token for number, token in found.items() if token is not None}, escaped

    def _first(self, row: bytes) -> str | None:
        assert self._pattern is not None
        if b"\\u" in row or b"\\/" in row:
            try:
                row = orjson.dumps(orjson.loads(row))
            except (orjson.JSONDecodeError, TypeError):
                value = with_huge_integers(row)
                if value is None:
                    return None  # the format stage will report it
                row = json.dumps(value, ensure_ascii=False).encode()
        found = self._pattern.search(row)
        return found[0].decode() if found else None


def _table(members: bytes) -> npt.NDArray[np.bool_]:
    """For each byte: is it among these?"""
    table = np.zeros(256, np.bool_)
    table[list(members)] = True
    return table
