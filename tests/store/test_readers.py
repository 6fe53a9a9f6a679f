"""A shard that readers may have mapped keeps its file: on NFS, removing it would kill them with SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import StoreError
from penstock.store import gc, local
from penstock.store.cache import Cache
from penstock.store.gc import collect_garbage
from penstock.store.verify import verify_cache
from tests.store.conftest import Prepare
from tests.support.forks import Forks, leftovers, result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]


def inodes(cache: Path) -> dict[str, int]:
    """The file behind every shard."""
    return {path.name: path.stat().st_ino for path in cache.glob("shards/*/*.arrow")}


def test_force_keeps_identical_shards_in_place(prepare: Prepare, data: Path, cache: Path) -> None:
    first = prepare(data).dataset
    before = inodes(cache)
    again = prepare(data, force=True)
    assert again.progress.slices_done == len(first.shards)
    assert inodes(cache) == before
    assert not list(cache.glob("retired/*"))


def test_concurrent_forced_builds_share_the_work(forks: Forks, chats: Path, tokenizer: Path, cache: Path) -> None:
    command = ("prepare", chats, "--tokenizer", tokenizer, "--cache", cache, "--no-fast")
    assert forks.run(*command)[0] == 0
    before, files = result(cache), inodes(cache)
    runs = [forks.start(*command, "--force") for _ in range(3)]
    assert [forks.wait(pid) for pid in runs] == [0] * 3
    assert (result(cache), inodes(cache)) == (before, files)
    assert leftovers(cache) == []


def test_work_done_twice_keeps_the_first_shard(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    before = inodes(cache)
    name = dataset.shards.names[0]
    note = dataset.cache.shard_record(name)
    dataset.cache.commit_shard(name, dataset.cache.shard_path(name).read_bytes(), note)
    assert inodes(cache) == before


@pytest.mark.parametrize("hard_links", [True, False])
def test_of_two_concurrent_commits_the_first_wins(
    cache: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    """The second process saw no shard when it checked."""
    if not hard_links:

        def refuse(*given: object, **more: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(local.os, "link", refuse)
    home = Cache(cache)
    home.prepare_root()
    name = "b3-" + "a" * 64
    home.commit_shard(name, b"shard", {})
    before = inodes(cache)
    monkeypatch.setattr(local.LocalStorage, "holds", lambda *given: False)
    monkeypatch.setattr(local.LocalStorage, "move", lambda *given, **more: (_ for _ in ()).throw(FileNotFoundError))
    home.commit_shard(name, b"shard", {})
    assert inodes(cache) == before
    assert leftovers(cache) == []


def test_a_damaged_shard_is_replaced_and_its_readers_survive(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = prepare(data).dataset
    whole = result(cache)
    shard = dataset.cache.shard_path(dataset.shards.names[0])
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"\xff\xfe")
    damaged, file_before = shard.read_bytes(), shard.stat().st_ino
    reader = ps.open(dataset.path)
    assert len(reader.input_ids(0))
    assert len(verify_cache(Cache(cache)).findings) == 1
    assert prepare(data).progress.slices_done == 1
    assert result(cache) == whole
    (retired,) = cache.glob("retired/*")
    assert (retired.read_bytes(), retired.stat().st_ino) == (damaged, file_before)
    assert collect_garbage(Cache(cache), older_than=0).leftovers == 0
    assert retired.exists()
    monkeypatch.setattr(gc, "RETIRED_AGE", -1.0)
    assert collect_garbage(Cache(cache)).leftovers == 1
    assert not retired.exists()
    assert len(reader.input_ids(0))


def test_an_obstacle_at_a_shards_path_is_reported(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    shard = dataset.cache.shard_path(dataset.shards.names[0])
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(
        StoreError, match=r"\.arrow can't be replaced: not a file that Penstock created. Remove what is in"
    ):
        prepare(data)
    shard.unlink()
    assert prepare(data).progress.slices_done == 1


def test_restoring_a_shard_keeps_one_rebuilt_in_the_meantime(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = prepare(data).dataset
    manifest = dataset.path / "manifest.json"
    whole, before = manifest.read_bytes(), result(cache)
    manifest.unlink()
    real, calls, made = gc.referenced, 0, {}

    def referenced(*given: object, **more: object) -> object:
        nonlocal calls, made
        calls += 1
        if calls == 2:  # all shards are set aside; another process rebuilds them and commits
            for name, content in before.items():
                if name.endswith(".arrow"):
                    (cache / name).write_bytes(content)
            manifest.write_bytes(whole)
            made = inodes(cache)
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(gc, "referenced", referenced)
    assert collect_garbage(Cache(cache), older_than=0).shards == 0
    assert inodes(cache) == made
    assert result(cache) == before
    assert leftovers(cache) == []
