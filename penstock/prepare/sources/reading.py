"""Cuts any kind of file into slices, and reads the rows of a slice.

`scan` runs in the coordinating process, `read_rows` in the worker, which reads only its own slice. The readers of
Parquet and Arrow are imported on demand, so text sources and cache hits don't load pyarrow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from penstock.errors import SourceError
from penstock.prepare.sources.joined import JoinedPath
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.remote import ObjectPath, SourcePath
from penstock.prepare.sources.slices import (
    MAX_ROW_BYTES,
    SLICE_SIZES,
    Columns,
    FileIdentity,
    Slice,
    SlicePlan,
    SliceRows,
    SourceFile,
    TextRows,
    identity,
)
from penstock.prepare.sources.text_rows import HugeRow, RowRun, digest_of, line_runs
from penstock.prepare.sources.text_slices import cut_text, read_text, text_runs, trim_text

HEAD_BYTES = 8 << 20  # at most, when sampling rows to detect their format


class KeepData(Enum):
    """Which text slices carry their data."""

    NONE = auto()
    STREAMED = auto()  # those that could only be re-read from the start of the file
    ALL = auto()


def scan(
    file: SourceFile, *, max_row_bytes: int = MAX_ROW_BYTES, keep: KeepData = KeepData.STREAMED
) -> Iterator[Slice]:
    """Cut a file into slices, in one pass. Text slices carry their data as `keep` says."""
    before = _state(file.path)
    match file.kind:
        case FileKind.PARQUET:
            from penstock.prepare.sources.parquet import cut_parquet

            yield from cut_parquet(file)
        case FileKind.ARROW:
            from penstock.prepare.sources.arrow import cut_arrow

            yield from cut_arrow(file)
        case _:
            keep_data = keep is KeepData.ALL or (keep is KeepData.STREAMED and file.kind.is_streamed)
            runs = text_runs(file, max_row_bytes if keep_data else 0, SLICE_SIZES.largest)
            yield from cut_text(file, runs, keep_data=keep_data)
    after = _state(file.path)
    if before != after:
        raise SourceError(
            f"{file.name}: changed while it was read ({before[0]} bytes before, {after[0]} after). "
            "Run again once nothing writes to it."
        )


def _state(path: SourcePath) -> tuple[int, object]:
    """What must be the same before and after a file is read. Requests name the ETag, if an object has one."""
    if isinstance(path, JoinedPath):
        states = [*map(_state, path.members)]
        return sum(size for size, _ in states), states
    found = path.current() if isinstance(path, ObjectPath) and not path.is_vouched else identity(path)
    return found.size, found.mtime_ns if isinstance(found, FileIdentity) else found


def plan_slices(file: SourceFile) -> SlicePlan:
    """The slices of a file together with its identity, to be stored."""
    before = identity(file.path)
    return SlicePlan(before, file.kind, tuple(scan(file, keep=KeepData.NONE)))


def trim(part: Slice, path: SourcePath, first: int, stop: int) -> Slice:
    """Rows first:stop of a slice, as a slice with its own digest."""
    match part.kind:
        case FileKind.PARQUET:
            from penstock.prepare.sources.parquet import trim_parquet

            return trim_parquet(part, path, first, stop)
        case FileKind.ARROW:
            from penstock.prepare.sources.arrow import trim_arrow

            return trim_arrow(part, path, first, stop)
        case _:
            return trim_text(part, path, first, stop)


def read_rows(
    part: Slice,
    path: SourcePath,
    *,
    data: TextRows | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
    columns: Columns = None,
) -> SliceRows:
    """Read the rows of a slice; `columns` limits Parquet and Arrow rows to these columns.

    `data` is the slice's own data, which is required for streamed kinds.
    """
    match part.kind:
        case FileKind.PARQUET:
            from penstock.prepare.sources.parquet import read_parquet

            return read_parquet(part, path, max_row_bytes, columns)
        case FileKind.ARROW:
            from penstock.prepare.sources.arrow import read_arrow

            return read_arrow(part, path, max_row_bytes, columns)
        case _:
            return read_text(part, path, data, max_row_bytes)


def fetch_data(part: Slice, file: SourceFile, *, max_row_bytes: int = MAX_ROW_BYTES) -> TextRows | None:
    """Re-read the data of a slice that was stored without it; None for kinds that need none. Streams the file."""
    return next(fetch_each([part], file, max_row_bytes=max_row_bytes))


def fetch_each(
    parts: Sequence[Slice], file: SourceFile, *, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[TextRows | None]:
    """`fetch_data` for several slices of one file, given in file order, in one pass."""
    if not file.kind.is_streamed:
        yield from [None] * len(parts)
        return
    if isinstance(file.path, JoinedPath):
        yield from (_joined_rows(part, file, file.path) for part in parts)
        return
    waiting = deque(parts)
    for whole in scan(file, max_row_bytes=max_row_bytes) if parts else ():
        while waiting and waiting[0].first_row < whole.first_row + whole.rows:
            part = waiting.popleft()
            first = part.first_row - whole.first_row
            found = whole if part.rows == whole.rows else trim(whole, file.path, first, first + part.rows)
            if found.digest != part.digest:
                raise _changed(part, file)
            yield found.data
        if not waiting:
            return
    if waiting:
        raise _changed(waiting[0], file)


def _joined_rows(part: Slice, file: SourceFile, path: JoinedPath) -> TextRows:
    """The rows of a slice, read from the files that hold them."""
    try:
        texts, skip = path.texts_of(part.first_row, part.rows)
        runs = line_runs(texts, MAX_ROW_BYTES, MAX_ROW_BYTES)
        rows = [row for run in runs if isinstance(run, RowRun) for row in run.rows][skip : skip + part.rows]
    except IndexError:
        raise _changed(part, file) from None
    if digest_of(b"\n".join(rows)) != part.digest:
        raise _changed(part, file)
    return TextRows(rows)


def _changed(part: Slice, file: SourceFile) -> SourceError:
    return SourceError(f"{file.name}: the rows from {part.first_row + 1} on have changed. Prepare it again.")


def head(file: SourceFile, count: int, *, max_row_bytes: int = MAX_ROW_BYTES, columns: Columns = None) -> list[bytes]:
    """The first rows of a file within the size limits. Columns not asked for have the value `true`."""
    rows: list[bytes] = []
    size = 0
    for row in _first_rows(file, max_row_bytes, columns):
        rows.append(row)
        size += len(row)
        if len(rows) >= count or size > HEAD_BYTES:
            break
    return rows


def _first_rows(file: SourceFile, max_row_bytes: int, columns: Columns) -> Iterator[bytes]:
    if file.kind in (FileKind.PARQUET, FileKind.ARROW):
        from penstock.prepare.sources.columnar import first_rows

        if file.kind is FileKind.PARQUET:
            from penstock.prepare.sources.parquet import parquet_head

            yield from first_rows(parquet_head(file, columns), max_row_bytes)
        else:
            from penstock.prepare.sources.arrow import arrow_head

            yield from first_rows(arrow_head(file, columns), max_row_bytes)
        return
    for run in text_runs(file, max_row_bytes, SLICE_SIZES.largest):
        rows = [run.data or b""] if isinstance(run, HugeRow) else run.rows
        yield from (row for row in rows if row and len(row) <= max_row_bytes)
