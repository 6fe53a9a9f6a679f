"""Runs of text rows, and rows assembled from several chunks; shared by JSON lines and JSON arrays.

Memory is bounded by the chunk and the largest slice: a larger row is hashed as it streams, and kept only while it is
within the row size limit.
"""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3

BLANK = b" \t\r"


def digest_of(data: bytes | memoryview) -> str:
    """The digest of a slice of text, given its rows joined by newlines."""
    return "b3-" + blake3(data).hexdigest()


class RowRun(NamedTuple):
    """Consecutive rows of lines or of an array.

    If blank lines, \\r or other text separate them, `starts` and `ends` are their byte offsets (`ends` after their line
    endings) and `numbers` their line numbers in the run. Otherwise `text` holds them, each followed by one newline.
    """

    rows: list[bytes]
    start: int
    end: int
    lines: int  # rows and blank lines
    text: memoryview = memoryview(b"")
    starts: list[int] | None = None
    ends: list[int] | None = None
    numbers: list[int] | None = None

    def start_of(self, index: int) -> int:
        """The byte offset of a row."""
        return self.end_of(index - 1) if self.starts is None else self.starts[index]

    def end_of(self, index: int) -> int:
        """The byte offset after a row and its line ending; for index -1, the start of the run."""
        if index < 0:
            return self.start
        if self.ends is not None:
            return self.ends[index]
        return self.start + sum(map(len, self.rows[: index + 1])) + index + 1

    def line_of(self, index: int) -> int:
        """The line number of a row in the run."""
        return index if self.numbers is None else self.numbers[index]

    def joined(self, first: int, stop: int) -> bytes | memoryview:
        """The rows first:stop, joined by newlines."""
        if self.ends is not None:
            return b"\n".join(self.rows[first:stop])
        begin, end = self.end_of(first - 1) - self.start, self.end_of(stop - 1) - self.start
        return self.text[begin : max(begin, end - 1)]


class HugeRow(NamedTuple):
    """A row larger than the largest slice. `data` is None if it is also over the row size limit."""

    start: int
    end: int
    size: int
    digest: str
    data: bytes | None


class PartialRow:
    """A row that arrives in pieces. Over `largest` bytes it is hashed as it streams, and kept up to `limit` bytes."""

    def __init__(self, largest: int, limit: int) -> None:
        self.size = 0
        self.is_blank = True
        self._largest, self._limit = largest, limit
        self._kept: list[bytes] = []
        self._hasher: blake3 | None = None
        self._held = b""  # last byte, not hashed yet: a \r before the newline is not part of the row

    def add(self, piece: bytes) -> None:
        """Append to the row."""
        self.size += len(piece)
        self.is_blank = self.is_blank and not piece.strip(BLANK)
        if self._hasher is None:
            self._kept.append(piece)
            if self.size > self._largest + 1:  # + 1 for the \r
                self._hasher = blake3()
                for kept in self._kept:
                    self._hash(self._hasher, kept)
        else:
            self._hash(self._hasher, piece)
            if self.size <= self._limit + 1:
                self._kept.append(piece)
        if self._hasher is not None and self.size > self._limit + 1:
            self._kept.clear()

    def finish(self, start: int, end: int, line_end: bytes = b"") -> bytes | HugeRow:
        """The complete row, from offsets start:end, without its `line_end`."""
        row = b"".join(self._kept)
        if self._hasher is None:
            return row.removesuffix(line_end)
        size = self.size
        if line_end and self._held == line_end:
            size -= len(line_end)
        else:
            self._hasher.update(self._held)
        data = row[:size] if size <= self._limit else None
        return HugeRow(start, end, size, "b3-" + self._hasher.hexdigest(), data)

    def _hash(self, hasher: blake3, piece: bytes) -> None:
        if piece:
            hasher.update(self._held + piece[:-1])
            self._held = piece[-1:]
