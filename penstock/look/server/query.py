"""Validated query strings: unknown names and invalid values are errors that say what is valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from penstock.errors import UsageError

_DIGITS: Final = 15  # of a number in an address


class Query:
    """Reads parameters by name and kind; `end` rejects parameters that were not read."""

    def __init__(self, given: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> None:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{twice!r} is given twice")
        self._given = given
        self._read: set[str] = set()

    def text(self, name: str, default: str = "") -> str:
        """Any text."""
        self._read.add(name)
        return self._given.get(name, default)

    def choice(self, name: str, known: Iterable[str], default: str = "") -> str:
        """One of a few words."""
        value, known = self.text(name, default), list(known)
        if value and value not in known:
            raise UsageError(f"{name}={value!r} is unknown. Use one of: {', '.join(filter(None, known))}.")
        return value

    def number(self, name: str, low: int = 0, high: int = 10**_DIGITS) -> int | None:
        """A whole number, or None if it is missing."""
        value = self.text(name)
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) <= _DIGITS) or not low <= int(value) <= high:
            raise UsageError(f"{name}={value!r} is not a number from {low:,} to {high:,}")
        return int(value)

    def end(self) -> None:
        """Reject parameters that this page doesn't have."""
        for name in self._given:
            if name not in self._read:
                known = ", ".join(sorted(self._read)) or "none"
                raise UsageError(f"{name!r} is not a parameter of this page. Parameters: {known}.")
