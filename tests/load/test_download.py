"""Shards are downloaded ahead of the feed: in the order of the plan, not too far ahead, and never after the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from penstock.errors import StoreError
from penstock.load.gather import Downloads, ShardSet


class Store:
    """A dataset (and its shards) that records which shards were fetched."""

    def __init__(self, *, broken: int = -1) -> None:
        self.fetched: list[int] = []
        self._broken = broken
        self._lock = threading.Lock()

    def fetch(self, shards: Iterable[int]) -> None:
        with self._lock:
            self.fetched += shards
        if self._broken in shards:
            raise StoreError("broken")

    @property
    def shards(self) -> Store:
        return self

    bytes = [10] * 100


def downloads(store: Any, batches: list[list[int]], max_bytes: int = 1000) -> Downloads:
    return Downloads(lambda index: [ShardSet(store, batches[index])], 0, len(batches), max_bytes)


def settled(store: Store, count: int) -> list[int]:
    """What was fetched, once it is that many; a little later it must not be more."""
    for _ in range(300):
        if len(store.fetched) >= count:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    return sorted(store.fetched)


def test_each_shard_once() -> None:
    store = Store()
    ahead = downloads(store, [[1, 2], [2, 3], [1, 4]])
    assert settled(store, 4) == [1, 2, 3, 4]
    ahead.close()


def test_not_too_far_ahead() -> None:
    """Two shards of ten bytes fit ahead of the batch that is served next."""
    store = Store()
    ahead = downloads(store, [[number] for number in range(10)], max_bytes=20)
    assert settled(store, 2) == [0, 1]
    ahead.served(0)
    assert settled(store, 3) == [0, 1, 2]
    ahead.served(5)
    assert settled(store, 8) == list(range(8))
    ahead.close()
    ahead.served(9)
    assert settled(store, 8) == list(range(8))


def test_errors_are_left_to_the_batch() -> None:
    store = Store(broken=1)
    ahead = downloads(store, [[0], [1], [2]])
    assert settled(store, 3) == [0, 1, 2]
    ahead.close()


def test_a_dropped_feed_stops() -> None:
    store = Store()
    ahead = downloads(store, [[number] for number in range(10)], max_bytes=20)
    settled(store, 2)
    del ahead
    for _ in range(100):
        if not any(thread.name == "penstock-downloads" for thread in threading.enumerate()):
            return
        time.sleep(0.02)
    raise AssertionError("the thread goes on")
