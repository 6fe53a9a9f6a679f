"""Runs of small files of JSON lines, which are cut into slices as if they were one file.

A slice ends with its file, so each small file would be a slice, with a shard, a record and a claim that cost far more
than its rows. A run's slices, and hence its shards, are those of `cat`: content alone decides where they end, so a file
that is added, edited or removed costs only the one or two slices around it. Reading costs about 15 µs per file.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from penstock.errors import SourceError
from penstock.transient import retry_transient

RUN_FILES = 64  # a shorter run is not joined: with one file more or less, at most this many are prepared again
UTF8_BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r"


class JoinedIdentity(NamedTuple):
    """Distinguishes two states of a run of files without reading them. `devices` is empty if they are objects."""

    members: str  # digest of their identities
    size: int
    changed_ns: int
    devices: str


class RemoteMember(Protocol):
    """What joining takes of an object."""

    def open(self, mode: str = "rb", buffering: int = -1) -> io.RawIOBase: ...

    @property
    def is_vouched(self) -> bool: ...


Member = Path | RemoteMember


class JoinedPath:
    """A run of files, with the part of `Path` that the readers of sources use."""

    def __init__(self, members: Sequence[Any], names: Sequence[str], rows: Sequence[int] | None = None) -> None:
        """`rows` says how many rows each member has, if that is known."""
        self.members = members
        self.names = tuple(names)
        self._rows = None if rows is None else tuple(rows)

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """What the run is called in messages about all of it."""
        first, last = self.names[0], self.names[-1]
        folder = first.rpartition("/")[0] + "/"
        return f"{first} … {last.removeprefix(folder)} ({len(self.names):,} files)"

    @property
    def is_vouched(self) -> bool:
        """Whether the stores of all members vouch that equal identities mean equal bytes."""
        return all(not isinstance(member, Path) and member.is_vouched for member in self.members)

    def open(self, mode: str = "rb", buffering: int = -1) -> BinaryIO:
        """Open the text of all members."""
        return cast("BinaryIO", _JoinedReader(self))

    # -- rows -------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each member has. Reads them, unless that has been done."""
        if self._rows is None:
            self.recall([_count(text) for text in self.texts()])
        assert self._rows is not None
        return self._rows

    def texts_of(self, first: int, count: int) -> tuple[Iterator[bytes], int]:
        """The texts of the members that hold `count` rows from `first` on, and the number of that row in them."""
        begin, skip = member_row(self.rows, first)
        stop = member_row(self.rows, first + count - 1)[0] + 1
        return map(_text, self.members[begin:stop], self.names[begin:stop]), skip

    def recall(self, rows: Sequence[int]) -> None:
        """Remember how many rows each member has."""
        self._rows = tuple(rows)

    def locations(self, rows: Sequence[int]) -> list[str]:
        """`file:line` of rows of the run."""
        return [self._location(*member_row(self.rows, row)) for row in rows]

    def _location(self, member: int, row: int) -> str:
        lines = _text(self.members[member], self.names[member]).split(b"\n")
        numbers = [number for number, line in enumerate(lines, 1) if line.strip(BLANK)]
        return f"{self.names[member]}:{numbers[row]}"

    def texts(self, most: int | None = None) -> Iterator[bytes]:
        """The text of each member, or its first bytes, with a newline at its end."""
        return (_text(member, name, most) for member, name in zip(self.members, self.names, strict=True))


def member_row(rows: Sequence[int], row: int) -> tuple[int, int]:
    """The member that holds a row of a run, and the row's number in it; `rows` are the numbers of rows of all."""
    ends = list(accumulate(rows))
    member = bisect_right(ends, row)
    return member, row - (ends[member - 1] if member else 0)


class _JoinedReader(io.RawIOBase):
    """Reads the members in order, whole, and counts the rows of each."""

    def __init__(self, path: JoinedPath) -> None:
        super().__init__()
        self._path, self._texts = path, path.texts()
        self._counts: list[int] = []
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read whole members, of `size` bytes or little more together."""
        found: list[bytes] = []
        left = float("inf") if size is None or size < 0 else size
        while left > 0 and (text := next(self._texts, None)) is not None:
            self._counts.append(_count(text))
            found.append(text)
            left -= len(text)
        if not found and len(self._counts) == len(self._path.members):
            self._path.recall(self._counts)
        data = b"".join(found)
        self._position += len(data)
        return data


def _count(text: bytes) -> int:
    return sum(1 for line in text.split(b"\n") if line.strip(BLANK))


def _text(member: Any, name: str, most: int | None = None) -> bytes:
    try:
        data = _read_file(member, most) if isinstance(member, Path) else _read_object(member)
    except OSError as error:
        raise SourceError(f"{name}: can't be read: {error.strerror}.") from error
    while data.startswith(UTF8_BOM):  # the reader of lines would take a second one away from the first member only
        data = data.removeprefix(UTF8_BOM)
    return data if data.endswith(b"\n") else data + b"\n"


@retry_transient
def _read_file(path: Path, most: int | None) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (`Path.open` takes twice as long)
        return file.read(-1 if most is None else most)


def _read_object(path: RemoteMember) -> bytes:
    with path.open() as file:
        return bytes(file.read())
