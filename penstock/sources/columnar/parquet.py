"""Slices and reads Parquet files; a row group is a unit.

Slicing reads the raw bytes once for the digests and decodes nothing. A worker decodes a row group in small batches and
keeps its position, so that consecutive slices of one large row group decode it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from penstock.errors import SourceError
from penstock.sources.columnar.rows import BATCH_BYTES, decode_rows, with_placeholders
from penstock.sources.columnar.units import Unit, check_units, cut_units, trim_units
from penstock.sources.slices import Columns, FileIdentity, Slice, SliceRows, SourceFile, identity

READ_BYTES = 1 << 20
BATCH_ROWS = 4096
MAX_UNPACKED_BYTES, MAX_COMPRESSION_RATIO = (
    256 << 20,
    200,
)  # a column chunk beyond both is refused: a page of it may be all of it


def cut_parquet(file: SourceFile) -> Iterator[Slice]:
    """Yield the slices of a Parquet file."""
    with _opened(file.path, file.name) as parquet, file.path.open("rb") as raw:
        units = (_unit(parquet, raw, group) for group in range(parquet.num_row_groups))
        yield from cut_units(file, units, _schema(parquet))


def trim_parquet(part: Slice, path: Path, first: int, stop: int) -> Slice:
    """Rows first:stop of this slice, as a slice."""
    with _opened(path, str(path)) as parquet:
        return trim_units(part, _schema(parquet), _units(part, parquet, path), first, stop)


def parquet_head(file: SourceFile, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Batches from the start of a file, with the values of the requested columns and placeholders for the others."""
    with _opened(file.path, file.name) as parquet:
        for group in range(parquet.num_row_groups):
            for batch in _batches(file.path, parquet, range(group, group + 1), columns):
                yield with_placeholders(batch, parquet.schema_arrow.names)


def read_parquet(part: Slice, path: Path, max_row_bytes: int, columns: Columns) -> SliceRows:
    """Read the rows of a slice, after checking that the file has not changed."""
    try:
        cursor = _cursor_for(part, path, columns)
        rows = decode_rows(part, cursor.take(part.skip, part.rows), max_row_bytes)
    except (pa.ArrowException, OSError) as error:
        groups = f"row groups {part.unit} to {part.unit + part.units - 1}"
        raise SourceError(f"{path}: {groups} can't be read: {error}. Write the file again.") from error
    _idle_cursors.append(cursor)
    return rows


class _Cursor:
    """A read position in consecutive row groups of a file."""

    def __init__(self, part: Slice, path: Path, columns: Columns) -> None:
        self._key = _cursor_key(part, path, columns)
        parquet = _opened(path, str(path))
        self.schema, self.units = _schema(parquet), _units(part, parquet, path)
        self._position = 0
        self._left: pa.RecordBatch | None = None
        self._batches = _batches(path, parquet, range(part.unit, part.unit + part.units), columns)

    def serves(self, part: Slice, path: Path, columns: Columns) -> bool:
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


def _cursor_key(part: Slice, path: Path, columns: Columns) -> tuple[Path, FileIdentity, int, int, Columns]:
    return path, identity(path), part.unit, part.units, columns


def _cursor_for(part: Slice, path: Path, columns: Columns) -> _Cursor:
    cursor = _idle_cursors.pop() if _idle_cursors else None
    _idle_cursors.clear()
    if cursor is None or not cursor.serves(part, path, columns):
        cursor = _Cursor(part, path, columns)
    if not check_units(part, cursor.schema, cursor.units):
        raise SourceError(
            f"{path}: changed while it was read (row group {part.unit}). "
            "Run again once nothing writes to it; finished slices are kept."
        )
    return cursor


def _opened(path: Path, name: str, **more: Any) -> pq.ParquetFile:
    try:
        # Buffered without pre-buffering, so that memory is bounded by the batch, not the row group.
        return pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False, **more)
    except (pa.ArrowException, OSError) as error:
        what = f"not a readable Parquet file: {error}. It may be truncated; write it again."
        raise SourceError(f"{name}: {what}") from error


def _batches(path: Path, parquet: pq.ParquetFile, groups: range, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Decode row groups in small batches.

    Dictionary-encoded strings stay encoded: expanded, they may be a million times as large.
    """
    names = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
    dictionaries: set[str] = set()
    for group in groups:
        dictionaries |= _dictionary_columns(path, parquet, group, names)
    with _opened(path, str(path), read_dictionary=sorted(dictionaries), metadata=parquet.metadata) as reader:
        for group in groups:  # one at a time: pyarrow can't unify dictionaries inside lists
            if names:
                size = _batch_size(parquet, group, names)
                for batch in reader.iter_batches(batch_size=size, row_groups=[group], columns=names):
                    yield batch.select(names)
            else:  # so that the error can list the columns
                nothing = pa.array([{}] * parquet.metadata.row_group(group).num_rows, pa.struct([]))
                yield with_placeholders(pa.RecordBatch.from_struct_array(nothing), parquet.schema_arrow.names)


def _dictionary_columns(path: Path, parquet: pq.ParquetFile, group: int, names: list[str]) -> set[str]:
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


def _units(part: Slice, parquet: pq.ParquetFile, path: Path) -> list[Unit]:
    with path.open("rb") as raw:
        return [_unit(parquet, raw, group) for group in range(part.unit, part.unit + part.units)]


def _unit(parquet: pq.ParquetFile, raw: BinaryIO, group: int) -> Unit:
    """Describe a row group; the digest covers its column chunks and the metadata needed to read them."""
    meta = parquet.metadata.row_group(group)
    hasher = blake3(f"{meta.num_rows} rows".encode())
    starts, ends = [], []
    for number in range(meta.num_columns):
        column = meta.column(number)
        dictionary = column.dictionary_page_offset if column.has_dictionary_page else None
        start = column.data_page_offset if not dictionary else min(dictionary, column.data_page_offset)
        starts.append(start)
        ends.append(start + column.total_compressed_size)
        what = (column.path_in_schema, column.physical_type, column.compression, column.num_values)
        hasher.update(f"{what} {column.total_compressed_size} bytes".encode())
        raw.seek(start)
        left = column.total_compressed_size
        while left and (block := raw.read(min(READ_BYTES, left))):
            hasher.update(block)
            left -= len(block)
    return Unit(min(starts, default=0), max(ends, default=0), meta.num_rows, meta.total_byte_size, hasher.digest())
