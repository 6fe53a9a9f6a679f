"""A shard file: the examples of one slice as one Arrow IPC record batch.

The bytes depend on the slice and the recipe alone. The schema metadata carries the slice's build ledger, its rejected
rows and its spot-check sample as canonical JSON. Shards are read through mmap: opening one reads the footer, and the
columns are numpy views on the file's pages.

A cache in an object store keeps an *index* beside each shard: everything but its token ids, about 3% of the bytes. With
it, a manifest is written and a view is scanned without downloading the tokens. The file is one line of JSON, which
names the shard, its digest and its size, and carries the record of its writer; then the shard's other columns as an
Arrow IPC file, with `length` (stored tokens per example) in place of `input_ids`. The line has a digest of itself and
of what follows, and a keyed one by which users recognise what they wrote themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.digests import FORMAT_VERSION, bytes_digest, canonical, check_format, seal, unseal
from penstock.errors import CorruptError, StoreError
from penstock.prepare.encode.columns import Columns
from penstock.prepare.faithful.prefixes import check_prefixes
from penstock.store.files import is_readable_file
from penstock.store.trust import RECORD_FIELDS, is_keyed, keyed_digest
from penstock.transient import retry_transient

META = b"penstock"
_RECHECK_PAUSES = (0.05, 0.2, 0.5)  # seconds; an NFS client may see another host's rename with a delay
_DAMAGES = (pa.ArrowException, OSError, KeyError, TypeError, ValueError, AttributeError, CorruptError)


@dataclass(frozen=True, slots=True)
class ShardMeta:
    """What a shard records about its slice besides the examples."""

    ledger: Mapping[str, Any]
    rejected: list[dict[str, Any]]
    proof: Mapping[str, Any]
    noted: Mapping[str, list[int]] = field(default_factory=dict)  # note -> starts and ends of runs of rows


def encode_shard(columns: Columns, meta: ShardMeta) -> pa.Buffer:
    """The bytes of a shard file."""
    batch = _record_batch(columns)
    metadata: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "ledger": meta.ledger,
        "rejected": meta.rejected,
        "proof": meta.proof,
    }
    if meta.noted:
        metadata["noted"] = meta.noted
    batch = batch.replace_schema_metadata({META: canonical(metadata)})
    size = pa.MockOutputStream()  # a dry run for the size, so that the buffer need not grow
    _write(batch, size)
    buffer = pa.allocate_buffer(size.size())
    _write(batch, pa.FixedSizeBufferWriter(buffer))
    return buffer


def _write(batch: pa.RecordBatch, sink: pa.NativeFile) -> None:
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def array_of(values: npt.NDArray[Any]) -> pa.Array:
    """An Arrow array over the same memory. `pa.array` would import pandas first, which takes 0.2 s."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _lists(values: npt.NDArray[Any], offsets: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> pa.Array:
    return pa.ListArray.from_arrays(array_of(offsets.astype(np.int32)), array_of(values))


def _record_batch(columns: Columns) -> pa.RecordBatch:
    segments = columns.segment_offsets
    arrays = {
        "input_ids": _lists(columns.ids, columns.id_offsets),
        "segment_ends": _lists(columns.segment_ends, segments),
        "segment_roles": _lists(columns.segment_roles, segments),
        "segment_parts": _lists(columns.segment_parts, segments),
        "segment_messages": _lists(columns.segment_messages, segments),
        "row": array_of(columns.rows),
        "row_hash": array_of(columns.row_hashes),
    }
    if columns.segment_weights is not None:
        arrays["segment_weights"] = _lists(columns.segment_weights, segments)
    if columns.sides is not None:
        arrays["side"] = array_of(columns.sides)
    if columns.prefixes is not None:
        arrays["prefix"] = array_of(columns.prefixes)
    if columns.desirable is not None:
        arrays["desirable"] = array_of(columns.desirable)
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def read_shard(path: Path) -> tuple[Columns, ShardMeta]:
    """Open and check a shard; CorruptError if it is missing or damaged."""
    for pause in _RECHECK_PAUSES:
        if is_readable_file(path):
            break
        time.sleep(pause)
    try:
        return _checked(*_mapped(path), path)
    except FileNotFoundError:
        raise CorruptError(
            f"{path}: the shard is missing, although a dataset needs it. "
            "Run the same prepare again: it rebuilds only this slice."
        ) from None
    except PermissionError:
        raise StoreError(
            f"{path}: the shard belongs to another user, and you may not read it. "
            "Run the same prepare again to build the slice for yourself, or ask the owner for a wider umask."
        ) from None
    except _DAMAGES as error:
        raise CorruptError(
            f"{path}: not a complete shard ({error}). Run `penstock cache verify`, then the same prepare again."
        ) from error


def parse_shard(data: bytes, path: Path) -> tuple[Columns, ShardMeta]:
    """Parse and check the bytes of a shard; CorruptError if they are damaged."""
    try:
        return _checked(*_opened(pa.BufferReader(data)), path)
    except _DAMAGES as error:
        raise CorruptError(f"{path}: not a complete shard ({error})") from error


def _checked(batch: pa.RecordBatch, metadata: Any, path: Path) -> tuple[Columns, ShardMeta]:
    check_format(metadata.get("format"), path)
    columns = columns_of(batch, *_values(batch, "input_ids"))
    check_columns(columns)
    return columns, shard_meta(metadata)


def shard_meta(metadata: Mapping[str, Any]) -> ShardMeta:
    """What a shard's metadata records about its slice."""
    return ShardMeta(metadata["ledger"], metadata["rejected"], metadata["proof"], metadata.get("noted", {}))


def check_columns(columns: Columns, *, with_ids: bool = True) -> None:
    """Check that a shard's arrays are consistent; CorruptError if an offset points outside its array."""
    for name, offsets, count in (
        ("input_ids", columns.id_offsets, len(columns.ids) if with_ids else columns.id_offsets[-1]),
        ("segments", columns.segment_offsets, len(columns.segment_ends)),
    ):
        if len(offsets) != columns.examples + 1 or offsets[0] or offsets[-1] != count or _decreases(offsets).any():
            raise CorruptError(f"the offsets of {name} are not in order")
    for name in ("segment_roles", "segment_parts", "segment_messages", "segment_weights"):
        values = getattr(columns, name)
        if values is not None and len(values) != len(columns.segment_ends):
            raise CorruptError(f"{name} has {len(values)} values for {len(columns.segment_ends)} segments")
    for name in ("row_hashes", "sides", "prefixes", "desirable"):
        values = getattr(columns, name)
        if values is not None and len(values) != columns.examples:
            raise CorruptError(f"{name} has {len(values)} values for {columns.examples} examples")
    if _decreases(columns.rows).any():
        raise CorruptError("its rows are not in order")
    _check_segments(columns)
    if columns.prefixes is not None:
        check_prefixes(columns)


def _decreases(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where a value is less than its predecessor."""
    return values[1:] < values[:-1]


def _check_segments(columns: Columns) -> None:
    """Check that the segments of each example are in order and cover it."""
    ends, firsts, after = columns.segment_ends, columns.segment_offsets[:-1], columns.segment_offsets[1:]
    back = _decreases(ends)
    starts = firsts[(firsts > 0) & (firsts < len(ends))]
    back[starts - 1] = False  # ends count from the start of the example
    has_some, lengths = after > firsts, np.diff(columns.id_offsets)
    if columns.prefixes is not None:
        lengths = lengths + columns.prefixes
    covered = np.array_equal(ends[after[has_some] - 1], lengths[has_some])
    if back.any() or not covered or lengths[~has_some].any():
        raise CorruptError("its segments do not cover its examples")


@retry_transient
def _mapped(path: Path) -> tuple[pa.RecordBatch, Any]:
    with pa.memory_map(str(path)) as mapped:
        return _opened(mapped)


def _opened(file: pa.NativeFile | pa.Buffer) -> tuple[pa.RecordBatch, Any]:
    reader = pa.ipc.open_file(file)
    return reader.get_batch(0), orjson.loads(reader.schema.metadata[META])


def _values(batch: pa.RecordBatch, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    column = batch.column(name)
    return numpy_of(column.values), numpy_of(column.offsets)


def numpy_of(array: pa.Array) -> npt.NDArray[Any]:
    """The values of an array, without a copy. `to_numpy` would import pandas if installed: 0.3 s, 50 MB."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if array.null_count:
        raise ValueError("values are missing")
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def columns_of(batch: pa.RecordBatch, ids: npt.NDArray[Any], id_offsets: npt.NDArray[np.int64]) -> Columns:
    """The columns of a record batch, with these token ids."""
    names = set(batch.schema.names)
    ends, segment_offsets = _values(batch, "segment_ends")
    return Columns(
        ids=ids,
        id_offsets=id_offsets,
        segment_offsets=segment_offsets,
        segment_ends=ends,
        segment_roles=_values(batch, "segment_roles")[0],
        segment_parts=_values(batch, "segment_parts")[0],
        segment_messages=_values(batch, "segment_messages")[0],
        segment_weights=_values(batch, "segment_weights")[0] if "segment_weights" in names else None,
        rows=numpy_of(batch.column("row")),
        row_hashes=numpy_of(batch.column("row_hash")),
        sides=numpy_of(batch.column("side")) if "side" in names else None,
        prefixes=numpy_of(batch.column("prefix")) if "prefix" in names else None,
        desirable=numpy_of(batch.column("desirable")) if "desirable" in names else None,
    )


# -- the index ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A parsed index. `record` has the shard's `digest` and `bytes`; `body` is the Arrow file."""

    name: str
    record: dict[str, Any]
    body: memoryview
    is_own: bool  # written with this user's key

    def read(self) -> tuple[Columns, ShardMeta]:
        """The columns of the shard, without token ids, and what it records about its slice."""
        try:
            batch, metadata = _opened(pa.py_buffer(self.body))
            lengths = numpy_of(batch.column("length"))
            offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            columns = columns_of(batch, np.zeros(0, np.uint32), offsets)
            check_columns(columns, with_ids=False)
            return columns, shard_meta(metadata)
        except (pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"the index of {self.name} can't be read ({error})") from error

    def describes(self, data: Any) -> bool:
        """Whether this is the index of a shard with these bytes."""
        try:
            return bytes_digest(index_body(data)) == bytes_digest(self.body)
        except (pa.ArrowException, KeyError):
            return False


def encode_index(name: str, data: Any, record: dict[str, Any]) -> bytes:
    """The index of a shard with these bytes. `record` must have its digest and size."""
    body = index_body(data)
    head = {"body": bytes_digest(body), "name": name, "note": record}
    return seal(b"index", head | {"mac": keyed_digest(canonical(head))}) + b"\n" + memoryview(body).tobytes()


def parse_index(name: str, data: bytes) -> ShardIndex:
    """Read and check an index; CorruptError if it is damaged or of another shard."""
    line, _, _ = data.partition(b"\n")
    body = memoryview(data)[len(line) + 1 :]
    try:
        head = unseal(b"index", line)
        mac, record = head.pop("mac"), head["note"]
        if head["name"] != name or head["body"] != bytes_digest(body):
            raise ValueError("it belongs to another shard, or has changed")
        if not all(type(record.get(key)) is kind for key, kind in RECORD_FIELDS.items()):
            raise TypeError("a field is missing")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the index of {name} is damaged ({error})") from error
    return ShardIndex(name, record, body, is_keyed(canonical(head), mac))


def index_body(data: Any) -> pa.Buffer:
    """The Arrow file of an index, from the bytes of a shard."""
    batch, _ = _opened(pa.py_buffer(data))
    lengths = np.diff(numpy_of(batch.column("input_ids").offsets)).astype(np.uint32)
    names = [name for name in batch.schema.names if name != "input_ids"]
    arrays = [batch.column(name) for name in names]
    slim = pa.RecordBatch.from_arrays([array_of(lengths), *arrays], names=["length", *names])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, slim.schema.with_metadata(batch.schema.metadata)) as writer:
        writer.write_batch(slim.replace_schema_metadata(batch.schema.metadata))
    return sink.getvalue()
