"""Runs of text rows, and rows assembled from several chunks; shared by JSON lines and JSON arrays.

Memory is bounded by the chunk and the largest slice: a larger row is hashed as it streams, and kept only while it is
within the row size limit.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from penstock.errors import SourceError
from penstock.native import native
from penstock.prepare.sources.kinds import UTF8_BOM, WHITESPACE

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


# ---- json lines ------------------------------------------------------------------------------------------------------
#
# Reads JSON lines as rows.
#
# A row is a line without its line ending (\\n or \\r\\n), unchanged. Blank lines and a BOM at the start of the file are
# skipped. The result does not depend on chunk boundaries. Throughput: about 2 GB/s on lines of 1 KB.


HEAD_BYTES = 1 << 12


def line_runs(chunks: Iterable[bytes], largest: int, limit: int, *, start: int = 0) -> Iterator[RowRun | HugeRow]:
    """The rows of JSON lines that begin at offset `start` of their file.

    A row over `largest` bytes that crosses a chunk boundary becomes a `HugeRow`.
    """
    partial = PartialRow(largest, limit)
    position = start  # where the line in `partial` starts
    for chunk, skipped in _without_bom(chunks) if not start else ((chunk, 0) for chunk in chunks):
        position += skipped
        first, stop = 0, chunk.rfind(b"\n") + 1
        if stop and partial.size:
            first = chunk.find(b"\n") + 1
            partial.add(chunk[: first - 1])
            end = position + partial.size + 1
            yield _finished(partial, position, end)
            partial, position = PartialRow(largest, limit), end
        if first < stop:
            yield _json_run(chunk[first:stop], position)
            position += stop - first
        partial.add(chunk[stop:])
    if partial.size:
        yield _finished(partial, position, position + partial.size)


def _json_run(text: bytes, start: int) -> RowRun:
    """The rows of complete lines that begin at offset `start`."""
    end = start + len(text)
    head = text[:HEAD_BYTES]
    if b"\r" in text or 2 * head.count(b"\n") > len(head):  # mostly blank lines: don't make a row of each
        return _cleaned(text, start, end)
    rows = text.split(b"\n") if native is None else native.split_lines(text)
    rows.pop()  # the empty string after the last newline
    if min(rows) < b"!":  # a blank line, or an indented one
        return _cleaned(text, start, end)
    return RowRun(rows, start, end, len(rows), memoryview(text))


def _cleaned(text: bytes, start: int, end: int) -> RowRun:
    """`_json_run` for text with blank lines or \\r."""
    import numpy as np  # not loaded on a cache hit

    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(data == ord("\n")) + 1
    written = np.ones(256, np.int32)
    written[list(BLANK + b"\n")] = 0
    before = np.concatenate(([0], np.cumsum(written[data], dtype=np.int32)[ends - 1]))
    filled = np.flatnonzero(np.diff(before))
    starts = np.concatenate(([0], ends))[filled]
    places = zip(starts.tolist(), (ends[filled] - 1).tolist(), strict=True)
    return RowRun(
        [text[first:stop].removesuffix(b"\r") for first, stop in places],
        start,
        end,
        len(ends),
        starts=(starts + start).tolist(),
        ends=(ends[filled] + start).tolist(),
        numbers=filled.tolist(),
    )


def _without_bom(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    """Chunks without a leading BOM, each with the number of bytes skipped before it."""
    begin: bytes | None = b""
    for chunk in chunks:
        if begin is None:
            yield chunk, 0
            continue
        begin += chunk
        if len(begin) >= len(UTF8_BOM):
            text = begin.removeprefix(UTF8_BOM)
            yield text, len(begin) - len(text)
            begin = None
    if begin:
        yield begin, 0


def _finished(partial: PartialRow, start: int, end: int) -> RowRun | HugeRow:
    if partial.is_blank:
        return RowRun([], start, end, 1)
    row = partial.finish(start, end, b"\r")
    return row if isinstance(row, HugeRow) else RowRun([row], start, end, 1, ends=[end])


# ---- delimited -------------------------------------------------------------------------------------------------------
#
# CSV and TSV: chunks of text in, runs of rows out, each row a JSON object under the names of the header.
#
# Cells are strings; an empty one is null. A cell that holds a JSON list of messages (objects with `role` or `from`)
# becomes that list. A row with more or fewer cells than the header has stays a list, which is refused where rows are
# read, so that it can be set aside like any other bad row. Quotes as RFC 4180 has them. Cost: about 40 MB/s.


RUN_ROWS = 256


def cell_runs(chunks: Iterable[bytes], name: str, delimiter: str, limit: int) -> Iterator[RowRun]:
    """The rows of a delimited file. `limit` bounds a cell, so that a missing quote does not read the rest as one."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))
    reader = csv.reader(_lines(chunks, name), delimiter=delimiter, strict=True)
    rows: list[bytes] = []
    position = read = 0
    try:
        header = _header(next(reader, []), name, delimiter)
        for cells in reader:
            if not cells:
                continue
            read += 1
            rows.append(_row(header, cells))
            if len(rows) == RUN_ROWS:
                yield (run := _delimited_run(rows, position))
                position, rows = run.end, []
    except csv.Error as error:
        raise SourceError(
            f"{name}, line {reader.line_num}, after row {read}: {error}. Is a quote missing there? "
            'Inside a quoted cell, a quote is written twice ("").'
        ) from error
    if rows:
        yield _delimited_run(rows, position)


def _delimited_run(rows: list[bytes], start: int) -> RowRun:
    text = b"".join(row + b"\n" for row in rows)
    return RowRun(rows, start, start + len(text), len(rows), memoryview(text))


def _header(names: list[str], name: str, delimiter: str) -> list[str]:
    twice = [column for column in names if names.count(column) > 1]
    if not names or twice or not all(names):
        what = f"names {twice[0]!r} twice" if twice else "has an empty name" if names else "is missing"
        raise SourceError(f"{name}: the header (line 1) {what}. The first line must name each column once.")
    if len(names) == 1 and any(other in names[0] for other in ",;\t" if other != delimiter):
        raise SourceError(
            f"{name}: the header {names[0]!r} is one name, and the cells are split at {delimiter!r}. "
            "CSV is split at commas, a .tsv file at tabs: rename the file, or write it again."
        )
    return names


def _row(header: list[str], cells: list[str]) -> bytes:
    if len(cells) != len(header):
        return orjson.dumps(cells)
    return orjson.dumps({name: _value(cell) for name, cell in zip(header, cells, strict=True)})


def _value(cell: str) -> Any:
    if cell.startswith("["):
        try:
            found = orjson.loads(cell)
        except orjson.JSONDecodeError:
            return cell
        if found and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in found):
            return orjson.Fragment(cell.replace("\n", "\r"))  # white space in JSON; a row is one line
    return cell or None


def _lines(chunks: Iterable[bytes], name: str) -> Iterator[str]:
    rest = b""
    number = 0
    for chunk in itertools.chain(chunks, (b"",)):
        *whole, rest = (rest + chunk).split(b"\n") if chunk or not rest else (rest, b"")
        for line in whole:
            number += 1
            text = line.removeprefix(UTF8_BOM) if number == 1 else line
            try:
                yield text.decode() + "\n"
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{name}, line {number}: byte {error.start} (0x{text[error.start]:02x}) is not valid UTF-8. "
                    "Write the file as UTF-8."
                ) from error


# ---- arrays ----------------------------------------------------------------------------------------------------------
#
# Reads the elements of a JSON array as rows, in one pass and bounded memory.
#
# Brackets outside strings are located with numpy, a chunk at a time, so elements are not parsed here: errors inside one
# are found by its parser. Only what obscures the boundaries between elements is an error at this stage.
# Newlines inside an element become \\r: equivalent JSON (both are white space between tokens, and both are invalid
# inside a string), with every number as written, on one line. Throughput: about 0.2 GB/s.


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
        import numpy as np  # not loaded on a cache hit

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
