"""The index of a shard: everything but its token ids, about 3% of the bytes, in a file of its own.

A cache in an object store keeps one beside each shard. With it, a manifest is written and a view is scanned without
downloading the tokens. The file is one line of JSON, which names the shard, its digest and its size, and carries the
note of its writer; then the shard's other columns as an Arrow IPC file, with `length` (stored tokens per example) in
place of `input_ids`. The line has a digest of itself and of what follows, and a keyed one by which a user recognises
what he wrote himself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.errors import CorruptError
from penstock.prepare.encode.columns import Columns
from penstock.store.files import bytes_digest
from penstock.store.format import canonical, seal, unseal
from penstock.store.remote.user_key import is_keyed, keyed_digest
from penstock.store.shard import META, ShardMeta, array_of, check_columns, columns_of, numpy_of, shard_meta


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A parsed index. `note` has the shard's `digest` and `bytes`; `body` is the Arrow file."""

    name: str
    note: dict[str, Any]
    body: memoryview
    is_own: bool  # written with this user's key

    def read(self) -> tuple[Columns, ShardMeta]:
        """The columns of the shard, without token ids, and what it records about its slice."""
        try:
            batch, metadata = _opened(self.body)
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


def encode_index(name: str, data: Any, note: dict[str, Any]) -> bytes:
    """The index of a shard with these bytes. `note` must have its digest and size."""
    body = index_body(data)
    head = {"body": bytes_digest(body), "name": name, "note": note}
    return seal(b"index", head | {"mac": keyed_digest(canonical(head))}) + b"\n" + memoryview(body).tobytes()


def parse_index(name: str, data: bytes) -> ShardIndex:
    """Read and check an index; CorruptError if it is damaged or of another shard."""
    line, _, _ = data.partition(b"\n")
    body = memoryview(data)[len(line) + 1 :]
    try:
        head = unseal(b"index", line)
        mac, note = head.pop("mac"), head["note"]
        kinds = {"digest": str, "bytes": int, "rejected": int}
        if head["name"] != name or head["body"] != bytes_digest(body):
            raise ValueError("it belongs to another shard, or has changed")
        if not all(type(note.get(key)) is kind for key, kind in kinds.items()):
            raise TypeError("a field is missing")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the index of {name} is damaged ({error})") from error
    return ShardIndex(name, note, body, is_keyed(canonical(head), mac))


def index_body(data: Any) -> pa.Buffer:
    """The Arrow file of an index, from the bytes of a shard."""
    batch, _ = _opened(data)
    lengths = np.diff(numpy_of(batch.column("input_ids").offsets)).astype(np.uint32)
    names = [name for name in batch.schema.names if name != "input_ids"]
    arrays = [batch.column(name) for name in names]
    slim = pa.RecordBatch.from_arrays([array_of(lengths), *arrays], names=["length", *names])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, slim.schema.with_metadata(batch.schema.metadata)) as writer:
        writer.write_batch(slim.replace_schema_metadata(batch.schema.metadata))
    return sink.getvalue()


def _opened(data: Any) -> tuple[pa.RecordBatch, Any]:
    reader = pa.ipc.open_file(pa.py_buffer(data))
    return reader.get_batch(0), orjson.loads(reader.schema.metadata[META])
