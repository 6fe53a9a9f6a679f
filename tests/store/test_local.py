"""Atomic writes, shared folders, and no change to files that Penstock did not create."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.store import files
from penstock.store.files import writer_name
from penstock.store.local import LocalStorage
from penstock.store.storage import Entry

DIGEST = "b3-" + "a" * 64
OWN = (
    f"claims/{DIGEST}",
    f"datasets/{DIGEST}/manifest.json",
    f"datasets/{DIGEST}/notes.json",
    f"datasets/{DIGEST}/quarantine.jsonl",
    f"datasets/{DIGEST}/reference/{DIGEST}.npy",
    f"datasets/{DIGEST}/used",
    f"leases/{writer_name()}.0123456789ab",
    f"memo/aa/{DIGEST}.json",
    f"memo/dates/{DIGEST}",
    f"retired/{DIGEST}.0123456789ab.arrow",
    f"shards/aa/{DIGEST}.arrow",
    f"shards/aa/{DIGEST}.bad",
    f"shards/aa/{DIGEST}.json",
    f"tmp/{writer_name()}.0123456789ab",
    f"tmp/{writer_name()}.aside.{DIGEST}.arrow",
    f"tokenizers/{DIGEST}.json",
    f"{writer_name()}.0123456789ab",
)
FOREIGN = (
    DIGEST,
    "claims/mine",
    f"claims/deep/{DIGEST}",
    f"claims/{DIGEST}.txt",
    "datasets/squad/manifest.json",
    f"datasets/{DIGEST}/train.jsonl",
    f"memo/ab/{DIGEST}.json",
    f"other/{DIGEST}",
    "penstock-cache.json",
    f"shards/ab/{DIGEST}.arrow",
    f"shards/{DIGEST}.arrow",
    f"tmp/{writer_name()}",
    "tmp/host.1.2.0123456789ab",
    "tmp/notes.txt",
    "tokenizers/mine.json",
    f"tokenizers/{DIGEST}.json.orig",
)


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"data")
    return path


def listed(storage: LocalStorage, name: str) -> list[Entry]:
    """What is listed in the folder of a file."""
    folder = name.rpartition("/")[0]
    return storage.entries(folder) if folder not in ("", "tmp") else storage.temporaries()


def test_writes_are_atomic(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for data in (b"data", b"other"):
        storage.write("a/b.json", data, "x")
        assert (tmp_path / "a" / "b.json").read_bytes() == data
        assert list((tmp_path / "tmp").iterdir()) == []


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        LocalStorage(tmp_path).write("a.json", b"", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_new_folders_get_the_roots_permissions(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    LocalStorage(shared).write("shards/ab/x", b"", "x")
    for folder in (shared / "tmp", shared / "shards", shared / "shards" / "ab"):
        assert folder.stat().st_mode & 0o7777 == 0o2775


def test_a_full_disk_raises_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full. Free some space and run the same command again"):
        LocalStorage(tmp_path).write("a.json", b"data", "x")
    assert not (tmp_path / "a.json").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", OWN, ids=range(len(OWN)))
def test_penstocks_files_are_removed(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    storage = LocalStorage(tmp_path)
    assert [entry.path for entry in listed(storage, name)] == [name]
    assert storage.delete(name)
    assert not path.exists()
    assert not storage.delete(name)


@pytest.mark.parametrize("name", FOREIGN, ids=range(len(FOREIGN)))
def test_other_files_are_neither_listed_nor_removed(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    storage = LocalStorage(tmp_path)
    assert listed(storage, name) == []
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        storage.delete(name)
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        storage.move(name, f"tmp/{writer_name()}.aside.{DIGEST}.arrow")
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        put(tmp_path / "tmp" / f"{writer_name()}.0123456789ab")
        storage.move(f"tmp/{writer_name()}.0123456789ab", name)
    assert path.read_bytes() == b"data"


@pytest.mark.parametrize("name", OWN, ids=range(len(OWN)))
@pytest.mark.parametrize("linked", ["file", "folder"])
def test_links_are_not_followed(tmp_path: Path, name: str, linked: str) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    root.mkdir()
    if linked == "file":
        target = put(outside / "file")
        link = root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    else:
        first, _, rest = name.partition("/")
        if not rest:
            pytest.skip("the root itself may be a link")
        target = put(outside / rest)
        (root / first).symlink_to(outside)
    before = {path: path.lstat() for path in (target, target.parent)}
    storage = LocalStorage(root)
    try:
        assert listed(storage, name) == []
    except StoreError as error:
        assert "is a link or not a folder" in str(error)
    for act in (storage.delete, storage.read, storage.touch):
        with pytest.raises(OSError, match="not a file that Penstock created|link"):
            act(name)
    assert {path: path.lstat() for path in (target, target.parent)} == before
    if linked == "folder":
        with pytest.raises(StoreError, match="is a link or not a folder. Remove what is in the way"):
            storage.write(name, b"other", "x")
        with pytest.raises(StoreError, match="is a link or not a folder"):
            storage.create(name, b"other", "x")
        assert target.read_bytes() == b"data"


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    pipe = tmp_path / "claims" / DIGEST
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        LocalStorage(tmp_path).read(f"claims/{DIGEST}")
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        LocalStorage(tmp_path).delete(f"claims/{DIGEST}")
