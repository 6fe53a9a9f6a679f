"""Split strings: `train`, `train[:1000]`, `train[10%:20%]`, `train[:50]+train[-50:]`, as in Hugging Face `datasets`.

A parsed part resolves to row numbers once the number of rows is known. As in `datasets`, percentages are rounded to
the nearest row, positions beyond the end are clipped, and one % sign makes both numbers percentages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.errors import SourceError

PART = re.compile(
    r"(?P<name>\w+(\.\w+)*)"
    r"(?P<range>\[((?P<first>-?[\d_]+)(?P<first_percent>%)?)?:((?P<stop>-?[\d_]+)(?P<stop_percent>%)?)?\])?"
)


@dataclass(frozen=True, slots=True)
class SplitPart:
    """Rows first:stop of a named split. Negative numbers count from the end; with `percent`, they are percentages."""

    name: str
    first: int | None = None
    stop: int | None = None
    percent: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole split."""
        return self.first is None and self.stop is None

    @property
    def needs_total(self) -> bool:
        """Whether the bounds depend on the total number of rows."""
        return self.percent or (self.first or 0) < 0 or (self.stop or 0) < 0

    def bounds(self, total: int | None) -> tuple[int, int | None]:
        """The first row and the end (None: all that follow)."""
        if total is None:
            assert not self.needs_total
            return self.first or 0, self.stop
        first, stop = (
            (default if value is None else round(value * total / 100.0) if self.percent else value)
            for value, default in ((self.first, 0), (self.stop, total))
        )
        return _clipped(first, total), _clipped(stop, total)


@dataclass(frozen=True, slots=True)
class Split:
    """A parsed split string; its parts are concatenated."""

    text: str
    parts: tuple[SplitPart, ...]

    def __str__(self) -> str:
        return self.text


def parse_split(text: str) -> Split:
    """Parse a split string."""
    return Split(text, tuple(_parse_part(part.strip(), text) for part in text.strip().split("+")))


def _parse_part(part: str, text: str) -> SplitPart:
    found = PART.fullmatch(part)
    if found is None:
        raise SourceError(
            f"invalid split {text!r} at {part!r}. Write it like train, train[:1000], train[10%:20%] "
            "or train[:50]+train[-50:]."
        )
    percent = bool(found["first_percent"] or found["stop_percent"])
    first, stop = _number(found["first"], text), _number(found["stop"], text)
    if percent and any(abs(value) > 100 for value in (first, stop) if value is not None):
        raise SourceError(f"split {text!r} has a percentage beyond 100 in {part!r}. The range is -100% to 100%.")
    return SplitPart(found["name"], first, stop, percent)


def _number(digits: str | None, text: str) -> int | None:
    try:
        return int(digits) if digits else None
    except ValueError:
        raise SourceError(f"split {text!r}: {digits!r} is not a number.") from None


def _clipped(position: int, total: int) -> int:
    return min(max(total + position, 0) if position < 0 else position, total)
