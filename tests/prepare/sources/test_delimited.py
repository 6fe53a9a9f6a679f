"""CSV and TSV: rows come out as written, whatever the quoting, and what is wrong is named."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.text_rows import cell_runs

CELLS = st.text(st.sampled_from("ab\",;\t\r\n é😀'{"), max_size=12)


def rows_of(text: bytes, delimiter: str = ",", chunk: int = 7) -> list[object]:
    chunks = (text[i : i + chunk] for i in range(0, len(text), chunk))
    return [json.loads(row) for run in cell_runs(chunks, "x.csv", delimiter, 10_000) for row in run.rows]


@given(st.lists(st.tuples(CELLS, CELLS), max_size=8), st.sampled_from([",", "\t"]), st.integers(1, 50))
def test_what_was_written_is_read(rows: list[tuple[str, str]], delimiter: str, chunk: int) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([("prompt", "completion"), *rows])
    expected = [{"prompt": a or None, "completion": b or None} for a, b in rows]
    assert rows_of(out.getvalue().encode(), delimiter, chunk) == expected


def test_messages_in_a_cell_are_messages() -> None:
    cell = '[{"role": "user",\n "content": "a"}]'
    assert rows_of(b'messages,note\n"' + cell.replace('"', '""').encode() + b'",[1]\n') == [
        {"messages": [{"role": "user", "content": "a"}], "note": "[1]"}
    ]


def test_a_row_of_another_width_is_refused_where_rows_are_read() -> None:
    assert rows_of(b"a,b\n1,2,3\n\n4,5\n") == [["1", "2", "3"], {"a": "4", "b": "5"}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'a,b\n1,"2\n', "line 2, after row 0: .*quote"),
        (b"a,a\n1,2\n", "names 'a' twice"),
        (b"a,,c\n1,2,3\n", "empty name"),
        (b"a;b\n1;2\n", "one name"),
        (b"a,b\n1,\xff\n", "line 2: byte 2 .*UTF-8"),
    ],
)
def test_what_is_wrong_is_named(text: bytes, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        rows_of(text)


def test_kinds_by_name(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbfinstruction\toutput\r\na\tb\r\n"
    (tmp_path / "x.tsv").write_bytes(data)
    (tmp_path / "y.tsv.gz").write_bytes(gzip.compress(data))
    plain, packed = (discover(tmp_path / name) for name in ("x.tsv", "y.tsv.gz"))
    assert [plain.files[0].kind, packed.files[0].kind] == [FileKind.TSV, FileKind.TSV_GZ]
    assert [s.digest for s in plain.slices()] == [s.digest for s in packed.slices()]
    assert plain.peek() == [b'{"instruction":"a","output":"b"}']
