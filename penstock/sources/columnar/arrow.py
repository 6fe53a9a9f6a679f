"""Slices and reads Arrow files (`save_to_disk`, the `datasets` cache, Feather); a record batch is a unit.

The stream format and the file format are both read as a stream of messages: the file format is a stream after a short
prefix. Files are memory-mapped, so slicing touches each byte once for the digests, and a worker reads only its slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from blake3 import blake3

from penstock.errors import SourceError
from penstock.sources.columnar.rows import decode_rows, with_placeholders
from penstock.sources.columnar.units import Unit, check_units, cut_units, trim_units
from penstock.sources.slices import Columns, Slice, SliceRows, SourceFile

FILE_MAGIC = b"ARROW1\0\0"


class _Stream(NamedTuple):
    """A mapped file, positioned at its first record batch."""

    file: pa.MemoryMappedFile
    schema: pa.Schema
    columns: str  # the schema as text, for the digest


def cut_arrow(file: SourceFile) -> Iterator[Slice]:
    """Yield the slices of an Arrow file."""
    with _opened(file.path, file.name) as stream:
        units = (unit for unit, _ in _batches(stream, stream.file.tell(), None))
        yield from cut_units(file, units, stream.columns)


def trim_arrow(part: Slice, path: Path, first: int, stop: int) -> Slice:
    """Rows first:stop of this slice, as a slice."""
    with _opened(path, str(path)) as stream:
        units = [unit for unit, _ in _batches(stream, part.start, part.end)]
        return trim_units(part, stream.columns, units, first, stop)


def arrow_head(file: SourceFile, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Batches from the start of a file, with the values of the requested columns and placeholders for the others."""
    with _opened(file.path, file.name) as stream:
        for _, batch in _batches(stream, stream.file.tell(), None):
            yield with_placeholders(_selected(batch, columns), batch.schema.names)


def read_arrow(part: Slice, path: Path, max_row_bytes: int, columns: Columns) -> SliceRows:
    """Read the rows of a slice, after checking that the file has not changed."""
    with _opened(path, str(path)) as stream:
        found = list(_batches(stream, part.start, part.end))
        if not check_units(part, stream.columns, [unit for unit, _ in found]):
            raise SourceError(
                f"{path}: changed while it was read (bytes {part.start} to {part.end}). "
                "Run again once nothing writes to it; finished slices are kept."
            )
        batches = [_selected(batch, columns) for _, batch in found]
        return decode_rows(part, _wanted(batches, part.skip, part.rows), max_row_bytes)


def _selected(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    names = [name for name in batch.schema.names if columns is None or name in columns]
    chosen = batch.select(names)
    return chosen if names else with_placeholders(chosen, batch.schema.names)  # so that the error can list the columns


def _wanted(batches: list[pa.RecordBatch], skip: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Rows skip:skip + rows of the batches."""
    position = 0
    for batch in batches:
        first, last = max(0, skip - position), min(batch.num_rows, skip + rows - position)
        if first < last:
            yield batch.slice(first, last - first)
        position += batch.num_rows


@contextmanager
def _opened(path: Path, name: str) -> Iterator[_Stream]:
    try:
        with pa.memory_map(str(path)) as file:
            if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
                file.seek(0)
            schema = pa.ipc.read_schema(pa.ipc.read_message(file))
            for field in schema:
                if _has_dictionary(field.type):
                    raise SourceError(
                        f"{name}: column {field.name!r} is dictionary-encoded, which is not supported in Arrow files. "
                        "Write it as a plain column, or as Parquet."
                    )
            columns = schema.to_string(show_field_metadata=False, show_schema_metadata=False)
            yield _Stream(file, schema, columns)
    except (pa.ArrowException, OSError, EOFError) as error:
        what = f"not a readable Arrow file: {error}. It may be truncated; write it again."
        raise SourceError(f"{name}: {what}") from error


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(index).type) for index in range(kind.num_fields))


def _batches(stream: _Stream, start: int, end: int | None) -> Iterator[tuple[Unit, pa.RecordBatch]]:
    """The record batches at offsets start:end (None: to the end of the stream)."""
    file = stream.file
    position = start
    size = file.size()
    while position < (size if end is None else end):
        file.seek(position)
        try:
            message = pa.ipc.read_message(file)
        except EOFError:  # the end-of-stream marker
            return
        after = file.tell()
        batch = pa.ipc.read_record_batch(message, stream.schema)
        file.seek(position)
        digest = blake3(file.read_buffer(after - position)).digest()
        yield Unit(position, after, batch.num_rows, after - position, digest), batch
        position = after
