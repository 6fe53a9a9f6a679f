"""Atomic writes, shared folders, and no change to files that Penstock did not create."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.store import files
from penstock.store.files import writer_name
from penstock.store.tree import Tree

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


def test_writes_are_atomic(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for data in (b"data", b"other"):
        tree.write(tmp_path / "a" / "b.json", data, "x")
        assert (tmp_path / "a" / "b.json").read_bytes() == data
        assert list(tree.tmp.iterdir()) == []


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Tree(tmp_path).write(tmp_path / "a.json", b"", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_new_folders_get_the_roots_permissions(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    Tree(shared).write(shared / "shards" / "ab" / "x", b"", "x")
    for folder in (shared / "tmp", shared / "shards", shared / "shards" / "ab"):
        assert folder.stat().st_mode & 0o7777 == 0o2775


def test_a_full_disk_raises_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full. Free some space and run the same command again"):
        Tree(tmp_path).write(tmp_path / "a.json", b"data", "x")
    assert not (tmp_path / "a.json").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", OWN, ids=range(len(OWN)))
def test_penstocks_files_are_removed(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    assert Tree(tmp_path).files(path.parent) == [path]
    assert Tree(tmp_path).remove(path)
    assert not path.exists()
    assert not Tree(tmp_path).remove(path)


@pytest.mark.parametrize("name", FOREIGN, ids=range(len(FOREIGN)))
def test_other_files_are_neither_listed_nor_removed(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name)
    tree = Tree(tmp_path)
    assert tree.files(path.parent) == []
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        tree.remove(path)
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        tree.move(path, tree.tmp / f"{writer_name()}.aside.{DIGEST}.arrow")
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        tree.move(put(tree.tmp / f"{writer_name()}.0123456789ab"), path)
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
    tree = Tree(root)
    assert tree.files((root / name).parent) == []
    for act in (tree.remove, tree.read, tree.touch):
        with pytest.raises(OSError, match="not a file that Penstock created|link"):
            act(root / name)
    assert {path: path.lstat() for path in (target, target.parent)} == before
    if linked == "folder":
        with pytest.raises(StoreError, match="is a link or not a folder. Remove what is in the way"):
            tree.write(root / name, b"other", "x")
        with pytest.raises(StoreError, match="is a link or not a folder"):
            tree.create(root / name, b"other", "x")
        assert target.read_bytes() == b"data"


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    pipe = tmp_path / "claims" / DIGEST
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        Tree(tmp_path).read(pipe)
    with pytest.raises(FileExistsError, match="not a file that Penstock created"):
        Tree(tmp_path).remove(pipe)
