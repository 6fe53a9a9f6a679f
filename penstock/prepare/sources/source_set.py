"""The source files of a build and the split that selects rows from them; yields slices in order.

A split takes whole slices of the full files wherever possible and trims slices only at its ends, so it shares all other
slices with the full data. Row numbers from the end and percentages require counting the rows first; streamed files are
then read twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from penstock.errors import SourceError
from penstock.prepare.sources.reading import KeepData, head, scan, trim
from penstock.prepare.sources.slices import MAX_ROW_BYTES, Columns, Slice, SourceFile, identity

# ---- splits ----------------------------------------------------------------------------------------------------------
#
# Split strings: `train`, `train[:1000]`, `train[10%:20%]`, `train[:50]+train[-50:]`, as in Hugging Face `datasets`.
#
# A parsed part resolves to row numbers once the number of rows is known. As in `datasets`, percentages are rounded to
# the nearest row, positions beyond the end are clipped, and one % sign makes both numbers percentages.


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


# ---- source set ------------------------------------------------------------------------------------------------------


Known = dict[int, tuple[Slice, ...]]  # slices by file ordinal


@dataclass(frozen=True, slots=True)
class SourceSet:
    """Files in order, and the split that selects from them (None: all rows)."""

    files: tuple[SourceFile, ...]
    split: Split | None = None
    ignored: tuple[str, ...] = ()  # other files in the given folders, for display
    limit: int | None = None  # at most this many of the selected rows, from the first

    @property
    def is_whole(self) -> bool:
        """Is every row of the files selected?"""
        return self.split is None and self.limit is None

    @property
    def size(self) -> int:
        """Bytes of the files; 0 if only some of their rows are selected."""
        return sum(identity(file.path).size for file in self.files) if self.is_whole else 0

    def slices(
        self,
        *,
        max_row_bytes: int = MAX_ROW_BYTES,
        known: Mapping[int, tuple[Slice, ...]] | None = None,
        keep: KeepData = KeepData.STREAMED,
    ) -> Iterator[Slice]:
        """Yield the slices of the selected rows. `known` has the slices of files that need not be cut again."""
        cut: Known = dict(known or {})
        rows = 0
        for found in chain.from_iterable(self._part(part, cut, max_row_bytes, keep) for part in self._parts()):
            left = None if self.limit is None else self.limit - rows
            if left is not None and found.rows >= left:
                rows += left
                yield found if found.rows == left else trim(found, self.files[found.file].path, 0, left)
                return
            rows += found.rows
            yield found
        if not rows:
            where = ", ".join(file.name for file in self.files[:3])
            if self.split is not None:
                raise SourceError(f"split {str(self.split)!r} selects no rows of {where}. Choose a wider range.")
            raise SourceError(f"{where}: no rows. Check that this is the right file.")

    def peek(self, n: int = 20, *, max_row_bytes: int = MAX_ROW_BYTES, columns: Columns = None) -> list[bytes]:
        """The first rows as JSON, to detect their format. Parquet and Arrow rows have the values of `columns` only."""
        rows: list[bytes] = []
        name = self._parts()[0].name
        for file in self.files:
            if len(rows) < n and (not name or file.split == name):
                rows += head(file, n - len(rows), max_row_bytes=max_row_bytes, columns=columns)
        if not rows:
            raise SourceError(
                f"{', '.join(file.name for file in self.files[:3])}: there are no rows of up to {max_row_bytes:,} "
                "bytes (--max-row-bytes). Check that these are the right data."
            )
        return rows

    def _parts(self) -> tuple[SplitPart, ...]:
        return (SplitPart(""),) if self.split is None else self.split.parts

    def _part(self, part: SplitPart, cut: Known, max_row_bytes: int, keep: KeepData) -> Iterator[Slice]:
        files = [file for file in self.files if not part.name or file.split == part.name]
        total = None
        if part.needs_total:
            for file in files:
                if file.ordinal not in cut:
                    cut[file.ordinal] = tuple(scan(file, max_row_bytes=max_row_bytes, keep=KeepData.NONE))
            total = sum(_rows(cut[file.ordinal]) for file in files)
        first, stop = part.bounds(total)
        row = 0  # counted over all files
        for file in files:
            if file.ordinal in cut and row + _rows(cut[file.ordinal]) <= first:
                row += _rows(cut[file.ordinal])
                continue
            for found in _slices(file, cut, max_row_bytes, keep):
                begin = max(first - row, 0)
                end = found.rows if stop is None else min(stop - row, found.rows)
                if begin < end:
                    yield found if end - begin == found.rows else trim(found, file.path, begin, end)
                row += found.rows
                if stop is not None and row >= stop:
                    return


def _slices(file: SourceFile, cut: Known, max_row_bytes: int, keep: KeepData) -> Iterable[Slice]:
    if file.ordinal in cut and not file.kind.is_streamed:
        return cut[file.ordinal]
    return scan(file, max_row_bytes=max_row_bytes, keep=keep)


def _rows(slices: Iterable[Slice]) -> int:
    return sum(found.rows for found in slices)
