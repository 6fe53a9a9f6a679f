"""Slices, slice plans and file identities.

A slice ends after a row (or row group, or record batch) whose hash says so. Because that decision looks at the item
alone, within a minimum and a maximum size, rows that are appended, inserted or edited move only the boundaries next to
them: all other slices, and hence their digests, stay the same.

Slices and plans convert to JSON and back, without their data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.digests import canonical, digest
from penstock.errors import SourceError
from penstock.prepare.sources.joined import JoinedIdentity, JoinedPath
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.remote import ObjectIdentity, ObjectPath, SourcePath
from penstock.transient import retry_transient

SLICING_VERSION = 3  # bump when the same bytes are cut or digested differently: stored plans become invalid
MAX_ROW_BYTES = 32_000_000
Columns = frozenset[str] | None  # columns to read from Parquet and Arrow files; None: all


class SliceSizes(NamedTuple):
    """Size bounds of a slice in bytes. A row larger than `largest` becomes a slice of its own."""

    smallest: int = 1_000_000
    mean: int = 4_000_000
    largest: int = 8_000_000

    @property
    def rate(self) -> int:
        """An item of n bytes ends a slice if its 64-bit hash is below n times this: every `mean - smallest` bytes."""
        return max(1, (1 << 64) // (self.mean - self.smallest))


SLICE_SIZES = SliceSizes()


class TextRows(NamedTuple):
    """Rows of text, and their line numbers: blank lines are not rows, but count as lines.

    An anchor (row, line) says that this row is on this line, relative to the first row, and the following rows on the
    following lines.
    """

    rows: list[bytes]
    anchors: Sequence[tuple[int, int]] = ()  # empty: the rows are on consecutive lines

    @classmethod
    def numbered(cls, rows: list[bytes], numbers: Sequence[int]) -> TextRows:
        """Rows with their line numbers."""
        jumps = [k for k, number in enumerate(numbers) if not k or number != numbers[k - 1] + 1]
        return cls(rows, [(k, numbers[k] - numbers[0]) for k in jumps])

    def numbers(self, first: int) -> list[int]:
        """The line number of each row, given that of the first."""
        found: list[int] = []
        for (row, line), (stop, _) in pairwise([*(self.anchors or [(0, 0)]), (len(self.rows), 0)]):
            found += range(first + line, first + line + stop - row)
        return found


class SourceFile(NamedTuple):
    """A file to read. `name` is shown to users; `split` is the named split of its rows."""

    ordinal: int
    path: SourcePath
    kind: FileKind
    name: str
    split: str = "train"


class FileIdentity(NamedTuple):
    """Distinguishes two states of a file without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


Identity = FileIdentity | ObjectIdentity | JoinedIdentity


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous run of rows of one file.

    `start` and `end` are byte offsets: in the file for plain JSON lines, Parquet and Arrow, in the decompressed text
    for streamed kinds. `size` is the total size of the rows (for text, plus one byte per row). `digest` covers the rows
    for text, the raw bytes and the schema for Parquet and Arrow. For the latter two, the rows lie in `units` row groups
    or record batches starting at number `unit`, after the first `skip` rows of these. `data` holds the rows of text, if
    they were kept.
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
        """The same slice without its data, to be stored."""
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
    """The slices of a file, valid for one identity of it."""

    identity: Identity
    kind: FileKind
    slices: tuple[Slice, ...]
    version: int = SLICING_VERSION

    @property
    def rows(self) -> int:
        """Number of rows in the file."""
        return sum(part.rows for part in self.slices)

    def holds_for(self, identity: Identity) -> bool:
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
        """The plan that `to_json` wrote; check `holds_for` before using it."""
        return cls(
            identity=_identity(values["identity"]),
            kind=FileKind(values["kind"]),
            slices=tuple(Slice.from_json(part) for part in values["slices"]),
            version=values["version"],
        )


@dataclass(frozen=True, slots=True)
class SliceRows:
    """The rows of one slice. `lines` are 1-based: line numbers for JSON lines, row numbers for other kinds.

    A row over the size limit is b"" in `rows`, and its size is in `oversize`.
    """

    rows: list[bytes]
    lines: list[int]
    oversize: dict[int, int] = field(default_factory=dict)
    nulls_dropped: int = 0


_stat = retry_transient(os.stat)


def identity(path: SourcePath) -> Identity:
    """The identity of a file, or of the version of an object that was found; SourceError if a file can't be read."""
    if isinstance(path, ObjectPath):
        return path.identity()
    if isinstance(path, JoinedPath):
        return joined_identity(map(identity, path.members))
    try:
        found = _stat(path)
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}.") from error
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def joined_identity(found: Iterable[Identity]) -> JoinedIdentity:
    """The identity of a run of files, from those of its members."""
    members = list(found)
    files = [member for member in members if isinstance(member, FileIdentity)]
    return JoinedIdentity(
        digest(canonical([[*member] for member in members])),
        sum(member.size for member in members),
        max((max(file.mtime_ns, file.ctime_ns) for file in files), default=0),
        " ".join(sorted({str(file.device) for file in files})),
    )


def _identity(values: list[Any]) -> Identity:
    if not isinstance(values[0], str):
        return FileIdentity(*values)
    return JoinedIdentity(*values) if isinstance(values[2], int) else ObjectIdentity(*values)
