"""Slices and reads Arrow files (`save_to_disk`, the `datasets` cache, Feather); a record batch is a unit.

The stream format and the file format are both read as a stream of messages: the file format is a stream after a short
prefix. Files are memory-mapped, so slicing touches each byte once for the digests, and a worker reads only its slice.
Slicing decompresses nothing. A batch states its decompressed size, and one that is too large is refused beforehand.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
from blake3 import blake3

from penstock.errors import SourceError
from penstock.prepare.sources.columnar import (
    Unit,
    check_units,
    cut_units,
    decode_rows,
    reason_of,
    trim_units,
    with_placeholders,
)
from penstock.prepare.sources.remote import ObjectPath, SourcePath
from penstock.prepare.sources.slices import Columns, Slice, SliceRows, SourceFile

# ---- messages --------------------------------------------------------------------------------------------------------
#
# What the header of an Arrow IPC message says of a record batch, without unpacking it: rows, buffers, compression.
#
# pyarrow has no call for it. The header is a FlatBuffers table (Message.fbs of the Arrow specification). Every read is
# checked against the header's end; a header that leads elsewhere is damage, not a crash.


RECORD_BATCH = 3  # in the union MessageHeader
HEADER_TYPE, HEADER = 1, 2  # fields of Message
LENGTH, BUFFERS, COMPRESSION = 0, 2, 3  # fields of RecordBatch
RAW = -1  # the length before a buffer that is stored as it is


class BatchHeader(NamedTuple):
    """A record batch as its message describes it."""

    rows: int
    buffers: list[tuple[int, int]]  # offset in the body, length
    compressed: bool


def batch_header(message: pa.Message) -> BatchHeader:
    """The header of a record batch."""
    data = message.metadata.to_pybytes()
    try:
        root = _u32(data, 0)
        kind = _field(data, root, HEADER_TYPE)
        header = _field(data, root, HEADER)
        if kind is None or header is None or data[kind] != RECORD_BATCH:
            raise pa.ArrowInvalid(f"expected a record batch, found a message of type {message.type!r}")
        batch = header + _u32(data, header)
        rows = _field(data, batch, LENGTH)
        vector = _field(data, batch, BUFFERS)
        buffers = [] if vector is None else _buffers(data, vector + _u32(data, vector))
        number = 0 if rows is None else struct.unpack_from("<q", data, rows)[0]
        return BatchHeader(number, buffers, _field(data, batch, COMPRESSION) is not None)
    except (struct.error, IndexError) as error:
        raise pa.ArrowInvalid(f"a damaged message header ({error})") from error


def unpacked_size(message: pa.Message) -> int:
    """The bytes of a record batch's buffers once they are unpacked."""
    header = batch_header(message)
    if not header.compressed:
        return int(message.body.size)
    body = memoryview(message.body)
    total = 0
    for offset, length in header.buffers:
        if not 0 <= offset <= offset + length <= len(body):
            raise pa.ArrowInvalid(f"a buffer at {offset}:{offset + length} of a body of {len(body)} bytes")
        size = struct.unpack_from("<q", body, offset)[0] if length >= 8 else 0
        total += length if size == RAW else size
    return total


def _buffers(data: bytes, vector: int) -> list[tuple[int, int]]:
    count = _u32(data, vector)
    return list(struct.iter_unpack("<qq", data[vector + 4 : vector + 4 + 16 * count]))


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a table stands; None where the table leaves it out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if vtable < 0 or entry + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None


def _u32(data: bytes, place: int) -> int:
    value: int = struct.unpack_from("<I", data, place)[0]
    return value


# ---- arrow -----------------------------------------------------------------------------------------------------------


FILE_MAGIC = b"ARROW1\0\0"
MOST_UNPACKED, MOST_RATIO = 256 << 20, 200  # a record batch beyond both is refused: it is unpacked whole


class _Stream(NamedTuple):
    """An open file, positioned at its first record batch."""

    name: str
    file: pa.NativeFile
    schema: pa.Schema
    columns: str  # the schema as text, for the digest


def cut_arrow(file: SourceFile) -> Iterator[Slice]:
    """Yield the slices of an Arrow file."""
    with _opened(file.path, file.name) as stream:
        units = (unit for unit, _ in _messages(stream, stream.file.tell(), None))
        yield from cut_units(file, units, stream.columns)


def trim_arrow(part: Slice, path: SourcePath, first: int, stop: int) -> Slice:
    """Rows first:stop of this slice, as a slice."""
    with _opened(path, str(path), part) as stream:
        units = [unit for unit, _ in _messages(stream, part.start, part.end)]
        return trim_units(part, stream.columns, units, first, stop)


def arrow_head(file: SourceFile, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Batches from the start of a file, with the values of the requested columns and placeholders for the others."""
    with _opened(file.path, file.name) as stream:
        for _, message in _messages(stream, stream.file.tell(), None):
            batch = _batch(message, stream)
            yield with_placeholders(_selected(batch, columns), batch.schema.names)


def read_arrow(part: Slice, path: SourcePath, max_row_bytes: int, columns: Columns) -> SliceRows:
    """Read the rows of a slice, after checking that the file has not changed."""
    with _opened(path, str(path), part) as stream:
        found = list(_messages(stream, part.start, part.end))
        if not check_units(part, stream.columns, [unit for unit, _ in found]):
            raise SourceError(
                f"{path}: changed while it was read (bytes {part.start} to {part.end}). "
                "Run again once nothing writes to it; finished slices are kept."
            )
        batches = (_selected(_batch(message, stream), columns) for _, message in found)
        return decode_rows(part, _wanted(batches, part.skip, part.rows), max_row_bytes)


def _selected(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    names = [name for name in batch.schema.names if columns is None or name in columns]
    chosen = batch.select(names)
    return chosen if names else with_placeholders(chosen, batch.schema.names)  # so that the error can list the columns


def _wanted(batches: Iterable[pa.RecordBatch], skip: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Rows skip:skip + rows of the batches."""
    position = 0
    for batch in batches:
        first, last = max(0, skip - position), min(batch.num_rows, skip + rows - position)
        if first < last:
            yield batch.slice(first, last - first)
        position += batch.num_rows


@contextmanager
def _opened(path: SourcePath, name: str, part: Slice | None = None) -> Iterator[_Stream]:
    """Open a file. Of an object, only what `part` covers is read; all of it without a part."""
    try:
        with _native(path, part) as file:
            if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
                file.seek(0)
            message = pa.ipc.read_message(file)
            if message.type != "schema":  # pyarrow would crash
                raise pa.ArrowInvalid(f"expected a schema, found a message of type {message.type!r}")
            schema = pa.ipc.read_schema(message)
            for field in schema:
                encoding = _encoding(field.type)
                if encoding is not None:
                    raise SourceError(
                        f"{name}: column {field.name!r} is {encoding}, which is not supported in Arrow files. "
                        "Write it as a plain column, or as Parquet."
                    )
            columns = schema.to_string(show_field_metadata=False, show_schema_metadata=False)
            yield _Stream(name, file, schema, columns)
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        what = f"not a readable Arrow file: {reason_of(error)}. It may be truncated; write it again."
        raise SourceError(f"{name}: {what}") from error


def _native(path: SourcePath, part: Slice | None) -> pa.NativeFile:
    if not isinstance(path, ObjectPath):
        return pa.memory_map(os.fsencode(str(path)))  # a name need not be UTF-8
    return pa.PythonFile(path.open() if part is None else path.open_range(part.start, part.end), "r")


def _encoding(kind: pa.DataType) -> str | None:
    """The encoding of a column, or of a part of it, that stores a value once for many rows."""
    if pa.types.is_dictionary(kind):
        return "dictionary-encoded"
    if pa.types.is_run_end_encoded(kind):
        return "run-end-encoded"
    return next(filter(None, (_encoding(kind.field(index).type) for index in range(kind.num_fields))), None)


def _messages(stream: _Stream, start: int, end: int | None) -> Iterator[tuple[Unit, pa.Message]]:
    """The record batches at offsets start:end (None: to the end of the stream), still compressed."""
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
        rows = batch_header(message).rows
        file.seek(position)
        digest = blake3(file.read_buffer(after - position)).digest()
        yield Unit(position, after, rows, after - position, digest), message
        position = after


def _batch(message: pa.Message, stream: _Stream) -> pa.RecordBatch:
    """A record batch, unpacked."""
    size, packed = unpacked_size(message), message.body.size
    if size > MOST_UNPACKED and size > MOST_RATIO * packed:
        raise SourceError(
            f"{stream.name}: a record batch unpacks from {packed:,} to {size:,} bytes. "
            "Write the file again in smaller record batches."
        )
    return pa.ipc.read_record_batch(message, stream.schema)
