"""Damaged files: flipped bits, lost and truncated shards, invalid manifests, full disks, read-only folders."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import penstock as ps
from penstock.errors import CorruptError, FormatError, StoreError
from penstock.store import files
from penstock.store.cache import Cache
from penstock.store.gc import collect_garbage
from penstock.store.manifest import seal_manifest
from penstock.store.transfer import copy_dataset
from penstock.store.verify import verify_cache
from tests.store.conftest import Prepare
from tests.support.forks import Forks, leftovers, result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_reported_and_its_slice_rebuilt(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    whole = result(cache)
    assert verify_cache(Cache(cache)).findings == []
    number = 5
    shard = dataset.cache.shard_path(dataset.shards.names[number])
    flip(shard, shard.stat().st_size // 2)
    (finding,) = verify_cache(Cache(cache)).findings
    table = dataset.manifest.shards
    first = table.first_rows[number]
    assert (finding.shard, finding.slice) == (dataset.shards.names[number], number)
    assert finding.rows == (first, first + table.rows[number] - 1)
    assert str(finding) == (
        f"{shard} (slice 5: {data}, rows {first} to {first + table.rows[number] - 1}): its bytes have changed. "
        "The next prepare rebuilds this slice"
    )
    assert shard.exists()
    again = prepare(data)
    assert (again.hit, again.progress.slices_done) == (False, 1)
    assert result(cache) == whole
    assert verify_cache(Cache(cache)).findings == []
    assert leftovers(cache) == []


def test_a_bit_flipped_before_the_manifest_is_found(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    (dataset.path / "manifest.json").unlink()
    shard = dataset.cache.shard_path(dataset.shards.names[3])
    flip(shard, shard.stat().st_size // 2)
    (finding,) = verify_cache(Cache(cache)).findings
    assert finding.shard == dataset.shards.names[3]
    assert prepare(data).progress.slices_done == 1


def test_a_shard_deleted_under_a_reader(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    shard = dataset.cache.shard_path(dataset.shards.names[0])
    shard.unlink()
    opened = ps.open(dataset.path)
    with pytest.raises(
        CorruptError, match=r"the shard is missing, although a dataset needs it. Run the same prepare again"
    ):
        opened.input_ids(0)
    assert len(opened.input_ids(len(opened) - 1))
    (finding,) = verify_cache(Cache(cache)).findings
    assert "the shard is missing. The next prepare rebuilds this slice" in str(finding)
    assert prepare(data).progress.slices_done == 1
    assert len(opened.input_ids(0))


def test_a_truncated_shard_is_rebuilt(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    whole = result(cache)
    shard = dataset.cache.shard_path(dataset.shards.names[2])
    shard.write_bytes(shard.read_bytes()[:100])
    (dataset.path / "manifest.json").unlink()
    assert prepare(data).progress.slices_done == 1
    assert result(cache) == whole


def test_a_manifest_of_a_newer_format(prepare: Prepare, data: Path) -> None:
    dataset = prepare(data).dataset
    path = dataset.path / "manifest.json"
    value = orjson.loads(path.read_bytes()) | {"format": 99}
    path.write_bytes(orjson.dumps(value))
    assert prepare(data).dataset.key == dataset.key  # damaged, because the digest does not match: rebuilt
    del value["digest"]
    path.write_bytes(seal_manifest(value))
    for call in (lambda: ps.open(dataset.path), lambda: prepare(data)):
        with pytest.raises(FormatError, match="format version 99, but this Penstock reads version 1"):
            call()
    (finding,) = verify_cache(dataset.cache).findings
    assert "format version 99" in str(finding)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "b3-../../../../x", "", None, 7])
def test_a_manifest_with_a_path_in_a_name(prepare: Prepare, data: Path, name: object) -> None:
    dataset = prepare(data).dataset
    path = dataset.path / "manifest.json"
    value = orjson.loads(path.read_bytes())
    del value["digest"]
    value["shards"]["names"][0] = name
    path.write_bytes(seal_manifest(value))
    with pytest.raises(CorruptError, match="is not the name of a shard or dataset|not a list of str"):
        ps.open(dataset.path)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"format": 1}'])
def test_a_damaged_manifest_is_rebuilt(prepare: Prepare, data: Path, cache: Path, damage: bytes) -> None:
    dataset = prepare(data).dataset
    whole = result(cache)
    (dataset.path / "manifest.json").write_bytes(damage)
    with pytest.raises(CorruptError, match="the manifest"):
        ps.open(dataset.path)
    assert prepare(data).progress.slices_done == 0
    assert result(cache) == whole


def test_lost_notes_memos_and_tokenizers_only_repeat_work(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    whole = result(cache)
    for folder in ("memo", "tokenizers", "claims", "tmp"):
        shutil.rmtree(cache / folder, ignore_errors=True)
    for note in (*cache.glob("shards/*/*.json"), dataset.path / "manifest.json", dataset.path / "notes.json"):
        note.unlink()
    outcome = prepare(data)
    assert outcome.progress.slices_done == 0
    assert result(cache) == whole
    assert outcome.dataset.tokenizer_json
    assert ps.open(dataset.path).conversation(0)["messages"]


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few shards."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount; test_a_simulated_full_disk stands in")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_file_system(forks: Forks, chats: Path, tokenizer: Path, little_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(little_disk)], check=True)
    code, output = forks.run("prepare", chats, "--tokenizer", tokenizer, "--cache", little_disk / "cache")
    assert code == 1
    assert "can't be created: the file system is read-only. Choose a folder you can write to with --cache" in output


def test_a_full_disk(forks: Forks, chats: Path, tokenizer: Path, little_disk: Path, cache: Path) -> None:
    command = ("prepare", chats, "--tokenizer", tokenizer, "--no-fast", "--cache")
    code, output = forks.run(*command, little_disk)
    assert code == 1
    assert "the disk is full. Free some space and run the same command again: finished slices are kept." in output
    finished = result(little_disk)
    assert finished
    assert leftovers(little_disk) == []
    subprocess.run(["mount", "-o", "remount,size=4m", str(little_disk)], check=True)
    code, output = forks.run(*command, little_disk, "--json")
    assert code == 0, output
    assert orjson.loads(output[output.index("{") :])["build"]["slices_reused"] == len(finished)
    assert forks.run(*command, cache)[0] == 0
    assert result(little_disk) == result(cache)


def test_a_simulated_full_disk(prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def sync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", sync)
        with pytest.raises(StoreError, match="the disk is full"):
            prepare(data)
    finished = len(result(cache))
    assert finished > 3
    assert leftovers(cache) == []
    assert prepare(data).progress.slices_reused >= finished


def test_an_unwritable_cache(forks: Forks, chats: Path, public_tokenizer: Path, memory: Path, cache: Path) -> None:
    """A user with read access only: hits work; a miss fails clearly, or is built elsewhere if requested."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    command = ("prepare", chats, "--tokenizer", public_tokenizer, "--no-fast", "--cache", cache)
    cache.chmod(0o755)
    spare = memory / "spare"
    spare.mkdir(mode=0o777, exist_ok=True)
    spare.chmod(0o777)
    nobody = {"user": 65534, "env": {"TMPDIR": str(spare), "HOME": "/nonexistent"}}
    code, output = forks.run(*command, **nobody)
    assert code == 1
    assert "permission denied. Choose a folder you can write to with --cache or PENSTOCK_CACHE." in output
    code, output = forks.run(*command, "--on-unwritable", "temporary", "--json", **nobody)
    assert code == 0, output
    built = orjson.loads(output[output.index("\n{") + 1 :])
    assert built["path"].startswith(str(spare))
    assert "Building in" in built["warnings"][0]
    code, output = forks.run(*command, "--on-unwritable", "temporary", "--json", **nobody)
    assert orjson.loads(output[output.index("\n{") + 1 :])["hit"]
    assert forks.run(*command)[0] == 0
    code, output = forks.run(*command, "--json", **nobody)
    assert code == 0, output
    assert orjson.loads(output[output.index("\n{") + 1 :])["hit"]


def test_programs_fall_back_to_a_temporary_folder(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    dataset = ps.prepare(data, tokenizer=model, cache=blocked / "cache", fast=False)
    assert dataset.path.is_relative_to(spare)
    assert "Building in" in caplog.text
    with pytest.raises(StoreError, match="can't be created"):
        ps.prepare(data, tokenizer=model, cache=blocked / "cache", on_unwritable="error")


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_copy_where_a_shard_is_something_else(
    prepare: Prepare, data: Path, cache: Path, tmp_path: Path, kind: str, side: str
) -> None:
    dataset, target = prepare(data).dataset, Cache(tmp_path / "target")
    target.prepare_root()
    path = (dataset.cache if side == "source" else target).shard_path(dataset.shards.names[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = tmp_path / "kept"
    if side == "source":
        shutil.move(path, kept)
    match kind:
        case "link":
            kept.touch()
            path.symlink_to(kept)
        case "dangling link":
            path.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(StoreError, match=re.escape(str(path))) as raised:
        copy_dataset(dataset, target)
    assert "\n" not in str(raised.value)
    assert leftovers(target.root) == []
    if side == "target":
        path.rmdir() if kind == "folder" else path.unlink()
        assert copy_dataset(dataset, target).shards == len(dataset.shards)


def test_verify_of_a_dataset_that_gc_drops_meanwhile(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    dropped: list[str] = []

    def drop(_: str) -> None:
        if not dropped:
            dropped.append(dataset.key)
            collect_garbage(Cache(cache), older_than=0.0, drop_unused=0.0)

    time.sleep(0.05)
    found = verify_cache(Cache(cache), on_shard=drop)
    assert dropped
    assert (found.datasets, found.findings) == (0, [])
    assert not list(cache.rglob("*.bad"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.EIO, "Input/output error", "/data/x"),
            "/data/x: Input/output error. Check the disk or file server",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), r"out of memory, or of processes: use fewer workers.*"),
        (OSError(errno.EMFILE, "Too many open files"), r"too many files are open .* ulimit -n"),
        (OSError(errno.ECONNRESET, "Connection reset"), "the operating system refused a request (Connection reset)."),
    ],
)
def test_an_error_of_the_system_without_a_file_is_not_blamed_on_the_disk(
    prepare: Prepare, data: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("penstock.build.find.discover", fail)
    with pytest.raises(StoreError, match=message if ".*" in message else re.escape(message)) as raised:
        prepare(data)
    assert ("disk" in str(raised.value)) is (error.filename is not None)


def test_a_cache_folder_that_is_renamed_during_a_build(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, moved = Cache.commit_shard, cache.with_name("moved")

    def rename(self: Cache, *given: Any) -> None:
        commit(self, *given)
        if not moved.exists():
            cache.rename(moved)

    monkeypatch.setattr(Cache, "commit_shard", rename)
    try:
        with pytest.raises(
            StoreError, match="its folder is gone. Was the cache renamed or deleted meanwhile"
        ) as raised:
            prepare(data)
    finally:
        moved.rename(cache)
    assert "\n" not in str(raised.value)
