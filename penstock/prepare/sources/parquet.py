"""Slices and reads Parquet files; a row group is a unit.

Slicing reads the raw bytes once for the digests and decodes nothing. A worker decodes a row group in small batches and
keeps its position, so that consecutive slices of one large row group decode it once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from penstock.errors import SourceError
from penstock.objects import PIECE_BYTES
from penstock.prepare.sources.columnar import (
    BATCH_BYTES,
    Unit,
    check_units,
    cut_units,
    decode_rows,
    reason_of,
    trim_units,
    with_placeholders,
)
from penstock.prepare.sources.remote import ObjectPath, PieceReader, RangeReader, SourcePath, is_utf8
from penstock.prepare.sources.slices import Columns, Identity, Slice, SliceRows, SourceFile, identity

DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)
RawFile = BinaryIO | PieceReader
READ_BYTES = 1 << 20
FOOTER_BYTES = 1 << 16  # of an object, requested at once; larger footers take a second request
BATCH_ROWS = 4096
MAX_UNPACKED_BYTES, MAX_COMPRESSION_RATIO = (
    256 << 20,
    200,
)  # a column chunk beyond both is refused: a page of it may be all of it


def cut_parquet(file: SourceFile) -> Iterator[Slice]:
    """Yield the slices of a Parquet file."""
    with _readable(file.name), _opened(file.path, file.name, whole=True) as parquet, file.path.open("rb") as raw:
        units = (_unit(parquet, raw, group) for group in range(parquet.num_row_groups))
        yield from cut_units(file, units, _schema(parquet))


def trim_parquet(part: Slice, path: SourcePath, first: int, stop: int) -> Slice:
    """Rows first:stop of this slice, as a slice."""
    with _opened(path, str(path)) as parquet:
        return trim_units(part, _schema(parquet), _units(part, parquet, path), first, stop)


def parquet_head(file: SourceFile, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Batches from the start of a file, with the values of the requested columns and placeholders for the others."""
    with _readable(file.name), _opened(file.path, file.name, whole=True) as parquet:
        for group in range(parquet.num_row_groups):
            for batch in _batches(file.path, parquet, range(group, group + 1), columns, whole=True):
                yield with_placeholders(batch, parquet.schema_arrow.names)


def read_parquet(part: Slice, path: SourcePath, max_row_bytes: int, columns: Columns) -> SliceRows:
    """Read the rows of a slice, after checking that the file has not changed."""
    try:
        cursor = _cursor_for(part, path, columns)
        rows = decode_rows(part, cursor.take(part.skip, part.rows), max_row_bytes)
    except DAMAGE as error:
        groups = f"row groups {part.unit} to {part.unit + part.units - 1}"
        raise SourceError(f"{path}: {groups} can't be read: {reason_of(error)}. Write the file again.") from error
    _idle_cursors.append(cursor)
    return rows


class _Cursor:
    """A read position in consecutive row groups of a file."""

    def __init__(self, part: Slice, path: SourcePath, columns: Columns) -> None:
        self._key = _cursor_key(part, path, columns)
        parquet = _opened(path, str(path))
        is_vouched = isinstance(path, ObjectPath) and path.is_vouched  # requests name the ETag of what was planned
        self.schema, self.units = _schema(parquet), None if is_vouched else _units(part, parquet, path)
        self._position = 0
        self._left: pa.RecordBatch | None = None
        self._batches = _batches(path, parquet, range(part.unit, part.unit + part.units), columns)

    def serves(self, part: Slice, path: SourcePath, columns: Columns) -> bool:
        """Whether the slice can be reached by reading on from here."""
        return self._position <= part.skip and self._key == _cursor_key(part, path, columns)

    def take(self, skip: int, rows: int) -> Iterator[pa.RecordBatch]:
        """The batches with rows skip:skip + rows."""
        stop = skip + rows
        while self._position < stop:
            batch = next(self._batches) if self._left is None else self._left
            self._left = None
            first, last = max(0, skip - self._position), min(batch.num_rows, stop - self._position)
            if first < last:
                yield batch.slice(first, last - first)
            if last < batch.num_rows:
                self._left = batch.slice(last)
            self._position += min(last, batch.num_rows)


_idle_cursors: list[_Cursor] = []  # at most one, from the last slice read; removed while in use


def _cursor_key(part: Slice, path: SourcePath, columns: Columns) -> tuple[SourcePath, Identity, int, int, Columns]:
    return path, identity(path), part.unit, part.units, columns


def _cursor_for(part: Slice, path: SourcePath, columns: Columns) -> _Cursor:
    cursor = _idle_cursors.pop() if _idle_cursors else None
    _idle_cursors.clear()
    if cursor is None or not cursor.serves(part, path, columns):
        cursor = _Cursor(part, path, columns)
    if cursor.units is not None and not check_units(part, cursor.schema, cursor.units):
        raise SourceError(
            f"{path}: changed while it was read (row group {part.unit}). "
            "Run again once nothing writes to it; finished slices are kept."
        )
    return cursor


def _opened(path: SourcePath, name: str, *, whole: bool = False, **more: Any) -> pq.ParquetFile:
    """Open a file. An object is opened to read the `whole` of it, or the parts that are needed."""
    with _readable(name):
        # Buffered without pre-buffering, so that memory is bounded by the batch, not the row group.
        if not isinstance(path, ObjectPath):
            file = path if is_utf8(str(path)) else pa.OSFile(os.fsencode(str(path)))
            return pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False, **more)
        source = pa.PythonFile(path.open() if whole else path.open_range(), "r")
        return pq.ParquetFile(source, **{"metadata": _metadata(path, whole), **more}, pre_buffer=False)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turns what damaged files raise into an error that names the file."""
    try:
        yield
    except DAMAGE as error:
        what = f"not a readable Parquet file: {reason_of(error)}. It may be truncated; write it again."
        raise SourceError(f"{name}: {what}") from error


@lru_cache(32)
def _metadata(path: ObjectPath, whole: bool) -> pq.FileMetaData:
    """The footer of an object, which takes one or two requests."""
    with path.open() if whole else path.open_range(max(0, path.size - FOOTER_BYTES), path.size) as source:
        return pq.read_metadata(pa.PythonFile(source, "r"))


def _batches(
    path: SourcePath, parquet: pq.ParquetFile, groups: range, columns: Columns, *, whole: bool = False
) -> Iterator[pa.RecordBatch]:
    """Decode row groups in small batches.

    Dictionary-encoded strings stay encoded: expanded, they may be a million times as large.
    """
    names = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
    dictionaries: set[str] = set()
    for group in groups:
        dictionaries |= _dictionary_columns(path, parquet, group, names)
    more = {"read_dictionary": sorted(dictionaries), "metadata": parquet.metadata}
    with _reader(path, whole=whole, **more) as (reader, ahead):
        for group in groups:  # one at a time: pyarrow can't unify dictionaries inside lists
            if names:
                size = _batch_size(parquet, group, names)
                if ahead is not None:
                    ahead.preload([_extent(chunk) for chunk in _chunks(parquet, group, names)])
                for batch in reader.iter_batches(batch_size=size, row_groups=[group], columns=names):
                    yield batch.select(names)
            else:  # so that the error can list the columns
                nothing = pa.array([{}] * parquet.metadata.row_group(group).num_rows, pa.struct([]))
                yield with_placeholders(pa.RecordBatch.from_struct_array(nothing), parquet.schema_arrow.names)


@contextmanager
def _reader(path: SourcePath, *, whole: bool, **more: Any) -> Iterator[tuple[pq.ParquetFile, RangeReader | None]]:
    """A file to decode; of an object that is read in parts, also what requests them."""
    if isinstance(path, ObjectPath) and not whole:
        ahead = path.open_range()
        with pq.ParquetFile(pa.PythonFile(ahead, "r"), buffer_size=PIECE_BYTES, pre_buffer=False, **more) as reader:
            yield reader, ahead
    else:
        with _opened(path, str(path), whole=whole, **more) as reader:
            yield reader, None


def _dictionary_columns(path: SourcePath, parquet: pq.ParquetFile, group: int, names: list[str]) -> set[str]:
    """The dictionary-encoded string columns of a row group. Raises for a chunk that expands to an excessive size."""
    found: set[str] = set()
    for chunk in _chunks(parquet, group, names):
        size, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
        if size > MAX_UNPACKED_BYTES and size > MAX_COMPRESSION_RATIO * packed:
            raise SourceError(
                f"{path}: {chunk.path_in_schema} in row group {group} unpacks from {packed:,} to {size:,} bytes. "
                "Write the file again in smaller row groups."
            )
        if chunk.physical_type == "BYTE_ARRAY" and _has_dictionary(chunk):
            found.add(chunk.path_in_schema)
    return found


def _batch_size(parquet: pq.ParquetFile, group: int, names: list[str]) -> int:
    """Number of rows to decode at once.

    Two encodings can expand to far more than the chunk: the dictionary of a JSON column, which is always expanded, and
    strings stored as a suffix of the previous one. In both, no value is larger than the whole chunk.
    """
    meta = parquet.metadata.row_group(group)
    chunks = _chunks(parquet, group, names)
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    limits: list[int] = [BATCH_ROWS, meta.num_rows * BATCH_BYTES // max(1, size)]
    types = {field.name: field.type for field in parquet.schema_arrow}
    for chunk in chunks:
        is_json = isinstance(types.get(chunk.path_in_schema), pa.JsonType)
        if (is_json and _has_dictionary(chunk)) or "DELTA_BYTE_ARRAY" in chunk.encodings:
            values_per_row = -(-chunk.num_values // max(1, meta.num_rows))
            limits.append(64 * BATCH_BYTES // max(1, chunk.total_uncompressed_size * values_per_row))
    return max(1, min(limits))


def _chunks(parquet: pq.ParquetFile, group: int, names: list[str]) -> list[pq.ColumnChunkMetaData]:
    """The column chunks of a row group that belong to these columns."""
    meta = parquet.metadata.row_group(group)
    chunks = [meta.column(number) for number in range(meta.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema.startswith(tuple(names))]


def _has_dictionary(chunk: pq.ColumnChunkMetaData) -> bool:
    return any("DICTIONARY" in encoding for encoding in chunk.encodings)


def _schema(parquet: pq.ParquetFile) -> str:
    """Names and types of the columns, without other metadata."""
    return str(parquet.schema_arrow.to_string(show_field_metadata=False, show_schema_metadata=False))


def _units(part: Slice, parquet: pq.ParquetFile, path: SourcePath) -> list[Unit]:
    with path.open("rb") as raw:
        return [_unit(parquet, raw, group) for group in range(part.unit, part.unit + part.units)]


def _extent(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """Where a column chunk starts and ends in the file."""
    dictionary = column.dictionary_page_offset if column.has_dictionary_page else None
    start = column.data_page_offset if not dictionary else min(dictionary, column.data_page_offset)
    return start, start + column.total_compressed_size


def _unit(parquet: pq.ParquetFile, raw: RawFile, group: int) -> Unit:
    """Describe a row group; the digest covers its column chunks and the metadata needed to read them."""
    meta = parquet.metadata.row_group(group)
    hasher = blake3(f"{meta.num_rows} rows".encode())
    extents = [_extent(meta.column(number)) for number in range(meta.num_columns)]
    first, last = min((start for start, _ in extents), default=0), max((end for _, end in extents), default=0)
    if isinstance(raw, PieceReader):
        raw.reserve(last - first)
    for number, (start, _) in enumerate(extents):
        column = meta.column(number)
        what = (column.path_in_schema, column.physical_type, column.compression, column.num_values)
        hasher.update(f"{what} {column.total_compressed_size} bytes".encode())
        raw.seek(start)
        left = column.total_compressed_size
        while left and (block := raw.read(min(READ_BYTES, left))):
            hasher.update(block)
            left -= len(block)
    return Unit(first, last, meta.num_rows, meta.total_byte_size, hasher.digest())
