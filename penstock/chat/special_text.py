"""Special tokens that stand in the text of rows, before any template has seen it.

Enter the JSON bytes of many rows; leave the numbers of those with a special token, and the first one of each. Costs one
pass of numpy over the bytes for each pair of bytes that a special token begins with; only rows with one are searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from itertools import product

import numpy as np
import orjson

from penstock.chat.formats_json import with_huge_integers
from penstock.native import native

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

    def find(self, rows: list[bytes]) -> tuple[dict[int, str], set[int]]:
        """The rows whose text has special tokens: number -> the first of them. And the rows with escapes."""
        escaped, suspect = _rows_with(rows, _ESCAPES, self._beginnings)
        if self._pattern is None:
            return {}, escaped
        found = {number: self._first(rows[number]) for number in sorted(escaped | suspect)}
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


def _rows_with(rows: list[bytes], *groups: Collection[bytes]) -> list[set[int]]:
    """For each group of pairs of bytes, the numbers of the rows that have one of them."""
    if native is not None:
        wanted = sorted((pair, 1 << number) for number, group in enumerate(groups) for pair in group)
        found = native.pairs(rows, b"".join(pair for pair, _ in wanted), bytes(bit for _, bit in wanted))
        kinds = np.frombuffer(found, np.uint8)
        return [set(np.flatnonzero(kinds & 1 << number).tolist()) for number in range(len(groups))]
    ends = np.cumsum([len(row) + 1 for row in rows])
    data = b"\n".join([*rows, b"\n\n"])
    views = [np.frombuffer(data, np.uint16, (len(data) - start) // 2, start) for start in (0, 1)]
    numbers: list[set[int]] = [set() for _ in groups]
    for own, group in zip(numbers, groups, strict=True):
        for wanted, (shift, view) in product(np.frombuffer(b"".join(group), np.uint16), enumerate(views)):
            places = np.flatnonzero(view == wanted) * 2 + shift
            own.update(np.searchsorted(ends, places, side="right").tolist())
    return numbers
