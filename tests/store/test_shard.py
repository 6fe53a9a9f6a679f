"""Shard files: bytes, round trip, and hostile files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import CorruptError, FormatError
from penstock.prepare.encode.columns import Columns
from penstock.store.shard import ShardMeta, encode_shard, read_shard


def columns(*, weights: bool = False, sides: bool = False) -> Columns:
    return Columns(
        ids=np.array([5, 6, 7, 8, 9], np.uint16),
        id_offsets=np.array([0, 3, 5], np.int64),
        segment_offsets=np.array([0, 2, 3], np.int64),
        segment_ends=np.array([1, 3, 2], np.uint32),
        segment_roles=np.array([2, 3, 3], np.uint8),
        segment_parts=np.array([2, 2, 2], np.uint8),
        segment_messages=np.array([0, 1, 0], np.int32),
        segment_weights=np.array([np.nan, 0.5, 1], np.float32) if weights else None,
        rows=np.array([0, 4], np.uint32),
        row_hashes=np.array([2**63, 1], np.uint64),
        sides=np.array([0, 1], np.uint8) if sides else None,
    )


META = ShardMeta({"rows": 5}, [{"row": 1, "kind": "x"}], {"rows": [0]})


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("sides", [False, True])
def test_round_trip(tmp_path: Path, weights: bool, sides: bool) -> None:
    path = tmp_path / "a.arrow"
    given = columns(weights=weights, sides=sides)
    path.write_bytes(encode_shard(given, META))
    found, meta = read_shard(path)
    assert meta == META
    for name in Columns._fields:
        before, after = getattr(given, name), getattr(found, name)
        if before is None:
            assert after is None
        else:
            np.testing.assert_array_equal(before, after)
    assert found.ids.dtype == np.uint16


def test_a_shard_is_a_plain_arrow_file(tmp_path: Path) -> None:
    data = encode_shard(columns(), META)
    table = pa.ipc.open_file(data).read_all()
    assert table.column("input_ids").to_pylist() == [[5, 6, 7], [8, 9]]
    assert encode_shard(columns(), META).equals(data)


@pytest.mark.parametrize("keep", [0, 1, 7, 100, -1])
def test_a_truncated_shard_raises(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.arrow"
    data = encode_shard(columns(), META).to_pybytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CorruptError, match="not a complete shard"):
        read_shard(path)


def test_a_missing_shard_raises(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="the shard is missing"):
        read_shard(tmp_path / "b.arrow")


def test_another_arrow_file_is_not_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"x": [1]})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptError):
        read_shard(path)


@pytest.mark.parametrize("column", ["row", "input_ids"])
def test_null_values_raise(tmp_path: Path, column: str) -> None:
    path = tmp_path / "a.arrow"
    whole = pa.ipc.open_file(encode_shard(columns(), META)).read_all()
    kind = whole.schema.field(column).type
    holes = pa.array([[None], [1]] if column == "input_ids" else [None, 1], kind)
    table = whole.set_column(whole.schema.get_field_index(column), column, holes).replace_schema_metadata(
        whole.schema.metadata
    )
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptError, match="values are missing"):
        read_shard(path)


def test_opening_a_shard_does_not_import_pandas(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(encode_shard(columns(), META))
    program = (
        "import sys; from pathlib import Path; from penstock.store.shard import read_shard; "
        "read_shard(Path(sys.argv[1])); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


def test_a_newer_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.arrow"
    monkeypatch.setattr("penstock.store.shard.FORMAT_VERSION", 99)
    path.write_bytes(encode_shard(columns(), META))
    monkeypatch.undo()
    with pytest.raises(FormatError, match="format version 99, but this Penstock reads version 1"):
        read_shard(path)
