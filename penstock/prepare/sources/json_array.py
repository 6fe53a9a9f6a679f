"""Reads the elements of a JSON array as rows, in one pass and bounded memory.

Brackets outside strings are located with numpy, a chunk at a time, so elements are not parsed here: errors inside one
are found by its parser. Only what obscures the boundaries between elements is an error at this stage.
Newlines inside an element become \\r: equivalent JSON (both are white space between tokens, and both are invalid inside
a string), with every number as written, on one line. Throughput: about 0.2 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from penstock.errors import SourceError
from penstock.prepare.sources.kinds import UTF8_BOM, WHITESPACE
from penstock.prepare.sources.text_rows import HugeRow, PartialRow, RowRun

QUOTE, CASE_BIT, OPEN, CLOSE = 0x22, 0x20, 0x7B, 0x7D  # with the case bit set, [ becomes { and ] becomes }


def element_runs(chunks: Iterable[bytes], name: str, largest: int, limit: int) -> Iterator[RowRun | HugeRow]:
    """The elements of the array. One over `largest` bytes that crosses a chunk boundary becomes a `HugeRow`."""
    reader = _ElementReader(name, largest, limit)
    for chunk, skipped in _inside_array(chunks):
        yield from reader.feed(chunk, skipped)
    reader.end()


def _inside_array(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """The text after the opening bracket, with the number of bytes skipped before. No chunk ends within an escape."""
    held, skipped, inside = b"", 0, False
    for piece in chunks:
        chunk = held + piece
        if not inside:
            text = chunk.removeprefix(UTF8_BOM).lstrip(WHITESPACE)
            inside, skipped = text.startswith(b"["), len(chunk) - len(text) + 1
            held, chunk = (b"", text[1:]) if inside else (chunk, b"")
        if inside:
            odd = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2
            held = chunk[len(chunk) - odd :]
            yield chunk[: len(chunk) - odd], skipped
            skipped = 0
    yield held, skipped


class _Scanner:
    """Finds element boundaries; tracks nesting depth and string state across chunks."""

    def __init__(self) -> None:
        self._depth, self._in_string = 0, False

    def boundaries(self, chunk: bytes) -> tuple[list[int], int | None]:
        """Alternating start and end offsets of elements, and the offset of the closing bracket, if in this chunk."""
        if b"\\" in chunk:  # mask escaped quotes, keeping the length; backslash pairs first
            chunk = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        text = np.frombuffer(chunk, np.uint8)
        quotes = np.flatnonzero(text == QUOTE)
        folded = text | CASE_BIT
        places = np.flatnonzero((folded == OPEN) | (folded == CLOSE))
        in_string = (np.searchsorted(quotes, places) + self._in_string) % 2
        places = places[in_string == 0]
        steps = np.where(folded[places] == OPEN, 1, -1)
        depths = self._depth + np.cumsum(steps)
        self._in_string = bool((len(quotes) + self._in_string) % 2)
        self._depth = int(depths[-1]) if len(depths) else self._depth

        closing = np.flatnonzero(depths < 0)
        closed = int(places[closing[0]]) if len(closing) else None
        starts, ends = (steps == 1) & (depths == 1), (steps == -1) & (depths == 0)
        cuts = places[starts | ends] + ends[starts | ends]
        return [cut for cut in cuts.tolist() if closed is None or cut <= closed], closed


class _ElementReader:
    """Collects elements, and checks that exactly one comma separates them."""

    def __init__(self, name: str, largest: int, limit: int) -> None:
        self._name, self._largest, self._limit = name, largest, limit
        self._scanner = _Scanner()
        self._position = 0  # bytes read so far
        self._element: PartialRow | None = None  # the current one, if any
        self._start = self._previous_end = self._elements = 0
        self._gap = b""  # text since the last element, without white space
        self._closed = False

    def feed(self, chunk: bytes, skipped: int) -> Iterator[RowRun | HugeRow]:
        """The elements that end in this chunk."""
        self._position += skipped
        cuts, closed = ([], None) if self._closed else self._scanner.boundaries(chunk)
        rows: list[bytes] = []
        ends: list[int] = []
        run_start, done = self._previous_end, 0
        for place in cuts:
            piece, done = chunk[done:place], place
            if self._element is None:
                self._begin(piece)
                continue
            row = self._finish(self._element, piece)
            if isinstance(row, bytes):
                rows.append(row)
                ends.append(self._previous_end)
                continue
            if rows:
                yield RowRun(rows, run_start, ends[-1], len(rows), ends=ends)
            yield row
            rows, ends, run_start = [], [], self._previous_end
        if rows:
            yield RowRun(rows, run_start, ends[-1], len(rows), ends=ends)
        self._read_rest(chunk[done:], None if closed is None else closed - done)

    def end(self) -> None:
        """Raise unless the array was closed."""
        if self._element is not None:
            raise SourceError(
                f"{self._name}: the file ends inside element {self._elements + 1}, which starts at byte {self._start}. "
                "A bracket or a quote is missing there, or the file is truncated."
            )
        if not self._closed:
            raise SourceError(f"{self._name}: the array is not closed at byte {self._position}: the file is truncated.")

    def _begin(self, before: bytes) -> None:
        self._read_gap(before)
        if self._gap != (b"," if self._elements else b""):
            self._complain(self._position)
        self._gap, self._start, self._element = b"", self._position, PartialRow(self._largest, self._limit)

    def _finish(self, element: PartialRow, piece: bytes) -> bytes | HugeRow:
        self._read_element(element, piece)
        self._previous_end, self._element = self._position, None
        self._elements += 1
        return element.finish(self._start, self._position)

    def _read_rest(self, piece: bytes, closed: int | None) -> None:
        """Process the text after the last boundary of a chunk."""
        if closed is not None:
            self._read_gap(piece[:closed])
            if self._gap:
                self._complain(self._position)
            self._closed = True
            self._position += 1
            piece = piece[closed + 1 :]
        if self._element is not None:
            self._read_element(self._element, piece)
        else:
            self._read_gap(piece)

    def _read_element(self, element: PartialRow, piece: bytes) -> None:
        element.add(piece.replace(b"\n", b"\r"))
        self._position += len(piece)

    def _read_gap(self, piece: bytes) -> None:
        self._gap += piece.translate(None, WHITESPACE)
        if self._gap not in (b"", b",") or (self._closed and self._gap):
            self._complain(self._position + len(piece) - len(piece.lstrip(WHITESPACE + b",")))
        self._position += len(piece)

    def _complain(self, position: int) -> None:
        after = "after the array" if self._closed else f"after element {self._elements}"
        found = f"unexpected {self._gap[:20].decode(errors='replace')!r}" if self._gap else "no comma"
        raise SourceError(
            f"{self._name}: {found} {after}, at byte {position}. "
            "The rows of an array are JSON objects separated by commas."
        )
