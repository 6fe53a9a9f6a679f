"""Text sources: runs of rows in, slices out; and in the worker, a slice in, its rows out.

A slice starts with its first row, and its digest is over its rows joined by newlines, so the same rows give the same
slices from a plain file, its compressed twin and an array. Nothing depends on where chunks end.
Cost of slicing plain JSON lines of 1 KB, digests included: about 0.5 GB/s, in the memory of a chunk, or of a slice
where data is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from penstock.errors import SourceError
from penstock.sources.chunks import CHUNK_BYTES, chunks
from penstock.sources.cutting import SLICE_SIZES, SliceSizes
from penstock.sources.lines import line_runs, split_lines
from penstock.sources.slices import Rows, Slice, SourceFile
from penstock.sources.text_rows import Giant, Run, digest_of


def text_runs(file: SourceFile, limit: int, largest: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Run | Giant]:
    """The rows of a text file, streamed."""
    stream = chunks(file.path, file.name, file.kind.compression, chunk_bytes)
    if file.kind.is_array:
        from penstock.sources.arrays import element_runs  # needs numpy

        return element_runs(stream, file.name, largest, limit)
    return line_runs(stream, largest, limit)


def cut_text(
    file: SourceFile, runs: Iterable[Run | Giant], *, keep_data: bool, sizes: SliceSizes = SLICE_SIZES
) -> Iterator[Slice]:
    """The slices of a file, in order, each as soon as it is complete."""
    smallest, _, largest = sizes
    rate = sizes.rate
    pending = _Pending(file, keep_data)
    for run in runs:
        if isinstance(run, Giant):
            yield from pending.emit(run.start)
            yield pending.emit_giant(run)
            continue
        taken, size = 0, pending.size
        for index, row in enumerate(run.rows):
            if not row:
                continue
            length = len(row) + 1
            if size and size + length > largest:
                pending.take(run, taken, index, size)
                yield from pending.emit(run.end_of(index - 1))
                taken, size = index, 0
            if not size:
                pending.begin(index - taken, run.end_of(index - 1))
                taken = index
            size += length
            if size >= smallest and (xxh3_64_intdigest(row) < length * rate or length > largest):
                pending.take(run, taken, index + 1, size)
                yield from pending.emit(run.end_of(index))
                taken, size = index + 1, 0
        pending.take(run, taken, len(run.rows), size)
        pending.end = run.end_of(len(run.rows) - 1)
    yield from pending.emit(pending.end)


class _Pending:
    """The slice that is being collected. Blank lines have no part in its digest, but count as lines."""

    def __init__(self, file: SourceFile, keep_data: bool) -> None:
        self._file, self._keep_data = file, keep_data
        self._row, self._line = 0, 1  # the slice's first
        self._start = self._rows = self._lines = self.size = self.end = 0
        self._kept: list[bytes] = []
        self._hasher = blake3()

    def begin(self, blank_lines: int, start: int) -> None:
        """The first row has come, after blank lines that belong to no slice."""
        self._line += self._lines + blank_lines
        self._start, self._lines, self._kept = start, 0, []

    def take(self, run: Run, first: int, stop: int, size: int) -> None:
        """Lines first:stop of a run belong to the slice, whose rows then have this size."""
        rows = stop - first if run.ends is None else sum(map(bool, run.rows[first:stop]))
        if rows:
            if self._rows:
                self._hasher.update(b"\n")
            self._hasher.update(run.joined(first, stop))
        self._rows += rows
        self._lines += stop - first
        self.size = size
        if self._keep_data:
            self._kept += run.rows[first:stop]

    def emit(self, end: int) -> Iterator[Slice]:
        """The slice, unless it has no rows yet."""
        if self._rows:
            digest = "b3-" + self._hasher.hexdigest()
            yield self._slice(self._start, end, digest, self._kept)

    def emit_giant(self, giant: Giant) -> Slice:
        """A slice of this row alone; empty data tells that it is larger than a row may be."""
        self.begin(0, giant.start)
        self._rows = self._lines = 1
        self.size, self.end = giant.size + 1, giant.end
        return self._slice(giant.start, giant.end, giant.digest, [giant.data or b""])

    def _slice(self, start: int, end: int, digest: str, data: list[bytes]) -> Slice:
        part = Slice(
            file=self._file.ordinal,
            kind=self._file.kind,
            start=start,
            end=end,
            first_row=self._row,
            rows=self._rows,
            first_line=None if self._file.kind.is_array else self._line,
            size=self.size,
            digest=digest,
            data=data if self._keep_data else None,
        )
        self._row += self._rows
        self._line += self._lines
        self._rows = self._lines = self.size = 0
        self._kept, self._hasher = [], blake3()
        return part


def read_text(part: Slice, path: Path, data: list[bytes] | None, max_row_bytes: int) -> Rows:
    """The rows of a slice, checked against its digest where they are read from the file."""
    if part.rows == 1 and part.size - 1 > max_row_bytes:
        return Rows([b""], [part.first_line or part.first_row + 1], {0: part.size - 1})
    lines = _lines(part, path) if data is None else data
    rows = lines if b"" not in lines else [line for line in lines if line]
    first = part.first_line or part.first_row + 1
    numbers = [number for number, line in enumerate(lines, start=first) if line]
    oversize: dict[int, int] = {}
    if part.size > max_row_bytes:
        oversize = {index: len(row) for index, row in enumerate(rows) if len(row) > max_row_bytes}
        rows = [b"" if index in oversize else row for index, row in enumerate(rows)]
    return Rows(rows, numbers, oversize)


def trim_text(part: Slice, path: Path, first: int, stop: int) -> Slice:
    """The slice of rows first:stop of this slice."""
    text = _text(part, path) if part.data is None else b""
    lines = split_lines(text) if part.data is None else part.data
    of_rows = [number for number, line in enumerate(lines) if line]
    begin, end = of_rows[first], of_rows[stop - 1] + 1
    chosen = [line for line in lines[begin:end] if line]
    trimmed = replace(
        part,
        first_row=part.first_row + first,
        rows=stop - first,
        first_line=None if part.first_line is None else part.first_line + begin,
        size=sum(map(len, chosen)) + len(chosen),
        digest=digest_of(b"\n".join(chosen)),
    )
    if part.data is not None:
        return replace(trimmed, data=lines[begin:end])
    raw = text.split(b"\n")
    start = part.start + sum(map(len, raw[:begin])) + begin
    return replace(trimmed, start=start, end=min(part.end, start + sum(map(len, raw[begin:end])) + end - begin))


def _text(part: Slice, path: Path) -> bytes:
    if part.kind.is_streamed:
        raise SourceError(f"{path}: slices of {part.kind} files are read only with the data that came with them.")
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(part.start)
            return file.read(part.end - part.start)
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}.") from error


def _lines(part: Slice, path: Path) -> list[bytes]:
    """The lines of a slice, read from the file and checked against its digest."""
    text = _text(part, path)
    lines = split_lines(text)
    end = len(text) - text.endswith(b"\n")
    stands = digest_of(memoryview(text)[:end]) == part.digest  # as it does where no line is blank or ends in \r\n
    if not stands and digest_of(b"\n".join(filter(None, lines))) != part.digest:
        raise SourceError(
            f"{path}: changed while it was read (bytes {part.start} to {part.end}). "
            "Run again once nothing writes to it; finished slices are kept."
        )
    return lines
