"""The index of a shard: the same columns without tokens, its own digests, and the key of its writer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.digests import bytes_digest
from penstock.errors import CorruptError
from penstock.prepare.chat.conversation import Part, Role
from penstock.store.shard import ShardMeta, encode_index, encode_shard, parse_index, read_shard
from penstock.store.trust import user_key
from tests.support.memory_dataset import MemoryDataset, Piece

NAME = "b3-" + "0a" * 32
PIECES = (Piece(0, Role.USER, Part.BODY, (1, 2, 3)), Piece(1, Role.ASSISTANT, Part.BODY, (4, 5)))
META = ShardMeta({"rows": 3, "kept": 3}, [], {"rows": [0]}, {"tools_dropped": [0, 1]})


@pytest.fixture(scope="module")
def shard() -> pa.Buffer:
    columns = MemoryDataset.of([PIECES, PIECES[:1], PIECES]).shards.columns(0)
    return encode_shard(columns, META)


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE_KEY", "ours")
        user_key.cache_clear()
        yield
    user_key.cache_clear()


def index_of(shard: pa.Buffer) -> bytes:
    return encode_index(NAME, shard, {"digest": bytes_digest(shard), "bytes": shard.size, "rejected": 0})


def test_it_has_all_but_the_tokens(shard: pa.Buffer, tmp_path: Path) -> None:
    path = tmp_path / "shard.arrow"
    path.write_bytes(shard)
    whole, meta = read_shard(path)
    index = parse_index(NAME, index_of(shard))
    columns, same = index.read()
    assert same == meta
    assert not len(columns.ids)
    for name, values in whole._asdict().items():
        if name != "ids":
            assert np.array_equal(getattr(columns, name), values), name
    assert columns.tokens == whole.tokens
    assert index.describes(shard)


def test_its_bytes(shard: pa.Buffer) -> None:
    """As docs/internals/format.md specifies them."""
    line, _, body = index_of(shard).partition(b"\n")
    head = orjson.loads(line)
    assert list(head) == ["body", "mac", "name", "note", "seal"]
    assert (head["name"], head["body"], head["note"]["digest"]) == (NAME, bytes_digest(body), bytes_digest(shard))
    batch = pa.ipc.open_file(body).get_batch(0)
    ours = pa.ipc.open_file(shard).get_batch(0)
    assert batch.schema.names == ["length", *(name for name in ours.schema.names if name != "input_ids")]
    assert batch.column("length").to_pylist() == [5, 3, 5]
    assert batch.schema.metadata == ours.schema.metadata


def test_keys_tell_writers_apart(shard: pa.Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = index_of(shard)
    assert parse_index(NAME, ours).is_own
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", "another")
    user_key.cache_clear()
    assert not parse_index(NAME, ours).is_own
    theirs = index_of(shard)
    monkeypatch.undo()
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", "ours")
    user_key.cache_clear()
    assert not parse_index(NAME, theirs).is_own


def test_a_key_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CACHE_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    user_key.cache_clear()
    made = user_key()
    user_key.cache_clear()
    assert user_key() == made
    assert (tmp_path / "penstock" / "cache.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "penstock" / "cache.key").write_bytes(b"short")
    user_key.cache_clear()
    assert len(user_key()) == 32
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", "ours")
    user_key.cache_clear()


@given(st.data())
def test_a_changed_byte_is_noticed(shard: pa.Buffer, data: st.DataObject) -> None:
    whole = index_of(shard)
    place = data.draw(st.integers(0, len(whole) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    with pytest.raises(CorruptError, match=NAME):
        parse_index(NAME, flipped)
    with pytest.raises(CorruptError, match=NAME):
        parse_index(NAME, whole[:place])
    with pytest.raises(CorruptError, match="another shard"):
        parse_index(NAME.replace("0a", "0b"), whole)
