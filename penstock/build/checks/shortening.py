"""Shortens long rows for the spot check, so that the references need not redo whole rows."""

from __future__ import annotations

from typing import Any

import orjson

LONG_ROW = 1_000_000  # bytes
SHORT_BYTES, SHORT_STRING = 200_000, 20_000


def shortened(row: bytes) -> bytes:
    """Returns a row of the same form with fewer messages and shorter texts, or the row itself if it isn't JSON."""
    try:
        return orjson.dumps(_Shortener().cut(orjson.loads(row)))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return row


class _Shortener:
    """Cuts a value to about `SHORT_BYTES`."""

    def __init__(self) -> None:
        self._budget = SHORT_BYTES

    def cut(self, value: Any) -> Any:
        """Keeps the beginning of strings and the first elements of lists."""
        self._budget -= 8
        if isinstance(value, str):
            kept = value[: max(0, min(self._budget, SHORT_STRING))]
            self._budget -= len(kept)
            return kept
        if isinstance(value, dict):
            return {key: self.cut(own) for key, own in value.items()}
        if isinstance(value, list):
            return [self.cut(own) for own in value if self._budget > 0]
        return value
