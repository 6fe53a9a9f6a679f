"""What claims, leases and `gc` rely on holds in a folder as in an object store."""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path

import pytest

from penstock.errors import StoreError
from penstock.store import claims as claims_module
from penstock.store.claims import Claims, clean_shared, lease, leased_names
from penstock.store.files import host_id
from penstock.store.local import LocalStorage
from penstock.store.object_storage import ObjectStorage
from penstock.store.storage import Storage, has_marker, is_cache, shard_at
from tests.support.object_servers import Proxy

pytestmark = pytest.mark.slow
NAME = "b3-" + "ab" * 32
CLAIM, DEAD = f"claims/{NAME}", f"{host_id()}.999999999.1"


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return LocalStorage(tmp_path)
    s3: Proxy = request.getfixturevalue("s3")
    return ObjectStorage(f"s3://{s3.bucket}/caches/one")


def test_files_are_written_read_listed_and_deleted(storage: Storage) -> None:
    path = shard_at(NAME)
    assert (storage.read(path), storage.stat(path), storage.entries("shards")) == (None, None, [])
    storage.write(path, b"shard", "x")
    storage.write(path, b"other", "x")
    assert storage.read(path) == b"other"
    found = storage.stat(path)
    assert found is not None
    (listed,) = storage.entries("shards")
    assert (listed.path, listed.size, listed.version) == (path, 5, found.version)
    assert storage.age(listed) < 60
    assert "shards" in storage.names()
    storage.write("shards/ab/mine.txt", b"not ours", "x")
    assert [entry.path for entry in storage.entries("shards")] == [path]
    storage.delete(path)
    assert storage.read(path) is None
    storage.delete(path)


def test_one_of_many_creates_and_one_of_many_replaces(storage: Storage) -> None:
    won: list[bool] = []

    def race(act: object) -> int:
        won.clear()
        threads = [threading.Thread(target=lambda n=n: won.append(act(n))) for n in range(6)]  # type: ignore[operator]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(won)

    assert race(lambda number: storage.create(CLAIM, f"{number}".encode(), "claim")) == 1
    found = storage.stat(CLAIM)
    assert found is not None
    assert race(lambda number: storage.replace(CLAIM, f"{number} again".encode(), found, "claim")) == 1
    assert not storage.replace(CLAIM, b"late", found, "claim")
    assert (storage.read(CLAIM) or b"").endswith(b"again")


def test_claims_leases_and_what_the_dead_left(storage: Storage) -> None:
    with lease(storage, [NAME, "another"]):
        assert leased_names(storage) == {NAME, "another"}
    assert leased_names(storage) == set()
    ours, theirs = Claims(storage), Claims(storage)
    assert ours.take(NAME)
    assert not theirs.take(NAME)
    assert clean_shared(storage) == 0
    ours.close()
    theirs.close()
    storage.write(CLAIM, DEAD.encode(), "x")
    storage.write(f"leases/{DEAD}.0123456789ab", NAME.encode(), "x")
    assert leased_names(storage) == set()
    third = Claims(storage)  # has no listing of a moment ago
    assert third.take(NAME)  # from the dead
    third.close()
    assert clean_shared(storage) == 1
    assert storage.entries("claims") == storage.entries("leases") == []


def test_what_is_set_aside_is_missing_or_announced(storage: Storage) -> None:
    storage.write(shard_at(NAME), b"shard", "x")
    storage.write(shard_at(NAME, "index"), b"index", "x")
    paths = [shard_at(NAME), shard_at(NAME, "index")]
    assert storage.lists_shards([NAME])
    aside = storage.set_aside(paths)
    assert aside.holds(paths)
    assert storage.about_to_go([NAME]) or not storage.lists_shards([NAME])
    aside.restore(paths)
    aside.close()
    assert not storage.about_to_go([NAME])
    assert storage.lists_shards([NAME])
    aside = storage.set_aside(paths)
    aside.delete(paths)
    aside.close()
    assert not storage.about_to_go([NAME])
    assert storage.entries("shards") == storage.entries("collections") == storage.entries("tmp") == []


def test_markers(storage: Storage) -> None:
    assert not is_cache(storage)
    storage.write("thesis.txt", b"mine", "x")
    with pytest.raises(StoreError, match="is not a Penstock cache: it holds other"):
        is_cache(storage)
    storage.write("penstock-cache.json", b'{"format":1}', "x")
    assert has_marker(storage)


def test_the_clock_is_that_of_the_server(storage: Storage) -> None:
    assert abs(storage.now() - time.time()) < 60
    storage.check_writable()


def test_a_claim_expires_in_a_bucket_with_versions(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing doesn't name the versions of objects, which a single request does."""
    enabled = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    place, kind = f"{s3.endpoint}/{s3.bucket}?versioning", {"Content-Type": "application/xml"}
    request = urllib.request.Request(place, data=enabled, headers=kind, method="PUT")
    urllib.request.urlopen(request).close()
    folder = ObjectStorage(f"s3://{s3.bucket}/caches/one")
    folder.write(CLAIM, b"elsewhere-00000000.1.1\nx\n0", "x")
    found = folder.stat(CLAIM)
    assert found is not None
    assert found.generation
    claims = Claims(folder)
    assert not claims.take(NAME)
    monkeypatch.setattr(claims_module, "EXPIRY", -1.0)
    assert claims.take(NAME)
    claims.close()
    assert folder.entries("claims") == []
