"""Split strings behave as in `datasets`, and share slices with the full data."""

from __future__ import annotations

import gzip
from pathlib import Path

import orjson
import pytest
from datasets import ReadInstruction
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SourceError
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.reading import read_rows
from penstock.prepare.sources.source_set import SourceSet, parse_split

bound = st.none() | st.integers(-130, 130)


@given(bound, bound, st.booleans(), st.booleans(), st.integers(1, 120))
def test_bounds_match_datasets(first, stop, first_percent, stop_percent, total) -> None:
    def shown(value: int | None, percent: bool) -> str:
        return "" if value is None else f"{value}{'%' * percent}"

    text = f"train[{shown(first, first_percent)}:{shown(stop, stop_percent)}]"
    try:
        (theirs,) = ReadInstruction.from_spec(text).to_absolute({"train": total})
    except (ValueError, AssertionError):
        with pytest.raises(SourceError):
            parse_split(text)
        return
    (part,) = parse_split(text).parts
    assert part.bounds(total) == (theirs.from_, theirs.to)
    if not part.needs_total:
        begin, end = part.bounds(None)
        assert (min(begin, total), total if end is None else min(end, total)) == (theirs.from_, theirs.to)


@pytest.mark.parametrize("text", ["", "train[", "train[:10", "train[1]", "train[a:b]", "train[::2]", "train+", "[:5]"])
def test_invalid_splits_raise(text: str) -> None:
    with pytest.raises(SourceError, match=r"invalid split .* at .* Write it like train"):
        parse_split(text)


def test_percentages_over_100_raise() -> None:
    with pytest.raises(SourceError, match="beyond 100"):
        parse_split("train[:120%]")


def rows(count: int, name: str) -> list[bytes]:
    return [orjson.dumps({"name": name, "n": n, "text": f"{n % 7919}" * 200}) for n in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splits")
    (folder / "a.jsonl").write_bytes(b"\n".join(rows(9000, "a")))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n\n".join(rows(9000, "b")), 1))
    return folder


def read(sources: SourceSet) -> list[bytes]:
    return [
        row for part in sources.slices() for row in read_rows(part, sources.files[part.file].path, data=part.data).rows
    ]


@pytest.mark.parametrize(
    "text",
    [
        "train",
        "train[:1000]",
        "train[17950:]",
        "train[10%:20%]",
        "train[:50]+train[-50:]",
        "train[8990:9010]",
        "train[-9001:-8999]",
        "train[45%:55%]",
        "train[5:5]+train[:1]",
        "train[:100000]",
    ],
)
def test_rows_of_a_split(folder: Path, text: str) -> None:
    everything = rows(9000, "a") + rows(9000, "b")
    theirs = ReadInstruction.from_spec(text).to_absolute({"train": 18_000})
    expected = [row for part in theirs for row in everything[part.from_ : part.to]]
    found = read(discover([folder / "a.jsonl", folder / "b.jsonl.gz"], split=text))
    assert found == expected


def test_a_split_shares_slices_with_the_full_data(folder: Path) -> None:
    files = [folder / "a.jsonl", folder / "b.jsonl.gz"]
    whole = {part.digest for part in discover(files).slices()}
    some = [part.digest for part in discover(files, split="train[100:-100]").slices()]
    assert len([digest for digest in some if digest not in whole]) == 2
    assert len(some) == len(whole) >= 4


def test_a_trimmed_slice_keeps_its_line_numbers(folder: Path) -> None:
    (part,) = discover([folder / "b.jsonl.gz"], split="train[10:12]").slices()
    found = read_rows(part, folder / "b.jsonl.gz", data=part.data)
    assert found.lines == [21, 23] and found.rows == rows(12, "b")[10:]
    (part,) = discover([folder / "a.jsonl"], split="train[10:12]").slices()
    found = read_rows(part, folder / "a.jsonl")
    assert found.lines == [11, 12] and found.rows == rows(12, "a")[10:]


def test_a_split_without_rows(folder: Path) -> None:
    with pytest.raises(SourceError, match=r"split 'train\[5:5\]' selects no rows"):
        list(discover([folder / "a.jsonl"], split="train[5:5]").slices())


def test_an_unknown_split_lists_the_available_ones(folder: Path) -> None:
    with pytest.raises(SourceError, match="no split 'test'; it has train"):
        discover([folder / "a.jsonl"], split="test")
