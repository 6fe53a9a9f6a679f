"""Special tokens that stand in the text of a row, before any template has seen it.

Enters a row's JSON bytes; leaves the special tokens found in it. A row without the first two bytes of any special
token (nearly all of them) costs a tenth of a microsecond per different beginning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import orjson


class SpecialTextFinder:
    """Finds the texts of special tokens in rows."""

    def __init__(self, contents: Iterable[str]) -> None:
        # One-character and white-space tokens (such as "\n") are ordinary text that templates print, too.
        needles = sorted({c.encode() for c in contents if len(c) > 1 and not c.isspace()}, key=lambda c: (-len(c), c))
        self._starts = sorted({c[:2] for c in needles})
        self._pattern = re.compile(b"|".join(map(re.escape, needles))) if needles else None

    def find(self, row: bytes) -> str | None:
        """The first special token in the row's text, or None."""
        if self._pattern is None:
            return None
        if b"\\u" in row:  # an escape may hide a bracket: look at the row as plain UTF-8
            try:
                row = orjson.dumps(orjson.loads(row))
            except orjson.JSONDecodeError:  # the format stage will report it
                return None
        for start in self._starts:
            if start in row:
                found = self._pattern.search(row)
                return found[0].decode() if found else None
        return None
