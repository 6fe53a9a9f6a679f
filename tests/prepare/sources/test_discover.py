"""Resolving sources, and the errors for those that can't be read."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from penstock.errors import SourceError, UsageError
from penstock.prepare.sources.discover import HubDataset, discover
from penstock.prepare.sources.folders import read_folder
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.reading import read_rows
from penstock.prepare.sources.remote import path_from_json, path_to_json, recorded_path, text_of_path
from penstock.prepare.sources.slices import Slice
from penstock.prepare.sources.source_set import SourceSet

ROW = b'{"text":"hello"}\n'


def write(path: Path, data: bytes = ROW) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def texts(sources: SourceSet) -> list[bytes]:
    return [
        row for part in sources.slices() for row in read_rows(part, sources.files[part.file].path, data=part.data).rows
    ]


def names(sources: SourceSet) -> list[str]:
    return [file.path.name for file in sources.files]


def test_files_globs_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl"):
        write(tmp_path / name)
    assert names(discover([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])) == ["b.jsonl", "a.jsonl"]
    assert names(discover([str(tmp_path / "*.jsonl")])) == ["a.jsonl", "b.jsonl"]
    assert names(discover([str(tmp_path / "**/*.jsonl")])) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(discover(str(tmp_path / "a.jsonl"))) == ["a.jsonl"]
    monkeypatch.chdir(tmp_path)
    found = discover(["sub/c.jsonl", "[ab].jsonl"])
    assert [file.name for file in found.files] == ["sub/c.jsonl", "a.jsonl", "b.jsonl"]
    assert [file.ordinal for file in found.files] == [0, 1, 2]
    with pytest.raises(SourceError, match=r"a\.jsonl: selected twice"):
        discover(["a.jsonl", "*.jsonl"])
    assert len(discover(["a.jsonl", "a.jsonl"]).files) == 2


def test_bytes_decide_the_kind(tmp_path: Path) -> None:
    assert discover([write(tmp_path / "a.json", ROW * 2)]).files[0].kind is FileKind.JSONL
    assert discover([write(tmp_path / "b.jsonl", b"\xef\xbb\xbf [{}]")]).files[0].kind is FileKind.JSON_ARRAY
    assert discover([write(tmp_path / "c.txt", ROW)]).files[0].kind is FileKind.JSONL
    assert discover([write(tmp_path / "d.jsonl", b"not json\n")]).files[0].kind is FileKind.JSONL
    assert discover([write(tmp_path / "e.jsonl", b'{"cut": \n{"ok":1}\n')]).files[0].kind is FileKind.JSONL


def test_folders_of_files(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl", "README.md", ".cache/x.jsonl"):
        write(tmp_path / "named" / name)
    found = discover([tmp_path / "named"])
    assert names(found) == ["train.jsonl"]
    assert found.ignored == (f"{tmp_path}/named/README.md", f"{tmp_path}/named (split test)")
    assert names(discover([tmp_path / "named"], split="test[:1]")) == ["test.jsonl"]
    assert names(discover([tmp_path / "named"], split="train+test")) == ["test.jsonl", "train.jsonl"]
    assert len(texts(discover([tmp_path / "named"], split="train+test[:1]"))) == 2
    with pytest.raises(SourceError, match="no split 'dev'; it has test, train"):
        discover([tmp_path / "named"], split="dev")
    for name in ("train_sft-00000-of-00002", "train_sft-00001-of-00002", "test_sft-00000-of-00001"):
        (tmp_path / "shards/data").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": [name]}), tmp_path / f"shards/data/{name}.parquet")
    assert len(discover([tmp_path / "shards"], split="train_sft").files) == 2
    with pytest.raises(SourceError, match=r"has the splits test_sft, train_sft\. Choose one with split="):
        discover([tmp_path / "shards"])
    write(tmp_path / "plain/one.jsonl")
    write(tmp_path / "plain/two.jsonl.gz", gzip.compress(ROW, mtime=0))
    assert len(texts(discover([tmp_path / "plain"]))) == 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train.jsonl", "other.jsonl"], "some file names imply a split .train.jsonl., others don't .other.jsonl."),
        (["a.jsonl", "a.jsonl.gz"], "a.jsonl and a.jsonl.gz probably hold the same rows"),
        (["a.jsonl", "b.parquet"], "may hold the same rows"),
        (["notes.txt"], "no data files in this folder, which holds notes.txt"),
        ([], "no data files in this folder, which holds nothing"),
    ],
)
def test_ambiguous_folders_raise(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        write(tmp_path / name)
    with pytest.raises(SourceError, match=message):
        discover([tmp_path])


def test_saved_datasets(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(10)]})
    dataset.save_to_disk(tmp_path / "one", num_shards=2)
    assert len(texts(discover([tmp_path / "one"]))) == 10
    both = datasets.DatasetDict(train=dataset, test=dataset.select(range(3)))
    both.save_to_disk(tmp_path / "two")
    assert len(texts(discover([tmp_path / "two"]))) == 10
    assert len(texts(discover([tmp_path / "two"], split="test"))) == 3
    with pytest.raises(SourceError, match="no split 'dev'; it has train, test"):
        discover([tmp_path / "two"], split="dev")

    state = tmp_path / "one/state.json"
    state.write_text(state.read_text().replace('"_split"', '"_indices_files": [{"filename": "i.arrow"}], "_split"'))
    with pytest.raises(SourceError, match=r"indices mapping .*dataset.flatten_indices\(\)"):
        discover([tmp_path / "one"])
    (tmp_path / "two/train/data-00000-of-00001.arrow").unlink()
    with pytest.raises(SourceError, match=r"data-00000-of-00001\.arrow, which state.json lists, is missing"):
        discover([tmp_path / "two"])


def test_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "repo/train.jsonl", b"".join(b'{"text":"row %d"}\n' % n for n in range(10)))
    write(tmp_path / "repo/test.jsonl")
    hub = HubDataset(str(tmp_path / "repo"))
    assert hub.split_names() == ["train", "test"]
    (file,) = hub.load("train")
    assert file.path.suffix == ".arrow" and file.split == "train"

    found = discover([tmp_path / "repo"], config="default", split="train[2:4]+test")
    assert texts(found) == [b'{"text":"row 2"}', b'{"text":"row 3"}', b'{"text":"hello"}']
    assert {file.kind for file in found.files} == {FileKind.ARROW}
    with pytest.raises(SourceError, match="with config 'other'"):
        discover([tmp_path / "repo"], config="other")


def test_datasets_that_fail_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(SourceError, match=r"org/name: not a local file or folder.*OSError: offline.*network"):
        discover(["org/name"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"needs the package 'datasets'.*pip install 'penstock\[hub\]'"):
        discover(["org/name"])


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data/chats.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"no such file or folder. Did you mean data/chats.jsonl\?"):
        discover(["data/chat.jsonl"])
    with pytest.raises(SourceError, match=r"The folder data holds chats.jsonl"):
        discover(["data/zzz"])
    with pytest.raises(SourceError, match=r"The folder nowhere does not exist either"):
        discover(["nowhere/a.jsonl"])
    with pytest.raises(SourceError, match="no file matches this pattern"):
        discover(["data/*.parquet"])
    with pytest.raises(UsageError, match="ftp addresses are not supported"):
        discover(["ftp://server/chats.jsonl"])
    os.mkfifo("pipe")
    with pytest.raises(SourceError, match="a pipe or device"):
        discover(["pipe"])
    with pytest.raises(SourceError, match="no source given"):
        discover([])
    with pytest.raises(SourceError, match="this is a local source"):
        discover(["data/chats.jsonl"], revision="main")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", b"\n \n\r\n", "no rows"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "no rows"),
        ("a.json", b"[ ]", "no rows"),
        ("a.parquet", ROW, "not a Parquet file: it starts with .* at byte 0"),
        ("a.parquet", b"PAR1 and so on", "not a readable Parquet file"),
        ("a.arrow", ROW, "not an Arrow file"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00 cut", "not a readable Arrow file"),
        ("a.jsonl.gz", ROW, "not a gzip file"),
        ("a.jsonl.zst", ROW, "not a zstd file"),
        ("a.jsonl.gz", gzip.compress(ROW * 9, mtime=0)[:-3], r"the gzip data is truncated at byte \d+"),
        ("a.jsonl.gz", gzip.compress(ROW, mtime=0) + b"rubbish", r"damaged gzip data after byte \d+"),
        ("a.jsonl.zst", zstandard.compress(ROW * 9)[:-3], r"the zstd data is truncated at byte \d+"),
        ("a.jsonl.zst", zstandard.compress(ROW) + b"rubbish", r"damaged zstd data before byte \d+"),
        ("a.txt", b"role,content\n", "not JSON lines, a JSON array, Parquet or Arrow: it starts with b'role"),
        ("a.jsonl", "{}\n".encode("utf-16"), "UTF-16 text. Convert it: iconv"),
        ("a.json", b'{\n  "data": []\n}\n', r"one JSON object over several lines.*jq -c '.data\[\]'"),
        ("a.json", b'[{"a":1}, {"b":2}', "the array is not closed at byte 17"),
        ("a.json", b'[{"a":1}, {"b":"2}]', "the file ends inside element 2, which starts at byte 10"),
        ("a.json", b'[{"a":1} {"b":2}]', r"no comma after element 1, at byte 9"),
        ("a.json", b"[1, 2]", r"unexpected '1.*after element 0, at byte 1"),
        ("a.json", b'[{"a":1}, ]', r"unexpected ',' after element 1"),
        ("a.json", b'[{"a":1}] x', r"unexpected 'x' after the array, at byte 10"),
        ("a.json", b"[,{}]", "unexpected ',' after element 0"),
    ],
)
def test_unreadable_files_raise(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = write(tmp_path / name, data)

    def use() -> list[Slice]:
        return list(discover([path]).slices())

    with pytest.raises(SourceError, match=message) as caught:
        use()
    assert str(path) in str(caught.value)


def test_dictionary_columns_in_arrow_files(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", "b"]).dictionary_encode()})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(SourceError, match=r"column 'text' is dictionary-encoded.*plain column, or as Parquet"):
        list(discover([tmp_path / "a.arrow"]).slices())


def test_a_typo_in_a_file_name_suggests_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that could be a hub dataset's is not asked for there while a file here is nearly called so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HubDataset, "split_names", lambda _: pytest.fail("asked the hub"))
    (tmp_path / "chats.jsonl").write_bytes(ROW)
    for typo in ("chats.jsnol", "chat.jsonl", "chats.jsonl.txt"):
        with pytest.raises(SourceError, match="no such file or folder. Did you mean chats.jsonl?"):
            discover(typo)


def test_a_zstd_file_may_start_with_a_skippable_frame(tmp_path: Path) -> None:
    """As pzstd writes them."""
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    packed = skippable + zstandard.compress(ROW) + b"\x5f\x2a\x4d\x18\x00\x00\x00\x00" + zstandard.compress(ROW)
    found = discover([write(tmp_path / "a.jsonl.zst", packed)])
    assert found.files[0].kind is FileKind.JSONL_ZST
    assert texts(found) == [ROW.strip()] * 2


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    write(path)
    write(path.with_suffix(".txt"))
    for found in (discover([path]), discover([tmp_path])):
        assert found.files[0].name == f"{tmp_path}/caf\\xe9.jsonl"
        assert texts(found) == [ROW.strip()]
        assert path_from_json(orjson.loads(orjson.dumps(path_to_json(found.files[0].path)))) == path
        assert recorded_path(text_of_path(path)) == path
    assert discover([tmp_path]).ignored == (f"{tmp_path}/caf\\xe9.txt",)


class ManyFiles:
    """A folder with this many files."""

    def __init__(self, count: int) -> None:
        self._names = [PurePosixPath(f"{n:05}.{'jsonl' if n % 2 else 'txt'}") for n in range(count)]

    def names(self) -> list[PurePosixPath]:
        return self._names

    def path(self, name: str) -> Path | None:
        return None if name in ("state.json", "dataset_dict.json") else Path(name)


def calls(act: Callable[[], object]) -> int:
    """How many functions are called."""
    count = [0]

    def profile(*_: object) -> None:
        count[0] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count[0]


def test_listing_a_folder_takes_steps_in_proportion_to_its_files() -> None:
    few, many = (calls(partial(read_folder, ManyFiles(count), "folder")) for count in (2_000, 20_000))
    assert many < 11 * few
