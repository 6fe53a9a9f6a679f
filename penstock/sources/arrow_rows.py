"""Arrow columns in, one JSON object a row out, with the null fields of structs dropped and counted.

Arrow gives every struct of a column all the fields that any row has, and so fills messages and tool schemas with
nulls that the data never had. They can't be told from nulls that were meant, so all null fields of structs go, at
every depth; nulls that are a whole column's value or an element of a list stay. JSON columns (`arrow.json`, which
`datasets` uses for mixed values) are spliced in as they are, so their nulls and numbers are the original ones.
Bytes become text where they are UTF-8, else base64; decimals and times become strings; NaN and infinities null.
Rows over the limit are told by their sizes in Arrow and never become Python values. Cost: about 0.1 GB/s of JSON.
"""

from __future__ import annotations

import base64
import datetime
import decimal
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SourceError
from penstock.sources.arrow_sizes import row_sizes
from penstock.sources.slices import Rows, Slice

BATCH_BYTES = 1 << 20  # of rows that become Python values at once
MOST_BYTES = 1 << 30  # that the rows of a slice may unpack to
LIST_TYPES = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


def json_rows(batch: pa.RecordBatch) -> tuple[list[bytes], int]:
    """The rows of a batch, and how many null fields were dropped."""
    converter = _Converter()
    names = batch.schema.names
    columns = [converter.values(column) for column in batch.columns]
    rows = [orjson.dumps(dict(zip(names, row, strict=True)), default=as_json) for row in zip(*columns, strict=True)]
    return rows, converter.nulls_dropped


def unit_rows(part: Slice, batches: Iterable[pa.RecordBatch], max_row_bytes: int) -> Rows:
    """The rows of decoded batches."""
    rows: list[bytes] = []
    oversize: dict[int, int] = {}
    nulls = total = 0
    for batch, size in bounded(batches, max_row_bytes):
        more, dropped = ([b""], 0) if size else json_rows(batch)
        nulls += dropped
        total += sum(map(len, more))
        if total > MOST_BYTES:
            raise SourceError(
                f"rows {part.first_row + 1} to {part.first_row + part.rows} unpack to more than {MOST_BYTES:,} bytes. "
                "Write the file again in smaller row groups or record batches."
            )
        for row in more:
            if size or len(row) > max_row_bytes:
                oversize[len(rows)] = size or len(row)
            rows.append(row if len(row) <= max_row_bytes else b"")
    first = part.first_row + 1
    return Rows(rows, list(range(first, first + len(rows))), oversize, nulls)


def bounded(batches: Iterable[pa.RecordBatch], max_row_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The same rows in batches small enough to be made Python values; a row over the limit alone, with its size."""
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
    """Rows of batches, one after the other, without those over the limit."""
    for batch, size in bounded(batches, max_row_bytes):
        for row in () if size else json_rows(batch)[0]:
            if len(row) <= max_row_bytes:
                yield row


def with_names(batch: pa.RecordBatch, names: Iterable[str]) -> pa.RecordBatch:
    """The batch with more columns, in which every value is true."""
    more = [name for name in names if name not in batch.schema.names]
    true = pa.array(np.ones(batch.num_rows, np.bool_))
    return pa.RecordBatch.from_arrays([*batch.columns, *[true] * len(more)], names=[*batch.schema.names, *more])


class _Converter:
    """Turns arrays into Python values, a column at a time."""

    def __init__(self) -> None:
        self.nulls_dropped = 0

    def values(self, array: pa.Array) -> list[Any]:
        """One Python value for each of the array's."""
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
            return _cut(array, self.values(array.flatten()))
        if pa.types.is_dictionary(kind):
            return self._words(array)
        values: list[Any] = array.to_pylist()
        return values

    def _words(self, array: pa.DictionaryArray) -> list[Any]:
        """Values of a dictionary: each becomes a Python value once, and only if it is used."""
        used = array.indices.unique().drop_null()
        words = dict(zip(used.to_pylist(), self.values(array.dictionary.take(used)), strict=True))
        return [words.get(index) for index in array.indices.to_pylist()]

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
        return [None if entry is None else dict(entry) for entry in _cut(lists, pairs)]


def _cut(array: pa.Array, flat: list[Any]) -> list[Any]:
    """The lists of a list array, given the values of all of them."""
    lengths: list[int | None] = pc.list_value_length(array).to_pylist()
    lists: list[Any] = []
    start = 0
    for length in lengths:
        lists.append(None if length is None else flat[start : start + length])
        start += length or 0
    return lists


def as_json(value: object) -> object:
    """JSON for what `orjson` does not know."""
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
