"""A cache in an object store, against a real S3 server on loopback: builds, hits, trust, damage, faults, upkeep."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build.outcome import Outcome
from penstock.errors import CorruptError, StoreError, UsageError
from penstock.store import cache as cache_module
from penstock.store import claims as claims_module
from penstock.store.cache import Cache, open_cache
from penstock.store.claims import Claims
from penstock.store.dataset import open_dataset
from penstock.store.gc import collect_garbage
from penstock.store.listing import list_datasets, list_shards
from penstock.store.object_storage import ObjectStorage
from penstock.store.storage import shard_at
from penstock.store.transfer import copy_dataset
from penstock.store.trust import user_key
from penstock.store.verify import verify_cache
from tests.store.conftest import Prepare
from tests.support.forks import result as files_of
from tests.support.object_servers import Proxy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]
Built = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    be_user("me", tmp_path, monkeypatch)
    yield
    user_key.cache_clear()


def be_user(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a user with a key and a memory of checks of his own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"state-{name}"))
    user_key.cache_clear()


@pytest.fixture
def data(chats: Path, tmp_path: Path) -> Path:
    """A modifiable copy of some conversations, which make about ten slices."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(chats.read_bytes().splitlines(keepends=True)[:160]))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


@pytest.fixture
def url(s3: Proxy) -> str:
    return f"s3://{s3.bucket}/caches/one"


@pytest.fixture
def build(prepare: Prepare, url: str, data: Path, tmp_path: Path) -> Built:
    """Prepare the conversations in the object store, as if on the machine `on`."""

    def run(*sources: Path, on: str = "here", **options: Any) -> Outcome:
        given = {"cache": url, "local_cache": tmp_path / on} | options
        return prepare(*(sources or (data,)), **given)

    return run


def remote(outcome: Outcome) -> Cache:
    cache = outcome.dataset.cache
    assert cache.is_remote
    return cache


def objects(url: str) -> dict[str, bytes]:
    """The shards and manifests in the store."""
    folder = ObjectStorage(url)
    paths = [entry.path for entry in folder.entries("") if entry.path.endswith((".arrow", "manifest.json"))]
    return {path: folder.read(path) or b"" for path in paths}


def left_over(url: str) -> list[str]:
    folder = ObjectStorage(url)
    return [entry.path for kind in ("claims", "leases", "collections", "tmp") for entry in folder.entries(kind)]


# -- builds and hits ----------------------------------------------------------------------------------------------


def test_a_build_is_that_of_a_folder(build: Built, prepare: Prepare, data: Path, cache: Path, url: str) -> None:
    local = prepare(data)
    built = build()
    assert not built.hit
    assert objects(url) == files_of(cache)
    assert built.dataset.manifest == local.dataset.manifest
    assert left_over(url) == []
    again = build()
    assert again.hit
    assert built.dataset.address == f"{url}/datasets/{local.dataset.key}"


def test_a_hit_on_another_machine_downloads_no_shard(build: Built, s3: Proxy) -> None:
    built = build()
    s3.clear()
    hit = build(on="there")
    assert hit.hit
    assert hit.progress.slices_done == 0
    assert not [r.path for r in s3.requests if r.method == "GET" and r.path.endswith(".arrow")]
    s3.clear()
    assert build(on="there").hit  # the manifest was checked, so not even the indexes are read
    assert not [r.path for r in s3.requests if r.path.endswith((".arrow", ".index"))]
    assert hit.dataset.key == built.dataset.key


def test_appending_encodes_only_what_is_new(build: Built, data: Path, url: str) -> None:
    before = build().progress.slices_done
    with data.open("ab") as file:
        file.write(b"".join(data.read_bytes().splitlines(keepends=True)[:20]))
    grown = build(on="there")
    assert 0 < grown.progress.slices_done <= 4 < before
    assert grown.progress.slices_reused >= before - 2
    assert left_over(url) == []


def test_worker_processes_and_the_variable(
    build: Built, prepare: Prepare, data: Path, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setattr("penstock.build.run.SMALL_BYTES", 0)
    monkeypatch.setattr("penstock.build.run.worker_count", lambda asked: (2, ""))
    monkeypatch.setenv("PENSTOCK_CACHE", url)
    monkeypatch.setenv("PENSTOCK_LOCAL_CACHE", str(tmp_path / "variable"))
    built = prepare(data, cache=None)
    assert remote(built).address == url
    assert built.dataset.path.is_relative_to(tmp_path / "variable")
    monkeypatch.undo()


def test_datasets_open_by_address_key_and_latest(build: Built, url: str, tmp_path: Path) -> None:
    built = build().dataset
    tier = tmp_path / "reader"
    by_address = ps.open(f"{url}/datasets/{built.key}", local_cache=tier)
    for other in (
        ps.open(built.key[:11], url, tier),
        ps.open("latest", url, tier),
        ps.open(by_address.path),  # a path in the local tier
        pickle.loads(pickle.dumps(by_address)),
    ):
        assert (other.address, other.path) == (by_address.address, by_address.path)
    assert by_address.input_ids(0).tolist() == built.input_ids(0).tolist()
    assert by_address.vocabulary.size == built.vocabulary.size
    with pytest.raises(StoreError, match="none with this key in s3://"):
        ps.open("b3-00", url, tier)
    with pytest.raises(UsageError, match="not the address of a dataset"):
        ps.open(url)


def test_other_objects_are_left_alone(build: Built, s3: Proxy) -> None:
    folder = ObjectStorage(f"s3://{s3.bucket}/mine")
    folder.write("thesis.txt", b"mine", "x")
    with pytest.raises(StoreError, match=r"is not a Penstock cache: it holds other objects \(thesis\.txt"):
        build(cache=f"s3://{s3.bucket}/mine")
    assert folder.names() == ["thesis.txt"]
    with pytest.raises(UsageError, match="https addresses are not supported for caches"):
        open_cache("https://example.org/cache")
    with pytest.raises(UsageError, match="belongs to a cache in an object store"):
        open_cache("folder", local="elsewhere")


# -- reading ------------------------------------------------------------------------------------------------------


def test_a_view_reads_indexes_and_the_feed_reads_each_shard_once(
    build: Built, prepare: Prepare, data: Path, s3: Proxy, tmp_path: Path
) -> None:
    local = ps.open(prepare(data).dataset.path)
    address = build().dataset.address
    s3.clear()
    view = ps.open(address, local_cache=tmp_path / "cold").view(max_length=64, holdout=0.1)
    assert view.ledger == local.view(max_length=64, holdout=0.1).ledger
    assert not [r.path for r in s3.requests if r.path.endswith(".arrow")]
    options = {"batch_size": 4, "collate": "packed", "capacity": 128, "seed": 3, "epochs": 2}
    served = [batch.tensors for batch in view.loader(**options)]
    expected = [batch.tensors for batch in local.view(max_length=64, holdout=0.1).loader(**options)]
    assert len(served) == len(expected)
    for got, due in zip(served, expected, strict=True):
        assert got.keys() == due.keys()
        assert all(np.array_equal(got[name], due[name]) for name in due)
    read = [r.path for r in s3.requests if r.method == "GET" and r.path.endswith(".arrow")]
    assert len(read) == len(set(read)) == len(local.shards)


def test_pairs_and_single_batches(build: Built, prepare: Prepare, examples: Path, tmp_path: Path) -> None:
    source = examples / "data" / "pairs.jsonl"
    local, address = prepare(source).dataset, build(source).dataset.address
    there = ps.open(address, local_cache=tmp_path / "cold").view()
    here = ps.open(local.path).view()
    assert there.lengths.tolist() == here.lengths.tolist()
    assert there.loader(batch_size=2, collate="pairs", epochs=1).batch(1).rows == (
        here.loader(batch_size=2, collate="pairs", epochs=1).batch(1).rows
    )


def test_the_local_tier_keeps_its_size(build: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build().dataset
    sizes = built.manifest.shards.bytes
    limit = 4 * max(sizes)
    monkeypatch.setenv("PENSTOCK_LOCAL_CACHE_BYTES", str(limit))
    ds = open_dataset(built.address, None, tmp_path / "small")
    first = ds.shards.columns(0)
    assert built.input_ids(0).tolist() == ds.input_ids(0).tolist()
    for _ in range(2):
        for example in range(0, ds.shards.total, 3):
            assert ds.input_ids(example).tolist() == built.input_ids(example).tolist()
            held = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*.arrow"))
            assert held <= limit + max(sizes)
    assert first.ids.sum() == built.shards.columns(0).ids.sum()  # mapped, though its file may be gone
    assert ds.cache.access.downloaded > sum(sizes)


def test_processes_share_a_download(build: Built, s3: Proxy, tmp_path: Path) -> None:
    built = build().dataset
    caches = [open_cache(remote_url(built), local=tmp_path / "shared") for _ in range(4)]
    name, digest = built.shards.names[0], built.manifest.shards.digests[0]
    s3.clear()
    s3.latency = 0.05
    threads = [threading.Thread(target=cache.shard_file, args=(name, digest)) for cache in caches for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([r for r in s3.requests if r.method == "GET" and r.path.endswith(".arrow")]) == 1


def remote_url(dataset: Any) -> str:
    return str(dataset.cache.address)


# -- claims -------------------------------------------------------------------------------------------------------

NAME = "b3-" + "ab" * 32


def race(folder: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Claims]]:
    racers = [Claims(folder) for _ in range(8)]
    won: list[bool] = []
    threads = [threading.Thread(target=lambda claims=claims: won.append(claims.take(NAME))) for claims in racers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(won), racers


def test_exactly_one_builder_gets_a_claim(url: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ObjectStorage(url)
    won, racers = race(folder, monkeypatch)
    assert won == 1
    monkeypatch.setattr(claims_module, "EXPIRY", -1.0)  # expired
    (found,) = folder.entries("claims")
    stale = {NAME: found}
    monkeypatch.setattr(Claims, "_listing", lambda self: stale)  # all see the expired claim at once
    won, others = race(folder, monkeypatch)
    assert won == 1
    for claims in (*racers, *others):
        claims.close()
    assert folder.entries("claims") == []


def test_claims_are_renewed_until_they_are_lost(url: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStorage, "renewal", 0.05)
    folder = ObjectStorage(url)
    claims = Claims(folder)
    assert claims.take(NAME)
    before = folder.read(f"claims/{NAME}")
    wait_until(lambda: folder.read(f"claims/{NAME}") != before)
    folder.write(f"claims/{NAME}", b"another-00000000.1.1\nx\n0", "x")
    wait_until(lambda: not claims._held)
    claims.close()
    assert folder.read(f"claims/{NAME}") == b"another-00000000.1.1\nx\n0"


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it never happened")


def test_a_lost_answer_does_not_lose_the_claim(url: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store creates the claim, but its answer is cut: the retry finds an object, which is our own."""
    folder = ObjectStorage(url)
    claims = Claims(folder)
    folder.create(f"claims/{NAME}", claims._signed(0), "x")
    assert claims.take(NAME)
    claims.close()


# -- trust --------------------------------------------------------------------------------------------------------


def test_what_others_wrote_is_checked_once(
    build: Built, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = build().progress.slices_done
    be_user("other", tmp_path, monkeypatch)
    first = build(on="there")
    assert (first.hit, first.progress.others_checked, first.progress.others_refused) == (True, slices, 0)
    assert build(on="there").progress.others_checked == 0
    assert build(on="third", trust="all").progress.others_checked == 0
    rebuilt = build(on="fourth", trust="own")
    assert rebuilt.progress.slices_done == slices
    assert {entry.user for entry in list_shards(open_cache(url, local=tmp_path / "fifth"))} == {"you"}


def test_a_forged_shard_is_refused_and_rebuilt(
    build: Built, prepare: Prepare, data: Path, cache: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(data)
    be_user("forger", tmp_path, monkeypatch)
    built = build(on="forger")
    home, names = remote(built), built.dataset.shards.names
    other = home.shard_data(names[1], built.dataset.manifest.shards.digests[1])
    home.storage.delete(shard_at(names[0]))
    home.commit_shard(names[0], other, home.shard_record(names[1]))  # valid digest, wrong tokens
    be_user("me", tmp_path, monkeypatch)
    mine = build()
    assert mine.progress.others_refused == 1
    assert mine.progress.slices_done == 1
    assert "written by another user on" in "\n".join(mine.warnings)
    assert objects(url) == files_of(cache)
    assert mine.dataset.manifest == expected.dataset.manifest


def test_copies_carry_no_trust(
    build: Built, prepare: Prepare, data: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = prepare(data).dataset
    pushed = copy_dataset(local, open_cache(f"{url}-pushed", local=tmp_path / "push"))
    assert pushed.copied == pushed.shards
    assert copy_dataset(local, open_cache(f"{url}-pushed", local=tmp_path / "push")).copied == 0
    assert build(cache=f"{url}-pushed", on="push").hit
    be_user("other", tmp_path, monkeypatch)
    there = open_dataset(pushed.address, None, tmp_path / "pull")
    with pytest.raises(StoreError, match=rf"{pushed.shards} of {pushed.shards} shards were written by others"):
        copy_dataset(there, open_cache(tmp_path / "pulled"))
    build(cache=f"{url}-pushed", on="pull")  # checks them
    there = open_dataset(pushed.address, None, tmp_path / "pull")
    pulled = copy_dataset(there, open_cache(tmp_path / "pulled"))
    assert ps.open(pulled.address).manifest == local.manifest
    assert files_of(tmp_path / "pulled") == files_of(local.cache.root)


# -- damage and faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "index"])
def test_damaged_objects_are_never_served(damage: str, build: Built, url: str, tmp_path: Path) -> None:
    built = build()
    home, name, whole = remote(built), built.dataset.shards.names[2], objects(url)
    path = shard_at(name)
    good = home.storage.read(path) or b""
    match damage:
        case "truncated":
            home.storage.write(path, good[:-100], "x")
        case "changed":
            home.storage.write(path, good[:300] + bytes([good[300] ^ 1]) + good[301:], "x")
        case "missing":
            home.storage.delete(path)
        case "index":
            index = shard_at(name, "index")
            home.storage.write(index, (home.storage.read(index) or b"")[:-7] + b"garbage", "x")
    reader = open_dataset(built.dataset.address, None, tmp_path / "reader")
    with pytest.raises(CorruptError, match=r"s3://.*prepare again"):
        for shard in range(len(reader.shards)):
            reader.shards.structure(shard)
            reader.shards.columns(shard)
    (finding,) = verify_cache(open_cache(url, local=tmp_path / "verifier")).findings
    assert finding.shard == name
    again = build(on="again")
    assert again.progress.slices_done == 1
    assert objects(url) == whole
    assert verify_cache(open_cache(url, local=tmp_path / "verifier")).findings == []
    reader = open_dataset(built.dataset.address, None, tmp_path / "reader")
    assert reader.shards.columns(2).ids.tolist() == built.dataset.shards.columns(2).ids.tolist()


def test_faults_in_passing_are_retried(
    build: Built, prepare: Prepare, data: Path, cache: Path, url: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(data)
    monkeypatch.setattr("penstock.store.object_storage.CONDITIONAL_PAUSES", (0.01, 0.01))
    faults = ["503", "cut", None, "drop", None, None, "500", None, None]

    def fault(method: str, path: str, number: int) -> str | None:
        chosen = faults[number % len(faults)]
        return chosen if chosen != "cut" or (method == "GET" and path.endswith(".index")) else None

    s3.fault = fault
    build()
    s3.clear()
    assert objects(url) == files_of(cache)
    assert left_over(url) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("503", r"the store answers 503 SlowDown, also after \d+ retries\. .* Finished slices are kept"),
        ("expired", r"the credentials have expired .* Finished slices are kept"),
        ("delay:3", r"did not answer within 0\.3 s"),
    ],
)
def test_lasting_faults_are_clear_and_lose_nothing(
    fault: str, said: str, build: Built, prepare: Prepare, data: Path, cache: Path, url: str, s3: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prepare(data)
    monkeypatch.setenv("PENSTOCK_STORE_RETRIES", "1")
    monkeypatch.setenv("PENSTOCK_STORE_TIMEOUT", "0.3" if fault.startswith("delay") else "30")
    monkeypatch.setattr("penstock.store.object_storage.CONDITIONAL_PAUSES", (0.01,))
    puts = []

    def from_the_fifth_shard(method: str, path: str, number: int) -> str | None:
        puts.append(path) if method == "PUT" and path.endswith(".arrow") else None
        return fault if len(puts) > 5 else None

    s3.fault = from_the_fifth_shard
    with pytest.raises(StoreError, match=said):
        build()
    s3.clear()
    monkeypatch.setenv("PENSTOCK_STORE_TIMEOUT", "30")
    monkeypatch.setattr(claims_module, "EXPIRY", -1.0)  # of the claims that could not be released
    again = build()
    assert again.progress.slices_reused == 5
    assert objects(url) == files_of(cache)
    assert left_over(url) == []


def test_a_read_only_store_serves_hits(build: Built, s3: Proxy, data: Path, tmp_path: Path) -> None:
    build()
    s3.fault = lambda method, path, number: "403" if method in ("PUT", "DELETE") else None
    assert build(on="reader").hit
    with data.open("ab") as file:
        file.write(data.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(StoreError, match="access denied"):
        build(on="reader", on_unwritable="error")


# -- upkeep -------------------------------------------------------------------------------------------------------


def test_gc_deletes_what_no_dataset_needs(build: Built, data: Path, url: str, tmp_path: Path) -> None:
    kept = build().dataset
    whole = objects(url)
    data.write_bytes(b"".join(data.read_bytes().splitlines(keepends=True)[3:60]))
    dropped = build().dataset
    extra = set(dropped.shards.names) - set(kept.shards.names)
    home = open_cache(url, local=tmp_path / "gc")
    assert len(list_datasets(home)) == 2
    home.storage.delete(f"datasets/{dropped.key}/manifest.json")
    assert collect_garbage(home).shards == 0  # too young
    assert collect_garbage(home, older_than=-5, dry_run=True).shards == len(extra)
    with home.lease(extra):
        assert collect_garbage(home, older_than=-5).shards == 0
    found = collect_garbage(home, older_than=-5)
    assert found.shards == len(extra)
    assert objects(url) == whole
    assert left_over(url) == []
    found = collect_garbage(home, older_than=-5, drop_unused=-5)
    assert found.datasets == [kept.key]
    assert objects(url) == {}
    assert build(on="again").progress.slices_done > 0


def test_gc_keeps_a_dropped_dataset_that_is_prepared_again(
    build: Built, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build commits the dataset again after `gc` has dropped it, and before it deletes the shards."""
    build()
    whole, set_aside = objects(url), ObjectStorage.set_aside

    def commit(storage: ObjectStorage, paths: Collection[str]) -> Any:
        aside = set_aside(storage, paths)
        for path, data in whole.items():
            if path.endswith("manifest.json"):
                storage.write(path, data, "x")
        return aside

    monkeypatch.setattr(ObjectStorage, "set_aside", commit)
    found = collect_garbage(open_cache(url, local=tmp_path / "gc"), older_than=-5, drop_unused=-5)
    assert (len(found.datasets), found.shards) == (1, 0)
    assert objects(url) == whole


def test_a_build_waits_for_a_gc_that_deletes_its_shards(
    build: Built, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`gc` has announced that it deletes a shard before the build leases it: the build must not rely on the shard."""
    built = build().dataset
    home = open_cache(url, local=tmp_path / "gc")
    home.storage.delete(f"datasets/{built.key}/manifest.json")
    home.storage.write("collections/elsewhere-00000000.1.1.000000000000", built.shards.names[0].encode(), "x")
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if seconds == cache_module.COLLECTION_WAIT:
            home.storage.delete(shard_at(built.shards.names[0]))
            home.storage.delete("collections/elsewhere-00000000.1.1.000000000000")

    monkeypatch.setattr(cache_module.time, "sleep", pause)
    again = build(on="there")
    assert cache_module.COLLECTION_WAIT in waits
    assert again.progress.slices_done == 1
    assert set(again.dataset.shards.names) <= {Path(path).stem for path in objects(url)}


def test_dates_are_shared_between_machines(build: Built, url: str) -> None:
    home = open_cache(url)
    path = home.root / "memo" / "dates" / NAME
    home.prepare_root()
    home.write_file(path, b"2026-01-01", "date")
    other = open_cache(url, local=os.fspath(home.root) + "-other")
    assert other.read_file(other.root / "memo" / "dates" / NAME) == b"2026-01-01"
    with pytest.raises(FileNotFoundError):
        other.read_file(other.root / "memo" / "dates" / NAME.replace("a", "c"))
