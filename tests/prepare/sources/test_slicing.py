"""Properties of slicing: every row once and in order, boundaries and digests from content alone."""

from __future__ import annotations

import gzip
import random
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.reading import plan_slices, read_rows
from penstock.prepare.sources.slices import SLICING_VERSION, Slice, SlicePlan, SliceSizes, SourceFile, identity
from penstock.prepare.sources.text_rows import RowRun, element_runs, line_runs
from penstock.prepare.sources.text_slices import cut_text

pytestmark = pytest.mark.usefixtures("inner_loops")

TINY = SliceSizes(smallest=20, mean=60, largest=120)
NAMED = Path("rows.jsonl")

line = st.one_of(
    st.sampled_from([b"", b" ", b"\t ", b"\r", b"{}", b'  {"a":1}', b"x\r", b" " * 300]),
    st.integers(2, 200).map(lambda n: b'{"k":"' + b"v" * n + b'"}'),
    st.binary(min_size=1, max_size=30).map(lambda text: text.replace(b"\n", b"")),
)


def pieces(text: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    """Split the text into chunks at the given offsets."""
    start = 0
    for cut in [*sorted({c % (len(text) + 1) for c in cuts}), len(text)]:
        if cut > start:
            yield text[start:cut]
            start = cut


def cut_lines(text: bytes, cuts: Iterable[int], keep_data: bool = False, limit: int = 10_000) -> list[Slice]:
    kind = FileKind.JSONL_GZ if keep_data else FileKind.JSONL
    file = SourceFile(0, NAMED, kind, "rows.jsonl")
    runs = line_runs(pieces(text, cuts), TINY.largest, limit)
    return list(cut_text(file, runs, keep_data=keep_data, sizes=TINY))


def rows_of(text: bytes) -> list[tuple[int, bytes]]:
    """Line numbers and rows, computed the slow and obvious way."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = [(number, text.removesuffix(b"\r")) for number, text in enumerate(lines, start=1)]
    return [(number, row) for number, row in numbered if row.strip(b" \t\r")]


def digest(rows: Iterable[bytes]) -> str:
    return "b3-" + blake3(b"\n".join(rows)).hexdigest()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(line, max_size=40),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_lines(tmp_path_factory: pytest.TempPathFactory, lines, cuts, line_end, bom, ends) -> None:
    text = b"\xef\xbb\xbf" * bom + line_end.join(lines) + line_end * ends
    expected = rows_of(text)
    found = cut_lines(text, cuts)
    assert found == cut_lines(text, []), "where chunks end must not matter"

    path = tmp_path_factory.getbasetemp() / "law.jsonl"
    path.write_bytes(text)
    read = [read_rows(part, path) for part in found]
    assert [(n, row) for part in read for n, row in zip(part.lines, part.rows, strict=True)] == expected
    position = 0
    for part, rows in zip(found, read, strict=True):
        assert part.first_row == position and part.rows == len(rows.rows) > 0
        assert part.digest == digest(rows.rows)
        assert part.size == sum(len(row) + 1 for row in rows.rows)
        assert part.size <= TINY.largest or part.rows == 1
        position += part.rows

    kept = cut_lines(text, cuts, keep_data=True)
    assert [part.digest for part in kept] == [part.digest for part in found]
    streamed = [read_rows(part, path, data=part.data) for part in kept]
    assert streamed == read


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(2, 200).map(lambda n: b'{"k\\"]":"' + b"\\\\" * (n % 5) + b"[{" * n + b'"}'), max_size=20),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from([b",", b" ,\n ", b",\r\n"]),
)
def test_array_elements_are_cut_like_lines(elements, cuts, comma) -> None:
    text = b" [ " + comma.join(elements) + b"]\n"
    file = SourceFile(0, Path("rows.json"), FileKind.JSON_ARRAY, "rows.json")
    runs = element_runs(pieces(text, cuts), "rows.json", TINY.largest, 10_000)
    found = list(cut_text(file, runs, keep_data=True, sizes=TINY))
    as_lines = cut_lines(b"\n".join(elements), [], keep_data=True)
    assert [(p.digest, p.rows, p.first_row, p.size) for p in found] == [
        (p.digest, p.rows, p.first_row, p.size) for p in as_lines
    ]
    rows = [read_rows(part, NAMED, data=part.data) for part in found]
    assert [row for part in rows for row in part.rows] == elements
    assert [n for part in rows for n in part.lines] == list(range(1, len(elements) + 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 300), st.integers(1, 500))
def test_rows_over_the_limit_are_counted_and_digested_but_not_kept(lengths, limit, chunk) -> None:
    rows = [b"r" * length for length in lengths]
    text = b"\n".join(rows)
    cuts = range(chunk, len(text), chunk)
    found = cut_lines(text, cuts, keep_data=True, limit=limit)
    assert [p.digest for p in found] == [p.digest for p in cut_lines(text, [], keep_data=True)]
    position = 0
    for part in found:
        read = read_rows(part, NAMED, data=part.data, max_row_bytes=limit)
        for index, row in enumerate(read.rows):
            whole = rows[position + index]
            assert row == (whole if len(whole) <= limit else b"")
            assert read.oversize.get(index) == (None if len(whole) <= limit else len(whole))
        position += part.rows
    assert position == len(rows)


def numbered_rows(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [b'{"n":%d,"text":"%s"}' % (n, rng.randbytes(rng.randint(50, 350)).hex().encode()) for n in range(count)]


def digests(path: Path, rows: list[bytes]) -> list[str]:
    path.write_bytes(b"\n".join(rows) + b"\n")
    return [part.digest for part in discover([path]).slices()]


def test_edits_change_only_neighbouring_slices(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = numbered_rows(100_000)
    before = digests(path, rows)
    assert 5 < len(before) < 40, "about 4 MB a slice"

    for place in (0, 50_000, 99_999):
        edited = digests(path, [*rows[:place], b'{"n":"edited"}', *rows[place + 1 :]])
        assert len(set(edited) - set(before)) <= 2
        inserted = digests(path, [*rows[:place], b'{"n":"inserted"}', *rows[place:]])
        assert len(set(inserted) - set(before)) <= 2
        removed = digests(path, rows[:place] + rows[place + 1 :])
        assert len(set(removed) - set(before)) <= 2

    appended = digests(path, rows + numbered_rows(1_000, seed=1))
    assert appended[: len(before) - 1] == before[:-1]
    assert len(appended) <= len(before) + 1


def test_slices_depend_on_rows_alone(tmp_path: Path) -> None:
    rows = numbered_rows(30_000)
    whole = digests(tmp_path / "a.jsonl", rows)
    path = tmp_path / "b.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + b"\r\n \r\n".join(rows))  # BOM, CRLF, blank lines, no final newline
    found = list(discover([path]).slices())
    assert [part.digest for part in found] == whole
    last = read_rows(found[-1], path)
    assert last.lines[-1] == 2 * len(rows) and last.rows[-1] == rows[-1]


@pytest.mark.parametrize("name", ["big.jsonl", "big.jsonl.gz", "big.jsonl.zst", "big.json"])
def test_a_huge_row_is_not_read_into_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    begin, comma, end = (b"[", b",", b"]") if name == "big.json" else (b"", b"", b"")
    row = b'{"b":"' + b"x" * 150_000_000 + b'"}'
    text = begin + b'{"a":1}' + comma + b"\n" + row + comma + b'\n{"a":2}' + end
    packed = {".gz": lambda: gzip.compress(text, 1), ".zst": lambda: zstandard.compress(text)}
    path.write_bytes(packed.get(path.suffix, lambda: text)())
    tracemalloc.start()
    found = list(discover([path]).slices(max_row_bytes=1_000_000))
    read = [read_rows(part, path, data=part.data, max_row_bytes=1_000_000) for part in found]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40_000_000
    assert [part.rows for part in found] == [1, 1, 1]
    assert read[1].rows == [b""] and read[1].oversize == {0: 150_000_008} and read[1].lines == [2]
    assert read[2].rows == [b'{"a":2}'] and read[2].lines == [3]


def test_a_row_between_slice_and_row_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    row = b'{"a":"' + b"x" * 20_000_000 + b'"}'
    path.write_bytes(b"{}\r\n" + row + b"\r\n{}\r\n")
    found = list(discover([path]).slices())
    assert [part.rows for part in found] == [1, 1, 1]
    assert read_rows(found[1], path).rows == [row]
    assert found[1].digest == digest([row])


def test_plans_and_slices_round_trip_through_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    digests(path, numbered_rows(20_000))
    sources = discover([path])
    made = plan_slices(sources.files[0])
    assert SlicePlan.from_json(made.to_json()) == made
    assert list(made.slices) == list(sources.slices()) == list(sources.slices(known={0: made.slices}))
    assert made.holds_for(identity(path)) and made.rows == 20_000
    path.write_bytes(b"{}\n")
    assert not made.holds_for(identity(path))


def test_a_changed_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    digests(path, numbered_rows(20_000))
    slices = discover([path]).slices()
    first = next(slices)
    with path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(SourceError, match="changed while it was read"):
        list(slices)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"!")
    with pytest.raises(SourceError, match="changed while it was read"):
        read_rows(first, path)


def test_cuts_and_digests_are_pinned(tmp_path: Path) -> None:
    """If this changes, all caches are invalidated: bump SLICING_VERSION and add a changelog entry."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(b'{"n":%d,"text":"%s"}\n' % (n, b"%d" % (n * n) * 40) for n in range(50_000)))
    found = list(discover([path]).slices())
    assert SLICING_VERSION == 3
    assert [part.rows for part in found] == [4006, 3279, 5388, 7790, 7119, 10333, 8346, 2621, 1118]
    assert found[0].digest == "b3-1bffd34e952f91ccdf71201490b6ce4387ac6c6da8a00981964ee3bdfd7c2e85"


def test_lines_of_one_character_are_rows() -> None:
    """They are rejected later, with their line; they must not vanish beside blank lines."""
    runs = list(line_runs([b'{"a": 1}\r\n\r\n1\r\n \n{}\n'], TINY.largest, 100))
    assert [row for run in runs if isinstance(run, RowRun) for row in run.rows] == [b'{"a": 1}', b"1", b"{}"]
