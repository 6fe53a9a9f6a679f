"""Transient errors of network file systems: retried, or reported; nothing is left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import transient
from penstock.errors import StoreError
from penstock.store import claims, files, local
from penstock.store.cache import Cache
from penstock.store.claims import Claims, clean_shared, lease
from penstock.store.gc import clean_orphans
from penstock.store.local import LocalStorage
from tests.support.forks import leftovers

pytestmark = pytest.mark.slow

NAME = "b3-" + "a" * 64
CALLS = {"close", "fsync", "fstat", "link", "mkdir", "open", "replace", "scandir", "stat", "unlink", "utime"}


class FaultyOs:
    """An `os` module whose n-th call to the file server fails, once or from then on."""

    def __init__(self, at: int, number: int, *, answer_lost: bool = False, lasting: bool = False) -> None:
        self.calls = 0
        self._at, self._errno, self._answer_lost, self._lasting = at, number, answer_lost, lasting

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._wrapped(real) if name in CALLS else real

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls != self._at and not (self._lasting and self.calls > self._at):
                return real(*args, **kwargs)
            if self._answer_lost:
                done = real(*args, **kwargs)
                if real is os.open:
                    os.close(done)
                elif real is os.scandir:
                    done.close()
            raise OSError(self._errno, os.strerror(self._errno))

        return call


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[FaultyOs | Any], None]]:
    """Replace `os` in the modules that access a cache's files."""
    monkeypatch.setattr(transient, "RETRY_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(claims, "UNSIGNED_EXPIRY", -1.0)

    def put(fake: FaultyOs | Any) -> None:
        monkeypatch.setattr(local, "os", fake)
        monkeypatch.setattr(files, "os", fake)

    yield put
    put(os)


def build(root: Path) -> None:
    """Everything that a build does to a cache's files."""
    home = Cache(root)
    home.prepare_root()
    clean_orphans(home)
    held = Claims(home.storage)
    assert held.take(NAME)
    home.commit_shard(NAME, b"shard", {})
    held.release(NAME)
    with lease(home.storage, [NAME]):
        assert home.all_present([NAME])
        home.storage.write(f"datasets/{NAME}/manifest.json", b"manifest", "manifest")
    held.close()
    clean_orphans(home)


def check(root: Path) -> None:
    assert Cache(root).shard_path(NAME).read_bytes() == b"shard"
    assert (root / "datasets" / NAME / "manifest.json").read_bytes() == b"manifest"
    assert leftovers(root) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("answer_lost", [False, True])
def test_a_transient_fault_at_every_call_is_retried(
    tmp_path: Path, inject: Callable[[Any], None], number: int, answer_lost: bool
) -> None:
    at, tried = 0, True
    while tried:
        at += 1
        fake = FaultyOs(at, number, answer_lost=answer_lost)
        inject(fake)
        build(tmp_path / str(at))
        tried = fake.calls >= at
        inject(os)
        check(tmp_path / str(at))
    assert at > 60


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOSPC])
def test_a_persistent_fault_is_reported_and_the_rerun_completes(
    tmp_path: Path, inject: Callable[[Any], None], number: int
) -> None:
    at, tried, told = 0, True, 0
    while tried:
        at += 1
        fake = FaultyOs(at, number, lasting=True)
        inject(fake)
        try:
            build(tmp_path / str(at))
        except StoreError:
            told += 1
        except AssertionError:  # from `all_present`: the shard is invisible, so a build would rebuild it
            told += 1
        tried = fake.calls >= at
        inject(os)
        for left in leftovers(tmp_path / str(at)):
            left.unlink()  # this process is alive, so its files are not removed as orphans
        build(tmp_path / str(at))
        check(tmp_path / str(at))
    assert told > 40


def test_a_claim_removed_by_another_host_counts_as_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and read, NFS reports ESTALE."""
    monkeypatch.setattr(transient, "RETRY_PAUSES", (0.0,))
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / NAME).write_text("elsewhere-00000000.1.2")

    def stale(self: LocalStorage, path: str) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(LocalStorage, "read", stale)
    clean_shared(LocalStorage(tmp_path))
    held = Claims(LocalStorage(tmp_path))
    assert held.take(NAME)
    held.close()
    assert list((tmp_path / "claims").iterdir()) == []


def test_the_error_names_the_path_and_the_remedy(tmp_path: Path, inject: Callable[[Any], None]) -> None:
    inject(FaultyOs(1, errno.EIO, lasting=True))
    with pytest.raises(StoreError) as raised:
        LocalStorage(tmp_path).write("a", b"", "x")
    assert str(raised.value) == (
        f"{tmp_path / 'a'} can't be written: Input/output error, after several retries. "
        "Check the disk or file server, then run the same command again: finished slices are kept."
    )
