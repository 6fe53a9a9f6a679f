"""A long run of small files has the slices of one file with their rows, and each row keeps its file and line."""

from __future__ import annotations

import gzip
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.prepare.sources.chunks import Compression, chunks
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.joined import RUN_FILES, JoinedPath
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.reading import KeepData, fetch_data, scan
from penstock.prepare.sources.slices import SLICE_SIZES, Slice, SourceFile
from penstock.prepare.sources.text_rows import RowRun, line_runs

LINES = st.sampled_from([b'{"a": 1}', b'{"b": "\xc3\xa4"}', b"not json", b"", b" ", b"\t", b'  {"c": 2}'])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
TEXTS = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]), st.lists(st.tuples(LINES, ENDS), max_size=5), st.booleans()
).map(lambda parts: parts[0] + b"".join(chain.from_iterable(parts[1]))[: None if parts[2] else -1])


def rows_of(text: bytes) -> list[tuple[int, bytes]]:
    """The rows of a file with their line numbers, as the reader of one file has them."""
    found, lines = [], 0
    for run in line_runs([text] if text else [], 100, 100):
        assert isinstance(run, RowRun)
        found += [(lines + run.line_of(index) + 1, row) for index, row in enumerate(run.rows)]
        lines += run.lines
    return found


@given(texts=st.lists(TEXTS, min_size=1, max_size=6), size=st.integers(1, 40))
def test_rows_and_locations_are_those_of_the_files(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], size: int
) -> None:
    folder = tmp_path_factory.mktemp("members")
    paths = [folder / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    joined = JoinedPath(paths, [path.name for path in paths])
    stream = chunks(joined, joined.name, Compression.NONE, size)
    runs = [run for run in line_runs(stream, 100, 100) if isinstance(run, RowRun)]
    expected = [(path.name, line, row) for path, text in zip(paths, texts, strict=True) for line, row in rows_of(text)]
    assert [row for run in runs for row in run.rows] == [row for _, _, row in expected]
    assert joined.rows == JoinedPath(paths, joined.names).rows == tuple(len(rows_of(text)) for text in texts)
    assert joined.locations(range(len(expected))) == [f"{name}:{line}" for name, line, _ in expected]


def write(folder: Path, texts: list[bytes], suffix: str = ".jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}{suffix}").write_bytes(text)
    return folder


def row(number: int, size: int = 20) -> bytes:
    return b'{"n": %d, "x": "%s"}\n' % (number, b"x" * size)


def test_slices_are_those_of_the_files_in_one(tmp_path: Path) -> None:
    texts = [row(number, 100_000) for number in range(RUN_FILES)]
    many = discover(write(tmp_path / "many", texts))
    (tmp_path / "one.jsonl").write_bytes(b"".join(texts))
    one = discover(tmp_path / "one.jsonl")
    assert [file.kind for file in many.files] == [FileKind.JOINED]
    found, expected = list(many.slices()), list(one.slices())
    assert len(expected) > 1
    places = [[(part.first_row, part.rows, part.size, part.digest) for part in parts] for parts in (found, expected)]
    assert places[0] == places[1]
    last = found[-1].without_data()
    again = fetch_data(last, many.files[0])
    assert again is not None
    assert again.rows == texts_of(many.files[0], last)
    assert many.peek(3) == one.peek(3)


def texts_of(file: SourceFile, part: Slice) -> list[bytes]:
    (data,) = (found.data for found in scan(file) if found.digest == part.digest)
    assert data is not None
    return data.rows


def test_only_long_runs_of_small_files_are_joined(tmp_path: Path) -> None:
    small, large = [row(number) for number in range(RUN_FILES)], row(0, SLICE_SIZES.smallest)

    def kinds(name: str, texts: list[bytes], suffix: str = ".jsonl") -> list[tuple[FileKind, int]]:
        files = discover(write(tmp_path / name, texts, suffix)).files
        assert [file.ordinal for file in files] == list(range(len(files)))
        assert all(len(list(scan(file, keep=KeepData.NONE))) >= 1 for file in files)
        return [(file.kind, len(getattr(file.path, "members", "1"))) for file in files]

    assert kinds("few", small[1:]) == [(FileKind.JSONL, 1)] * (RUN_FILES - 1)
    assert kinds("large", [*small, large, *small[1:]]) == [
        (FileKind.JOINED, RUN_FILES), *[(FileKind.JSONL, 1)] * RUN_FILES
    ]  # fmt: skip
    assert kinds("packed", [gzip.compress(text) for text in small], ".jsonl.gz") == [(FileKind.JSONL_GZ, 1)] * RUN_FILES
    folder = write(tmp_path / "splits", small)
    for path in list(folder.iterdir()):
        path.rename(folder / f"{'test' if path.name < '0010' else 'train'}-{path.name}")
    assert len(discover(folder, split="train+test").files) == RUN_FILES


def test_a_member_that_is_gone_or_changed_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", [row(number) for number in range(RUN_FILES)])
    (file,) = discover(folder).files
    assert file.name == f"{folder}/0000.jsonl … 0063.jsonl (64 files)"
    slices = scan(file)
    (folder / "0003.jsonl").unlink()
    with pytest.raises(SourceError, match=r"0003\.jsonl: can't be read"):
        list(slices)
    (folder / "0003.jsonl").write_bytes(row(3))

    class Growing(JoinedPath):
        def texts(self, most: int | None = None):
            yield from super().texts(most)
            (folder / "0003.jsonl").write_bytes(row(3) + row(4))

    assert isinstance(file.path, JoinedPath)
    growing = Growing(file.path.members, file.path.names)
    with pytest.raises(SourceError, match=r"\(64 files\): changed while it was read"):
        list(scan(SourceFile(0, growing, FileKind.JOINED, growing.name)))
