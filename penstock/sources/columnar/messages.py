"""What the header of an Arrow IPC message says of a record batch, without unpacking it: rows, buffers, compression.

pyarrow has no call for it. The header is a FlatBuffers table (Message.fbs of the Arrow specification). Every read is
checked against the header's end; a header that leads elsewhere is damage, not a crash.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

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
