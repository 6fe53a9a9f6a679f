"""The records of slicing: a slice, the plan of a file, and what tells that a file is still the same.

All of them are plain values; slices and plans go to JSON and back without their data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import SourceError
from penstock.sources.kinds import FileKind

SLICING_VERSION = 3  # raise it when the same bytes are cut or digested differently: stored plans become void
MAX_ROW_BYTES = 32_000_000
Columns = frozenset[str] | None  # those to read of files that have columns; None: all


class SliceSizes(NamedTuple):
    """Bounds of a slice in bytes. A single row larger than `largest` makes a slice of its own."""

    smallest: int = 1_000_000
    mean: int = 4_000_000
    largest: int = 8_000_000

    @property
    def rate(self) -> int:
        """An item of n bytes ends a slice if its 64-bit hash is below n times this: one end in `mean - smallest`."""
        return max(1, (1 << 64) // (self.mean - self.smallest))


SLICE_SIZES = SliceSizes()


class TextRows(NamedTuple):
    """Rows of text as they stand, and where among the lines: blank lines are no rows, but count as lines.

    An anchor (row, line) says that from this row on, lines are counted from this one; that of the first row is 0.
    """

    rows: list[bytes]
    anchors: Sequence[tuple[int, int]] = ()  # none: the rows are consecutive lines

    @classmethod
    def numbered(cls, rows: list[bytes], numbers: Sequence[int]) -> TextRows:
        """Rows with the numbers of their lines."""
        jumps = [k for k, number in enumerate(numbers) if not k or number != numbers[k - 1] + 1]
        return cls(rows, [(k, numbers[k] - numbers[0]) for k in jumps])

    def numbers(self, first: int) -> list[int]:
        """The line of each row, given that of the first."""
        found: list[int] = []
        for (row, line), (stop, _) in pairwise([*(self.anchors or [(0, 0)]), (len(self.rows), 0)]):
            found += range(first + line, first + line + stop - row)
        return found


class SourceFile(NamedTuple):
    """One file to read. `name` is what users are shown, `split` the named split that its rows belong to."""

    ordinal: int
    path: Path
    kind: FileKind
    name: str
    split: str = "train"


class FileIdentity(NamedTuple):
    """What tells two states of a file apart without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous run of rows of one file.

    `start` and `end` are byte positions: in the file for plain JSON lines, Parquet and Arrow, in the unpacked text
    for streamed kinds. `size` counts the bytes of its rows (and for text one more a row). `digest` is over its rows
    for text, over raw bytes and schema for Parquet and Arrow. Those two also name the `units` (row groups or record
    batches) from `unit` on that hold the rows, after `skip` rows of them. `data` are the rows of text, where they were
    kept.
    """

    file: int
    kind: FileKind
    start: int
    end: int
    first_row: int
    rows: int
    first_line: int | None
    size: int
    digest: str
    unit: int = 0
    units: int = 0
    skip: int = 0
    data: TextRows | None = field(default=None, repr=False)

    def without_data(self) -> Slice:
        """The same slice, to be kept."""
        return self if self.data is None else replace(self, data=None)

    def to_json(self) -> dict[str, Any]:
        """The slice without its data, as JSON values."""
        values = asdict(self.without_data())
        del values["data"]
        return values | {"kind": self.kind.value}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Slice:
        """The slice that `to_json` wrote."""
        return cls(**(values | {"kind": FileKind(values["kind"])}))


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """How one file is cut, to be remembered under its identity."""

    identity: FileIdentity
    kind: FileKind
    slices: tuple[Slice, ...]
    version: int = SLICING_VERSION

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(part.rows for part in self.slices)

    def holds_for(self, identity: FileIdentity) -> bool:
        """Whether the plan still describes the file with this identity."""
        return self.version == SLICING_VERSION and self.identity == identity

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "version": self.version,
            "kind": self.kind.value,
            "identity": list(self.identity),
            "slices": [part.to_json() for part in self.slices],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SlicePlan:
        """The plan that `to_json` wrote; ask `holds_for` before using it."""
        return cls(
            identity=FileIdentity(*values["identity"]),
            kind=FileKind(values["kind"]),
            slices=tuple(Slice.from_json(part) for part in values["slices"]),
            version=values["version"],
        )


@dataclass(frozen=True, slots=True)
class SliceRows:
    """The rows of one slice. `lines` are 1-based: line numbers for JSON lines, row numbers for other kinds.

    A row larger than the limit stands as b"" in `rows`, with its size in `oversize`.
    """

    rows: list[bytes]
    lines: list[int]
    oversize: dict[int, int] = field(default_factory=dict)
    nulls_dropped: int = 0


def identity(path: Path) -> FileIdentity:
    """The identity of a file; a SourceError when it is gone."""
    try:
        found = path.stat()
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}.") from error
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
