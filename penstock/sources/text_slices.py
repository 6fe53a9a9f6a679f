"""Text sources: runs of rows in, slices out; and in the worker, a slice in, its rows out.

A slice starts with its first row, and its digest is over its rows joined by newlines, so the same rows give the same
slices from a plain file, its compressed twin and an array. Nothing depends on where chunks end.
Cost of slicing plain JSON lines of 1 KB, digests included: about 0.5 GB/s, in the memory of a chunk, or of a slice
where data is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from penstock.errors import SourceError
from penstock.sources.chunks import CHUNK_BYTES, chunks
from penstock.sources.cutting import SLICE_SIZES, SliceSizes
from penstock.sources.lines import line_runs
from penstock.sources.slices import MAX_ROW_BYTES, Lines, Rows, Slice, SourceFile
from penstock.sources.text_rows import Giant, Run, digest_of


def text_runs(file: SourceFile, limit: int, largest: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Run | Giant]:
    """The rows of a text file, streamed."""
    stream = chunks(file.path, file.name, file.kind.compression, chunk_bytes)
    if file.kind.delimiter:
        from penstock.sources.delimited import cell_runs

        return cell_runs(stream, file.name, file.kind.delimiter, limit or MAX_ROW_BYTES)
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
            yield from pending.emit()
            yield pending.emit_giant(run)
            continue
        taken, size = 0, pending.size
        for index, row in enumerate(run.rows):
            length = len(row) + 1
            if size and size + length > largest:
                pending.take(run, taken, index, size)
                yield from pending.emit()
                taken, size = index, 0
            if not size:
                pending.begin(run, index)
            size += length
            if size >= smallest and (xxh3_64_intdigest(row) < length * rate or length > largest):
                pending.take(run, taken, index + 1, size)
                yield from pending.emit()
                taken, size = index + 1, 0
        pending.take(run, taken, len(run.rows), size)
        pending.lines += run.lines
    yield from pending.emit()


class _Pending:
    """The slice that is being collected. Blank lines have no part in it, but count as lines."""

    def __init__(self, file: SourceFile, keep_data: bool) -> None:
        self.lines = 0  # of the file, before the current run
        self._file, self._keep_data = file, keep_data
        self._row = self._line = 0  # the slice's first
        self._start = self._end = self._rows = self.size = 0
        self._kept: list[bytes] = []
        self._anchors: list[tuple[int, int]] = []
        self._hasher = blake3()

    def begin(self, run: Run, index: int) -> None:
        """The first row has come."""
        self._start, self._line = run.start_of(index), self.lines + run.line_of(index)

    def take(self, run: Run, first: int, stop: int, size: int) -> None:
        """Rows first:stop of a run belong to the slice, whose rows then have this size."""
        if first == stop:
            return
        if self._rows:
            self._hasher.update(b"\n")
        self._hasher.update(run.joined(first, stop))
        if self._keep_data:
            base = self.lines + run.line_of(first) - self._line
            jumps = ((0, 0),) if run.numbers is None else Lines.numbered([], run.numbers[first:stop]).anchors
            self._anchors += [(self._rows + row, base + line) for row, line in jumps]
            self._kept += run.rows[first:stop]
        self._rows += stop - first
        self._end, self.size = run.end_of(stop - 1), size

    def emit(self) -> Iterator[Slice]:
        """The slice, unless it has no rows yet."""
        if self._rows:
            yield self._slice("b3-" + self._hasher.hexdigest())

    def emit_giant(self, giant: Giant) -> Slice:
        """A slice of this row alone; empty data tells that it is larger than a row may be."""
        self._start, self._end, self._line = giant.start, giant.end, self.lines
        self._rows, self.size, self._kept = 1, giant.size + 1, [giant.data or b""]
        self.lines += 1
        return self._slice(giant.digest)

    def _slice(self, digest: str) -> Slice:
        part = Slice(
            file=self._file.ordinal,
            kind=self._file.kind,
            start=self._start,
            end=self._end,
            first_row=self._row,
            rows=self._rows,
            first_line=self._line + 1 if self._file.kind.has_lines else None,
            size=self.size,
            digest=digest,
            data=Lines(self._kept, self._anchors) if self._keep_data else None,
        )
        self._row += self._rows
        self._rows = self.size = 0
        self._kept, self._anchors, self._hasher = [], [], blake3()
        return part


def read_text(part: Slice, path: Path, data: Lines | None, max_row_bytes: int) -> Rows:
    """The rows of a slice, checked against its digest where they are read from the file."""
    first = part.first_line or part.first_row + 1
    if part.rows == 1 and part.size - 1 > max_row_bytes:
        return Rows([b""], [first], {0: part.size - 1})
    lines = _checked(part, path) if data is None else data
    rows = lines.rows
    oversize: dict[int, int] = {}
    if part.size > max_row_bytes:
        oversize = {index: len(row) for index, row in enumerate(rows) if len(row) > max_row_bytes}
        rows = [b"" if index in oversize else row for index, row in enumerate(rows)]
    return Rows(rows, lines.numbers(first), oversize)


def trim_text(part: Slice, path: Path, first: int, stop: int) -> Slice:
    """The slice of rows first:stop of this slice."""
    start, end, lines = part.start, part.end, part.data
    if lines is None:
        runs = [*_runs(part, path)]
        lines = _lines(runs)
        (run, index), (last_run, last) = _found(runs, first), _found(runs, stop - 1)
        start, end = run.start_of(index), last_run.end_of(last)
    numbers, rows = lines.numbers(0)[first:stop], lines.rows[first:stop]
    return replace(
        part,
        start=start,
        end=end,
        first_row=part.first_row + first,
        rows=stop - first,
        first_line=None if part.first_line is None else part.first_line + numbers[0],
        size=sum(map(len, rows)) + len(rows),
        digest=digest_of(b"\n".join(rows)),
        data=None if part.data is None else Lines.numbered(rows, numbers),
    )


def _found(runs: Iterable[Run], row: int) -> tuple[Run, int]:
    """The run that a row is in, and its number there."""
    for run in runs:
        if row < len(run.rows):
            return run, row
        row -= len(run.rows)
    raise IndexError(row)


def _runs(part: Slice, path: Path) -> Iterator[Run]:
    """The rows of a slice, read from the file."""
    if part.kind.is_streamed:
        raise SourceError(f"{path}: slices of {part.kind} files are read only with the data that came with them.")
    size = part.end - part.start
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(part.start)
            left = range(size, 0, -CHUNK_BYTES)
            for run in line_runs((file.read(min(n, CHUNK_BYTES)) for n in left), size, size, start=part.start):
                assert isinstance(run, Run)  # no row is larger than its slice
                yield run
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}.") from error


def _lines(runs: Sequence[Run]) -> Lines:
    """The rows of runs, and their lines."""
    rows = [row for run in runs for row in run.rows]
    if sum(run.lines for run in runs) == len(rows):
        return Lines(rows)
    numbers: list[int] = []
    count = 0
    for run in runs:
        numbers += [count + run.line_of(index) for index in range(len(run.rows))]
        count += run.lines
    return Lines.numbered(rows, numbers)


def _checked(part: Slice, path: Path) -> Lines:
    """The rows of a slice, read from the file and checked against its digest."""
    runs = [*_runs(part, path)]
    hasher = blake3()
    for number, run in enumerate(run for run in runs if run.rows):
        if number:
            hasher.update(b"\n")
        hasher.update(run.joined(0, len(run.rows)))
    if "b3-" + hasher.hexdigest() != part.digest:
        raise SourceError(
            f"{path}: changed while it was read (bytes {part.start} to {part.end}). "
            "Run again once nothing writes to it; finished slices are kept."
        )
    return _lines(runs)
