"""Downloads the shards that the next steps need, if the dataset is in an object store.

The plan knows which rows each step holds, and so which shards: a thread walks through the plan ahead of the feed and
downloads them to the local tier, several at a time and in the order in which they are needed. What it downloads and
when never changes a batch: a shard that is not there yet is downloaded, or waited for, when its batch is assembled.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.errors import PenstockError
from penstock.view.gather import ShardSet

DOWNLOADS = 8  # at a time
AHEAD_BATCHES = 1000

ShardsOf = Callable[[int], list[ShardSet]]


class _Window:
    """How far the downloads may be ahead of the feed. It references no iterator, so that one can be collected."""

    def __init__(self, first: int, max_bytes: int) -> None:
        self._position = first  # the next batch to serve
        self._max_bytes = max_bytes
        self._bytes: dict[int, int] = {}  # requested for each batch that was not served yet
        self._closed = False
        self._changed = threading.Condition()
        self.free = threading.Semaphore(2 * DOWNLOADS)

    def served(self, index: int) -> None:
        with self._changed:
            self._position = index + 1
            for old in [batch for batch in self._bytes if batch <= index]:
                del self._bytes[old]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def is_closed(self) -> bool:
        return self._closed

    def wait_for_room(self, index: int) -> bool:
        """Wait until this batch may be looked at; False if the window was closed."""

        def has_room() -> bool:
            near = index <= self._position
            few = index < self._position + AHEAD_BATCHES and sum(self._bytes.values()) < self._max_bytes
            return self._closed or near or few

        with self._changed:
            self._changed.wait_for(has_room)
            return not self._closed

    def requested(self, index: int, size: int) -> None:
        with self._changed:
            if index >= self._position:
                self._bytes[index] = self._bytes.get(index, 0) + size


class Downloads:
    """Walks through the plan from batch `first` on, with at most `max_bytes` of shards ahead of the feed."""

    def __init__(self, shards_of: ShardsOf, first: int, last: int, max_bytes: int) -> None:
        """`shards_of` returns the shards of a batch, by its index."""
        self._window = _Window(first, max_bytes)
        threading.Thread(
            target=_walk, args=(self._window, shards_of, first, last), name="penstock-downloads", daemon=True
        ).start()
        self._finalizer = weakref.finalize(self, self._window.close)

    def served(self, index: int) -> None:
        """Batch `index` was served."""
        self._window.served(index)

    def close(self) -> None:
        """Stop. Downloads under way end by themselves."""
        self._finalizer()


def _walk(window: _Window, shards_of: ShardsOf, first: int, last: int) -> None:
    seen: set[tuple[int, int]] = set()
    pool = ThreadPoolExecutor(DOWNLOADS, "penstock-download")
    try:
        for index in range(first, last):
            if not window.wait_for_room(index):
                return
            for part in shards_of(index):
                new = [shard for shard in part.shards if (id(part.dataset), shard) not in seen]
                seen.update((id(part.dataset), shard) for shard in new)
                window.requested(index, sum(map(part.dataset.shard_bytes, new)))
                for shard in new:
                    while not window.free.acquire(timeout=0.5):
                        if window.is_closed():
                            return
                    pool.submit(_download, window, part, shard)
            if len(seen) > 1 << 16:  # early ones may have left the local tier since
                seen.clear()
    except PenstockError:  # assembling the batch raises it
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=window.is_closed())


def _download(window: _Window, part: ShardSet, shard: int) -> None:
    try:
        if not window.is_closed():
            with contextlib.suppress(PenstockError):  # the batch that needs the shard tries again, and raises it
                part.dataset.fetch((shard,))
    finally:
        window.free.release()
