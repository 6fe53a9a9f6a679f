"""Converts Arrow columns to one JSON object per row; null fields of structs are dropped and counted.

Arrow gives every struct of a column all the fields that any row has, and so fills messages and tool schemas with
nulls that the data never had. They are indistinguishable from intended nulls, so all null fields of structs are
dropped, at every depth; nulls that are the value of a column or an element of a list stay. JSON columns (`arrow.json`,
which `datasets` uses for mixed values) are inserted verbatim, with their original nulls and numbers.
Bytes become text if they are UTF-8, else base64; decimals and times become strings; NaN and infinities become null.

Row sizes are computed in Arrow, so rows over the limit never become Python values. Strings and bytes count by length,
everything else as one byte per value; values that are stored once and used many times (dictionaries, views) count each
time. Throughput: about 0.1 GB/s of JSON.
"""

from __future__ import annotations

import base64
import datetime
import decimal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

from penstock.errors import SourceError
from penstock.prepare.sources.slices import SLICE_SIZES, Slice, SliceRows, SliceSizes, SourceFile

Sizes = npt.NDArray[np.int64]

BATCH_BYTES = 1 << 20  # of rows converted to Python values at once
MAX_SLICE_BYTES = 1 << 30  # limit on the decoded rows of a slice
LIST_TYPES = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def reason_of(error: BaseException) -> str:
    """The message of an error of pyarrow, which may have several lines, as one."""
    return " ".join(str(error).split()).rstrip(".")


def json_rows(batch: pa.RecordBatch) -> tuple[list[bytes], int]:
    """The rows of a batch, and the number of null fields dropped."""
    converter = _Converter()
    names = batch.schema.names
    columns = [converter.values(column) for column in batch.columns]
    rows = [orjson.dumps(dict(zip(names, row, strict=True)), default=as_json) for row in zip(*columns, strict=True)]
    return rows, converter.nulls_dropped


def decode_rows(part: Slice, batches: Iterable[pa.RecordBatch], max_row_bytes: int) -> SliceRows:
    """Convert the batches of a slice to rows."""
    rows: list[bytes] = []
    oversize: dict[int, int] = {}
    nulls = total = 0
    for batch, size in bounded_batches(batches, max_row_bytes):
        more, dropped = ([b""], 0) if size else json_rows(batch)
        nulls += dropped
        total += sum(map(len, more))
        if total > MAX_SLICE_BYTES:
            raise SourceError(
                f"rows {part.first_row + 1} to {part.first_row + part.rows} unpack to more than {MAX_SLICE_BYTES:,} "
                "bytes. Write the file again in smaller row groups or record batches."
            )
        for row in more:
            if size or len(row) > max_row_bytes:
                oversize[len(rows)] = size or len(row)
            rows.append(row if len(row) <= max_row_bytes else b"")
    first = part.first_row + 1
    return SliceRows(rows, list(range(first, first + len(rows))), oversize, nulls)


def bounded_batches(batches: Iterable[pa.RecordBatch], max_row_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Re-batch rows to `BATCH_BYTES`. A row over the limit comes alone, with its size; other batches come with 0."""
    for batch in batches:
        sizes = row_sizes(batch)
        first = held = 0
        for row, size in enumerate(sizes.tolist()):
            if row > first and (held + size > BATCH_BYTES or size > max_row_bytes):
                yield batch.slice(first, row - first), 0
                first, held = row, 0
            if size > max_row_bytes:
                yield batch.slice(row, 1), size
                first = row + 1
            else:
                held += size
        if first < batch.num_rows:
            yield batch.slice(first), 0


def first_rows(batches: Iterable[pa.RecordBatch], max_row_bytes: int) -> Iterator[bytes]:
    """The rows of batches, without those over the limit."""
    for batch, size in bounded_batches(batches, max_row_bytes):
        for row in () if size else json_rows(batch)[0]:
            if len(row) <= max_row_bytes:
                yield row


def with_placeholders(batch: pa.RecordBatch, names: Iterable[str]) -> pa.RecordBatch:
    """Add columns in which every value is true, for names that the batch lacks."""
    more = [name for name in names if name not in batch.schema.names]
    true = pa.array(np.ones(batch.num_rows, np.bool_))
    return pa.RecordBatch.from_arrays([*batch.columns, *[true] * len(more)], names=[*batch.schema.names, *more])


class _Converter:
    """Converts arrays to Python values, column by column."""

    def __init__(self) -> None:
        self.nulls_dropped = 0

    def values(self, array: pa.Array) -> list[Any]:
        """The Python values of an array."""
        kind = array.type
        if isinstance(kind, pa.JsonType):
            return [None if text is None else orjson.Fragment(text) for text in array.storage.to_pylist()]
        if isinstance(kind, pa.BaseExtensionType):
            return self.values(array.storage)
        if pa.types.is_struct(kind):
            return self._structs(array)
        if pa.types.is_map(kind):
            return self._maps(array)
        if isinstance(kind, LIST_TYPES):
            return _split_lists(array, self.values(array.flatten()))
        if pa.types.is_dictionary(kind):
            return self._dictionary(array)
        values: list[Any] = array.to_pylist()
        return values

    def _dictionary(self, array: pa.DictionaryArray) -> list[Any]:
        """Convert each dictionary value once, and only if it is used."""
        used = array.indices.unique().drop_null()
        values = dict(zip(used.to_pylist(), self.values(array.dictionary.take(used)), strict=True))
        return [values.get(index) for index in array.indices.to_pylist()]

    def _structs(self, array: pa.StructArray) -> list[Any]:
        names = [field.name for field in array.type]
        if not names:
            return [{} if there else None for there in array.is_valid().to_pylist()]
        columns = [self.values(array.field(index)) for index in range(len(names))]
        structs: list[Any]
        if any(None in column for column in columns):
            structs = [
                {name: value for name, value in zip(names, row, strict=True) if value is not None}
                for row in zip(*columns, strict=True)
            ]
        else:
            structs = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if array.null_count:
            structs = [
                struct if there else None for struct, there in zip(structs, array.is_valid().to_pylist(), strict=True)
            ]
        self.nulls_dropped += sum(len(names) - len(struct) for struct in structs if struct is not None)
        return structs

    def _maps(self, array: pa.MapArray) -> list[Any]:
        kind = array.type
        lists = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
        keys, items = (self.values(lists.flatten().field(index)) for index in range(2))
        pairs = [(key if isinstance(key, str) else str(key), item) for key, item in zip(keys, items, strict=True)]
        return [None if entry is None else dict(entry) for entry in _split_lists(lists, pairs)]


def _split_lists(array: pa.Array, flat: list[Any]) -> list[Any]:
    """Split the flattened values of a list array into its lists."""
    lengths: list[int | None] = pc.list_value_length(array).to_pylist()
    lists: list[Any] = []
    start = 0
    for length in lengths:
        lists.append(None if length is None else flat[start : start + length])
        start += length or 0
    return lists


def as_json(value: object) -> object:
    """`orjson` fallback: bytes, decimals and durations as JSON values."""
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case decimal.Decimal() | datetime.timedelta():
            return str(value)
        case _:
            raise TypeError(f"no JSON for {type(value).__name__}")


def row_sizes(batch: pa.RecordBatch) -> Sizes:
    """The size of each row of a batch."""
    return sum((_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64))


def _sizes(array: pa.Array) -> Sizes:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if pa.types.is_dictionary(kind):
        return _dictionary_sizes(array)
    if pa.types.is_struct(kind):
        fields = (_sizes(array.field(index)) for index in range(kind.num_fields))
        return sum(fields, np.ones(len(array), np.int64))
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    if pa.types.is_nested(array.type):
        return _list_sizes(array)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return np.array([0 if value is None else len(value.as_buffer()) for value in array], np.int64)
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string)) or "binary" in str(kind):
        return _numbers(pc.binary_length(array)) + 1
    return np.ones(len(array), np.int64)


def _dictionary_sizes(array: pa.DictionaryArray) -> Sizes:
    """A dictionary value counts each time it is used."""
    values = np.concatenate([_sizes(array.dictionary), [0]])
    return values[np.where(array.is_valid().to_numpy(zero_copy_only=False), _numbers(array.indices), -1)]


def _list_sizes(array: pa.Array) -> Sizes:
    """Sizes of lists of any kind, from the sizes of their flattened elements."""
    lengths = _numbers(pc.list_value_length(array))
    ends = np.concatenate([[0], np.cumsum(_sizes(array.flatten()))])
    places = np.concatenate([[0], np.cumsum(lengths)])
    found: Sizes = ends[places[1:]] - ends[places[:-1]] + 1
    return found


def _numbers(array: pa.Array) -> Sizes:
    values: Any = pc.fill_null(array, 0)
    return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)


# ---- units -----------------------------------------------------------------------------------------------------------
#
# Cuts sequences of units (Parquet row groups, Arrow record batches) into slices.
#
# Small units are joined and cut by content, as rows of text are; a unit larger than the largest slice is divided into
# equal row ranges. The digest covers the units' raw bytes and the schema, and for a row range its bounds, so a changed
# byte changes all ranges of its unit.


MIN_ROW_WEIGHT = 256  # bytes; encoded sizes say little about dictionary-encoded rows


class Unit(NamedTuple):
    """A row group or record batch: byte range in the file, rows, decoded size, digest of its bytes."""

    start: int
    end: int
    rows: int
    size: int
    digest: bytes

    @property
    def weight(self) -> int:
        """The size used when cutting slices."""
        return max(self.size if self.rows else 0, self.rows * MIN_ROW_WEIGHT)


def units_digest(schema: str, digests: Iterable[bytes], rows: range | None = None) -> str:
    """The digest of the given rows (None: all) of consecutive units."""
    hasher = blake3(b"penstock units 1\0" + schema.encode() + b"\0")
    for digest in digests:
        hasher.update(digest)
    if rows is not None:
        hasher.update(f"rows {rows.start} to {rows.stop}".encode())
    return "b3-" + hasher.hexdigest()


def cut_units(file: SourceFile, units: Iterable[Unit], schema: str, sizes: SliceSizes = SLICE_SIZES) -> Iterator[Slice]:
    """Yield the slices of a file in order, each as soon as it is complete."""
    pending: list[Unit] = []
    done = row = weight = 0  # units and rows in earlier slices; weight of the pending units
    for unit in units:
        if pending and weight + unit.weight > sizes.largest:
            yield from _slices(file, pending, schema, done, row, sizes)
            done, row, weight, pending = done + len(pending), row + sum(u.rows for u in pending), 0, []
        pending.append(unit)
        weight += unit.weight
        ends_here = int.from_bytes(unit.digest[:8]) < unit.weight * sizes.rate
        if weight >= sizes.smallest and (ends_here or weight > sizes.largest):
            yield from _slices(file, pending, schema, done, row, sizes)
            done, row, weight, pending = done + len(pending), row + sum(u.rows for u in pending), 0, []
    yield from _slices(file, pending, schema, done, row, sizes)


def trim_units(part: Slice, schema: str, units: Sequence[Unit], first: int, stop: int) -> Slice:
    """Rows first:stop of a slice of these units, as a slice."""
    total = sum(unit.rows for unit in units)
    rows = range(part.skip + first, part.skip + stop)
    return replace(
        part,
        first_row=part.first_row + first,
        rows=len(rows),
        size=part.size * len(rows) // part.rows,
        digest=units_digest(schema, (unit.digest for unit in units), None if len(rows) == total else rows),
        skip=rows.start,
    )


def check_units(part: Slice, schema: str, units: Sequence[Unit]) -> bool:
    """Whether the units still match the slice's digest."""
    total = sum(unit.rows for unit in units)
    rows = range(part.skip, part.skip + part.rows)
    return part.digest == units_digest(schema, (unit.digest for unit in units), None if len(rows) == total else rows)


def _slices(
    file: SourceFile, units: list[Unit], schema: str, done: int, first_row: int, sizes: SliceSizes
) -> Iterator[Slice]:
    """One slice of all these units, or several slices of a unit that is too large."""
    rows = sum(unit.rows for unit in units)
    if not rows:
        return
    whole = Slice(
        file=file.ordinal,
        kind=file.kind,
        start=units[0].start,
        end=units[-1].end,
        first_row=first_row,
        rows=rows,
        first_line=None,
        size=sum(unit.size for unit in units),
        digest=units_digest(schema, (unit.digest for unit in units)),
        unit=done,
        units=len(units),
    )
    weight = sum(unit.weight for unit in units)
    pieces = 1 if weight <= sizes.largest else min(rows, -(-weight // sizes.mean))
    for piece in range(pieces):
        first, stop = piece * rows // pieces, (piece + 1) * rows // pieces
        yield whole if pieces == 1 else trim_units(whole, schema, units, first, stop)
