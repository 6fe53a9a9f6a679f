"""Whole files or none, folders that are shared, writers that are dead."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import CorruptError, StoreError
from penstock.store import files
from penstock.store.cache import Cache, checked_name
from penstock.store.files import file_digest, make_folder, write_whole, writer_is_dead, writer_name


def test_a_file_appears_whole(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "b.json", b"data", tmp_path / "tmp", "x")
    assert (tmp_path / "a" / "b.json").read_bytes() == b"data"
    assert list((tmp_path / "tmp").iterdir()) == []
    write_whole(tmp_path / "a" / "b.json", b"other", tmp_path / "tmp", "x")
    assert (tmp_path / "a" / "b.json").read_bytes() == b"other"


def test_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a.json", b"", tmp_path / "tmp", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o640


def test_folders_take_the_permissions_of_the_shared_one(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    make_folder(shared / "shards" / "ab", like=shared)
    assert (shared / "shards" / "ab").stat().st_mode & 0o7777 == 0o2775


def test_a_full_disk_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StoreError, match="the disk is full. Free some space and run the same command again"):
        write_whole(tmp_path / "a.json", b"data", tmp_path / "tmp", "x")
    assert not (tmp_path / "a.json").exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_writers(tmp_path: Path) -> None:
    assert not writer_is_dead(writer_name() + ".abc")
    code = "from penstock.store.files import writer_name; print(writer_name())"
    gone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert writer_is_dead(gone + ".abc")
    assert not writer_is_dead("otherhost.1.1.abc")
    assert not writer_is_dead("nonsense")


def test_names_from_files_are_not_trusted() -> None:
    for name in ("../../etc/passwd", "b3-..", "b3-" + "g" * 64, 7, None, "b3-" + "a" * 63):
        with pytest.raises(CorruptError, match="is not the name of a shard"):
            checked_name(name)
    assert checked_name("b3-" + "a" * 64)


def test_a_cache_on_an_object_store_is_refused() -> None:
    with pytest.raises(StoreError, match="object stores have no atomic rename"):
        Cache("s3://bucket/cache")


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_digest(tmp_path / "x") == files.bytes_digest(b"abc")
    assert files.digest(b"a", b"bc") != files.digest(b"ab", b"c")
