"""Every kind of file gives the same rows and, for text, the same slices."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from penstock.errors import SourceError
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.reading import fetch_data, read_rows
from penstock.prepare.sources.source_set import SourceSet

ROWS = [
    {
        "id": n,
        "messages": [
            {"role": "user", "content": f'question {n} äöü\u2028 "[{{' + "?" * (n % 700)},
            {"role": "assistant", "content": None if n % 3 else "yes", "note": "kept" if n % 2 else None},
        ],
        "tools": None,
    }
    for n in range(8000)
]
LINES = [orjson.dumps(row) for row in ROWS]


def without_nulls(row: dict) -> dict:
    """The row as read from Arrow structs: without null fields of messages."""
    messages = [{key: value for key, value in m.items() if value is not None} for m in row["messages"]]
    return row | {"messages": messages}


def read_all(sources: SourceSet) -> list[bytes]:
    rows = []
    for part in sources.slices():
        kept = part.without_data()
        assert type(kept).from_json(json.loads(json.dumps(kept.to_json()))) == kept
        assert (part.data is not None) == part.kind.is_streamed
        read = read_rows(part, sources.files[part.file].path, data=part.data)
        assert len(read.rows) == len(read.lines) == part.rows
        rows += read.rows
    return rows


def write_text(folder: Path) -> dict[FileKind, Path]:
    lines, array = b"\n".join(LINES), b"[" + b",\n ".join(LINES) + b"]"
    files = {
        FileKind.JSONL: ("a.jsonl", lines),
        FileKind.JSONL_GZ: ("a.jsonl.gz", gzip.compress(lines[:70_000], 1) + gzip.compress(lines[70_000:], 1)),
        FileKind.JSONL_ZST: ("a.jsonl.zst", zstandard.compress(lines[:70_000]) + zstandard.compress(lines[70_000:])),
        FileKind.JSON_ARRAY: ("a.json", array),
        FileKind.JSON_ARRAY_GZ: ("a.json.gz", gzip.compress(array, 1)),
        FileKind.JSON_ARRAY_ZST: ("a.json.zst", zstandard.compress(array)),
    }
    for name, data in files.values():
        (folder / name).write_bytes(data)
    return {kind: folder / name for kind, (name, _) in files.items()}


def test_text_kinds_give_equal_slices(tmp_path: Path) -> None:
    paths = write_text(tmp_path)
    digests = [part.digest for part in discover([paths[FileKind.JSONL]]).slices()]
    assert len(digests) > 1
    for kind, path in paths.items():
        sources = discover([path])
        assert sources.files[0].kind is kind
        assert sources.peek(3) == LINES[:3]
        assert [part.digest for part in sources.slices()] == digests
        assert read_all(sources) == LINES


def test_data_of_a_slice_can_be_fetched_again(tmp_path: Path) -> None:
    paths = write_text(tmp_path)
    for kind in (FileKind.JSONL, FileKind.JSONL_ZST, FileKind.JSON_ARRAY):
        sources = discover([paths[kind]], split="train[100:-200]")
        for part in sources.slices():
            assert fetch_data(part.without_data(), sources.files[0]) == part.data


@pytest.mark.parametrize("group_rows", [50, 3000, 8000])
def test_parquet_rows_equal_json_rows(tmp_path: Path, group_rows: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=group_rows)
    sources = discover([path])
    assert [orjson.loads(row) for row in sources.peek(3)] == [without_nulls(row) for row in ROWS[:3]]
    assert [orjson.loads(row) for row in read_all(sources)] == [without_nulls(row) for row in ROWS]
    first = next(sources.slices())
    read = read_rows(first, path)
    assert read.nulls_dropped == sum(
        value is None for row in ROWS[: first.rows] for m in row["messages"] for value in ({"note": None} | m).values()
    )


@pytest.mark.parametrize("batch_rows", [50, 3000, 8000])
@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_rows_equal_json_rows(tmp_path: Path, batch_rows: int, new) -> None:
    path, table = tmp_path / "a.arrow", pa.Table.from_pylist(ROWS)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    sources = discover([path])
    assert [orjson.loads(row) for row in sources.peek(60)] == [without_nulls(row) for row in ROWS[:60]]
    assert [orjson.loads(row) for row in read_all(sources)] == [without_nulls(row) for row in ROWS]


def test_large_units_are_divided_into_row_ranges(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{n} " + chr(97 + n % 26) * 3000 for n in range(8000)]
    table = pa.table({"text": texts})
    pq.write_table(table, path, row_group_size=8000, use_dictionary=False)
    arrow = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(arrow), table.schema) as writer:
        writer.write_table(table, max_chunksize=8000)
    for source in (path, arrow):
        sources = discover([source])
        slices = list(sources.slices())
        assert len(slices) == 7 and {part.units for part in slices} == {1}
        assert len({part.digest for part in slices}) == 7
        assert [orjson.loads(row)["text"] for row in read_all(sources)] == texts
        backwards = [read_rows(part, source) for part in reversed(slices)]  # out of order: re-read from the start
        assert [row for part in reversed(backwards) for row in part.rows] == read_all(sources)


def test_equal_units_have_equal_digests_at_any_position(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{n} " + "x" * 2000 for n in range(4000)]})
    for name, tables in (("one", [table]), ("two", [table.slice(0, 500), table])):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            for each in tables:
                writer.write_table(each, row_group_size=500)
    one, two = ({part.digest for part in discover([tmp_path / f"{n}.parquet"]).slices()} for n in ("one", "two"))
    assert len(one - two) <= 1 and len(two - one) <= 2


def test_json_columns_are_inserted_verbatim(tmp_path: Path) -> None:
    values = ['{"a":null,"n":12345678901234567890123,"f":1.0}', None, "[1e400]", '"text"']
    storage = pa.array(values, pa.string())
    table = pa.table({"tools": pa.ExtensionArray.from_storage(pa.json_(), storage)})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        rows = read_all(discover([tmp_path / name]))
        assert rows == [b'{"tools":%s}' % (value or "null").encode() for value in values]


def test_values_without_a_json_type(tmp_path: Path) -> None:
    table = pa.table(
        {
            "bytes": [b"text", b"\xff"],
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "fixed": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
            "words": pa.array(["a", None]).dictionary_encode(),
            "structs": [{"inner": {"x": None}}, None],
            "empty": pa.array([None, None]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = (orjson.loads(row) for row in read_all(discover([tmp_path / "a.parquet"])))
    assert first["bytes"] == "text" and second["bytes"] == "/w=="
    assert first["map"] == {"k": 1} and second["map"] is None
    assert first["fixed"] == [1, 2] and second["fixed"] is None
    assert first["words"] == "a" and first["structs"] == {"inner": {}} and second["structs"] is None
    assert first["empty"] is None


def test_rows_over_the_limit_in_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": ["a", "b" * 5000, "c"]}), tmp_path / "a.parquet")
    part = next(discover([tmp_path / "a.parquet"]).slices(max_row_bytes=100))
    read = read_rows(part, tmp_path / "a.parquet", max_row_bytes=100)
    assert read.rows == [b'{"t":"a"}', b"", b'{"t":"c"}'] and read.oversize == {1: 5001} and read.lines == [1, 2, 3]


def test_a_changed_parquet_or_arrow_file_is_detected(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        path = tmp_path / name
        for text in ("before", "after!"):
            table = pa.table({"t": [text] * 10})
            if name == "a.parquet":
                pq.write_table(table, path)
            else:
                with pa.ipc.new_stream(str(path), table.schema) as writer:
                    writer.write_table(table)
            if text == "before":
                part = next(discover([path]).slices())
        with pytest.raises(SourceError, match="changed while it was read"):
            read_rows(part, path)


def test_pretty_printed_elements_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n  {\n    "n": 1.10,\n    "big": 123456789012345678901\n  },\n  {"m": []}\n]\n')
    rows = read_all(discover([path]))
    assert rows[1] == b'{"m": []}'
    assert b"\n" not in rows[0] and b"1.10," in rows[0] and b"123456789012345678901" in rows[0]
    assert json.loads(rows[0]) == {"n": 1.1, "big": 123456789012345678901}
