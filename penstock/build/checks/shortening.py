"""Long rows cut short for the spot check, so that the references need not redo all of them."""

from __future__ import annotations

from typing import Any

import orjson

LONG_ROW = 1_000_000  # bytes
SHORT_BYTES, SHORT_STRING = 200_000, 20_000


def shortened(row: bytes) -> bytes:
    """A row with fewer messages and shorter texts, of the same form; the row itself where it can't be cut."""
    try:
        return orjson.dumps(_Shortener().cut(orjson.loads(row)))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return row


class _Shortener:
    """Cuts a value to about `SHORT_BYTES`."""

    def __init__(self) -> None:
        self._left = SHORT_BYTES

    def cut(self, value: Any) -> Any:
        """Strings keep their beginning, and lists their first elements."""
        self._left -= 8
        if isinstance(value, str):
            kept = value[: max(0, min(self._left, SHORT_STRING))]
            self._left -= len(kept)
            return kept
        if isinstance(value, dict):
            return {key: self.cut(own) for key, own in value.items()}
        if isinstance(value, list):
            return [self.cut(own) for own in value if self._left > 0]
        return value
