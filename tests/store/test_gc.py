"""Garbage collection, alongside readers, builds and kills."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.build.workers.sharing import Sharing
from penstock.cli import app
from penstock.cli.cache import seconds, size
from penstock.errors import StoreError, UsageError
from penstock.store import gc
from penstock.store.cache import Cache
from penstock.store.claims import Claims
from penstock.store.files import host_id, writer_name
from penstock.store.gc import DAY, collect_garbage
from penstock.store.listing import list_datasets
from penstock.store.local import LocalStorage
from tests.store.conftest import Prepare
from tests.support.forks import Forks, leftovers, result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]


def make_old(cache: Path, age: float = 40 * DAY) -> None:
    then = time.time() - age
    for path in cache.rglob("*"):
        os.utime(path, (then, then))


def test_referenced_files_stay(prepare: Prepare, data: Path, cache: Path) -> None:
    prepare(data)
    before = result(cache)
    make_old(cache)
    found = collect_garbage(Cache(cache), older_than=0)
    assert (found.shards, found.tokenizers, found.datasets) == (0, 0, [])
    assert result(cache) == before
    assert prepare(data).hit


def test_old_unreferenced_files_are_deleted(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    other = prepare(data, template_vars={"x": 1}).dataset
    before = result(cache)
    (other.path / "manifest.json").unlink()
    assert collect_garbage(Cache(cache)).shards == 0  # too young: a build may be running
    assert collect_garbage(Cache(cache), older_than=0, dry_run=True).shards == len(other.shards)
    found = collect_garbage(Cache(cache), older_than=0)
    assert found.shards == len(other.shards)
    assert found.bytes > 0
    assert result(cache) == {
        n: b for n, b in before.items() if Path(n).stem in dataset.shards.names or dataset.key in n
    }
    assert not any(cache.glob(f"shards/*/{other.shards.names[0]}*"))
    assert leftovers(cache) == []
    assert prepare(data).hit


def test_max_bytes_deletes_no_more_than_needed(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    (dataset.path / "manifest.json").unlink()
    total = sum(path.stat().st_size for path in cache.glob("shards/*/*"))
    found = collect_garbage(Cache(cache), older_than=0, max_bytes=total // 2)
    assert total // 3 < found.kept_bytes <= total // 2
    assert found.bytes + found.kept_bytes == total


def test_unused_datasets_can_be_dropped(prepare: Prepare, data: Path, cache: Path) -> None:
    old = prepare(data, template_vars={"x": 1}).dataset
    make_old(cache)
    used = prepare(data).dataset
    ps.open(used.path).input_ids(0)
    found = collect_garbage(Cache(cache), drop_unused=30 * DAY)
    assert found.datasets == [old.key]
    assert found.shards == len(old.shards)
    assert not old.path.exists()
    assert prepare(data).hit


def test_opening_a_dataset_records_its_use(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    make_old(cache)
    (entry,) = list_datasets(Cache(cache))
    assert time.time() - entry.used > 30 * DAY
    ps.open(dataset.path).input_ids(0)
    (entry,) = list_datasets(Cache(cache))
    assert time.time() - entry.used < 60
    assert time.time() - entry.prepared > 30 * DAY
    assert entry.name == f"{data.name} · model"
    assert (entry.rows, entry.tokens) == (400, dataset.tokens)


def test_nothing_is_deleted_if_a_manifest_can_not_be_read(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    (dataset.path / "manifest.json").write_bytes(b"{")
    before = result(cache)
    with pytest.raises(StoreError, match="Nothing was deleted, .* Prepare it again, or delete its folder yourself"):
        collect_garbage(Cache(cache), older_than=0)
    assert result(cache) == before


def test_a_build_that_commits_during_gc_keeps_its_shards(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = prepare(data).dataset
    before = result(cache)
    manifest = dataset.path / "manifest.json"
    whole = manifest.read_bytes()
    manifest.unlink()
    real, calls = gc.referenced, 0

    def referenced(*given: object, **more: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:  # the shards are set aside; another process commits its manifest
            manifest.write_bytes(whole)
        return real(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(gc, "referenced", referenced)
    assert collect_garbage(Cache(cache), older_than=0).shards == 0
    assert result(cache) == before
    assert leftovers(cache) == []


@pytest.mark.parametrize("step", ["gc.aside:1", "gc.delete:3"])
def test_a_killed_gc_loses_nothing(forks: Forks, chats: Path, public_tokenizer: Path, cache: Path, step: str) -> None:
    command = ("prepare", chats, "--tokenizer", public_tokenizer, "--no-fast", "--cache", cache)
    assert forks.run(*command)[0] == 0
    before = result(cache)
    (manifest,) = cache.glob("datasets/*/manifest.json")
    manifest.unlink()
    code, output = forks.run("cache", "gc", "--older-than", "0", "--cache", cache, fault=step)
    assert code == -9, output
    code, output = forks.run(*command, "--json")
    assert code == 0, output
    assert result(cache) == before
    assert leftovers(cache) == []
    if step == "gc.aside:1":
        assert '"slices_done": 0' in output


def test_gc_during_a_build_only_repeats_work(forks: Forks, chats: Path, public_tokenizer: Path, cache: Path) -> None:
    command = ("prepare", chats, "--tokenizer", public_tokenizer, "--no-fast", "--cache", cache)
    assert forks.run(*command)[0] == 0
    before = result(cache)
    for manifest in cache.glob("datasets/*/manifest.json"):
        manifest.unlink()
    for shard in list(cache.glob("shards/*/*.arrow"))[:12]:
        shard.unlink()
    building = forks.start(*command)
    cleaners = [forks.start("cache", "gc", "--older-than", "0", "--cache", cache) for _ in range(4)]
    assert [forks.wait(pid) for pid in (building, *cleaners)] == [0] * 5, forks.output(building)
    assert result(cache) == before
    assert leftovers(cache) == []


def test_a_build_about_to_commit_keeps_its_shards(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build reuses old unreferenced shards, and `gc` runs just before it commits."""
    dataset = prepare(data).dataset
    before = result(cache)
    (dataset.path / "manifest.json").unlink()
    make_old(cache)
    from penstock.build import commit as module

    real, found = module.commit_dataset, []

    def commit(*given: object) -> object:
        found.append(collect_garbage(Cache(cache), older_than=0))
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "commit_dataset", commit)
    assert prepare(data).progress.slices_done == 0
    assert [(gone.shards, gone.tokenizers) for gone in found] == [(0, 0)]
    assert result(cache) == before
    assert leftovers(cache) == []


def test_a_build_with_stale_listings_commits_no_missing_shards(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's gc deleted shards that this host's NFS client still shows."""
    dataset = prepare(data).dataset
    before = result(cache)
    (dataset.path / "manifest.json").unlink()
    gone = dataset.shards.names[:3]
    has_shard, listing, close, remembered = Cache.has_shard, LocalStorage.names, Sharing.close, set(gone)

    def names(storage: LocalStorage, folder: str = "") -> list[str]:
        if folder.startswith("shards/"):
            remembered.clear()
        return listing(storage, folder)

    def delete(sharing: Sharing) -> None:
        close(sharing)
        for name in remembered:
            dataset.cache.shard_path(name).unlink()

    monkeypatch.setattr(Cache, "has_shard", lambda self, name: name in remembered or has_shard(self, name))
    monkeypatch.setattr(LocalStorage, "names", names)
    monkeypatch.setattr(Sharing, "close", delete)
    outcome = prepare(data)
    assert outcome.progress.slices_done == 3
    assert result(cache) == before


def test_leases_of_dead_builds_expire(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    (dataset.path / "manifest.json").unlink()
    foreign = cache / "leases" / "elsewhere-00000000.1.2.0123456789ab"
    dead = cache / "leases" / f"{host_id()}.999999999.1.0123456789ab"
    for path in (foreign, dead):
        path.write_text("\n".join(dataset.shards.names))
    assert collect_garbage(Cache(cache), older_than=0).shards == 0
    assert [foreign.exists(), dead.exists()] == [True, False]
    make_old(cache / "leases", 2 * DAY)
    assert collect_garbage(Cache(cache), older_than=0).shards == len(dataset.shards)
    assert not foreign.exists()


def test_old_leftovers_of_other_hosts_are_removed(prepare: Prepare, data: Path, cache: Path) -> None:
    prepare(data)
    foreign = [cache / "tmp" / "elsewhere-00000000.1.2.0123456789ab", cache / "claims" / ("b3-" + "0" * 64)]
    mine = cache / "tmp" / f"{writer_name()}.0123456789ab"
    dead = cache / "tmp" / f"{host_id()}.999999999.1.0123456789ab"
    for path in (*foreign, mine, dead):
        path.write_text("elsewhere-00.1.2")
    collect_garbage(Cache(cache))
    assert [path.exists() for path in (*foreign, mine, dead)] == [True, True, True, False]
    make_old(cache / "tmp")
    make_old(cache / "claims")
    os.utime(mine)
    collect_garbage(Cache(cache))
    assert [path.exists() for path in (*foreign, mine)] == [False, False, True]
    mine.unlink()


def test_cache_commands(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    run = CliRunner()
    listed = run.invoke(app, ["cache", "ls", "--cache", str(cache)])
    assert dataset.key[:11] in listed.output
    assert run.invoke(app, ["cache", "verify", "--cache", str(cache)]).exit_code == 0
    shard = dataset.cache.shard_path(dataset.shards.names[0])
    shard.write_bytes(shard.read_bytes()[:-1])
    checked = run.invoke(app, ["cache", "verify", str(dataset.path), "--json"])
    assert checked.exit_code == 1
    assert '"ok": false' in checked.output
    cleaned = run.invoke(app, ["cache", "gc", "--dry-run", "--json", "--cache", str(cache)])
    assert '"shards": 0' in cleaned.output
    full = run.invoke(app, ["cache", "gc", "--max-bytes", "1kB", "--cache", str(cache)])
    assert isinstance(full.exception, StoreError)


def test_durations_and_sizes() -> None:
    assert [seconds(text, "--x") for text in ("0", "90m", "12h", "7d", "1.5w")] == [0, 5400, 43200, 604800, 907200]
    assert [size(text, "--x") for text in ("10", "1kB", "50GB", "2MiB")] == [10, 1000, 50 * 10**9, 2 << 20]
    for text in ("", "soon", "-1d"):
        with pytest.raises(UsageError, match="expected a duration such as 90m"):
            seconds(text, "--older-than")
    with pytest.raises(UsageError, match="expected a size such as 500MB"):
        size("big", "--max-bytes")


# -- claims -----------------------------------------------------------------------------------------------------------


NAME = "b3-" + "1" * 64


def test_claims_exclude_each_other(tmp_path: Path) -> None:
    ours, theirs = Claims(LocalStorage(tmp_path)), Claims(LocalStorage(tmp_path))
    assert ours.take(NAME)
    assert not theirs.take(NAME)
    ours.release(NAME)
    assert theirs.take(NAME)
    theirs.close()
    ours.close()
    assert list((tmp_path / "claims").iterdir()) == []


@pytest.mark.parametrize(
    ("owner", "age", "free"),
    [
        ("elsewhere-0000.12.34", 60, False),
        ("elsewhere-0000.12.34", 300, True),
        (f"{host_id()}.999999999.1", 0, True),
        (f"{host_id()}.{os.getpid()}.1", 0, True),  # our process id, with another start time
        (writer_name(), 60, False),
        ("", 1, False),
        ("", 10, True),
        ("", -75 * 365 * 86400, True),  # NFS 3: killed between an exclusive creation and setting the file's times
    ],
    ids=["remote", "remote-old", "dead", "reborn", "ours", "nameless", "nameless-old", "nameless-future"],
)
def test_when_a_claim_is_taken_over(tmp_path: Path, owner: str, age: float, free: bool) -> None:
    claims = Claims(LocalStorage(tmp_path))
    (tmp_path / "claims").mkdir()
    path = tmp_path / "claims" / NAME
    path.write_text(owner)
    then = time.time() - age
    os.utime(path, (then, then))
    assert claims.take(NAME) is free
    claims.close()
    assert path.exists() is not free


def test_a_held_claim_is_kept_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStorage, "renewal", 0.02)
    claims = Claims(LocalStorage(tmp_path))
    assert claims.take(NAME)
    path = tmp_path / "claims" / NAME
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 5
    while path.stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert path.stat().st_mtime > 0
    claims.close()
