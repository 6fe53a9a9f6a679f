"""The loader: iterates over the batches of a view or a mixture, prefetched and resumable at any batch.

A batch is a pure function of (dataset, view, plan settings, seed, step); the prefetch thread only changes when it is
computed.

Iteration starts at the first batch, or at the position set by `load_state_dict` or `seek`. A state names the next batch
to serve; batches that were prefetched but not served do not count. Each iterator owns one thread, which stops when the
iterator is exhausted, closed or garbage collected, and serves one thread at a time. Memory: 5 bytes a row when packed,
none when padded (mixtures: 4).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from penstock.arguments import LoaderArguments
from penstock.errors import FeedError
from penstock.feed.assemble import Assembler
from penstock.feed.batch import Batch
from penstock.feed.download import Downloads
from penstock.feed.prefetch import Prefetcher
from penstock.feed.settings import Framework, LoaderSettings, loader_settings
from penstock.feed.state import checked_state, state_of
from penstock.pack.plan import Plan
from penstock.view.view import Served


class Loader:
    """Iterates over the batches of one rank."""

    def __init__(self, served: Served, **options: Unpack[LoaderArguments]) -> None:
        self._start(served, loader_settings(served, options), 0)

    def _start(self, served: Served, settings: LoaderSettings, position: int) -> None:
        self.served = served
        self.settings = settings
        self._assemble = Assembler(served, settings)
        self._download_bytes = self._assemble.download_bytes
        self._position = position  # the next batch, as recorded in a state
        self._entry = position  # where the next iteration starts
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self.steps = settings.steps if settings.epochs is None else self.plan.steps(settings.epochs)

    @property
    def plan(self) -> Plan:
        """The plan that assigns rows to steps."""
        return self._assemble.plan

    @property
    def micros(self) -> int:
        """Micro-batches per step, the same on every rank."""
        return self._assemble.micros

    @property
    def first(self) -> int:
        """Index of the first batch of the next iteration, in micro-batches."""
        return self._entry

    def __len__(self) -> int:
        """The number of batches in the whole run, on every rank."""
        assert self.steps is not None
        return self.steps * self.micros

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Compute any batch, without moving the iteration."""
        if not 0 <= micro < self.micros:
            raise IndexError(f"micro-batch {micro} of {self.micros}")
        return _received(self._produce()(step * self.micros + micro))

    def __iter__(self) -> Feed:
        first, self._entry = self._entry, 0
        feed = Feed(self, first)
        self._feeds.add(feed)
        return feed

    def seek(self, step: int) -> None:
        """Start the next iteration at this step. Running iterations are closed."""
        self._move(step, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position of the run, as plain JSON values; `step` is the step of the next batch."""
        return state_of(self.served, self.settings, *divmod(self._position, self.micros), self.micros)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at a saved state, which must have the same dataset, view and plan."""
        self._move(*checked_state(state, self.served, self.settings, self.micros))

    def _move(self, step: int, micro: int) -> None:
        assert self.steps is not None
        if not 0 <= step <= self.steps:
            raise FeedError(f"step {step} is beyond this run's {self.steps} steps. Raise epochs or steps to continue.")
        self.close()
        self._position = self._entry = step * self.micros + micro

    def close(self) -> None:
        """Close all running iterations and stop their threads."""
        for feed in list(self._feeds):
            feed.close()

    def _produce(self) -> _Producer:
        return _Producer(self._assemble, self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, tuple[Served, LoaderSettings, int]]:
        return _restored, (self.served, self.settings, self._entry)

    def __repr__(self) -> str:
        return f"Loader({self.settings.collate}, {self.steps} steps of {self.settings.plan.batch_size} rows)"


def _restored(served: Served, settings: LoaderSettings, position: int) -> Loader:
    loader = Loader.__new__(Loader)
    loader._start(served, settings, position)
    return loader


class _Producer:
    """Computes a batch from its index. It references neither loader nor iterator, so both can be collected."""

    def __init__(self, assemble: Assembler, settings: LoaderSettings) -> None:
        self._assemble = assemble
        self._convert = None
        if settings.framework is Framework.TORCH:
            from penstock.feed.torch_tensors import TensorConverter

            self._convert = TensorConverter(settings.pin_memory, settings.device)

    def __call__(self, index: int) -> Batch:
        batch = self._assemble(index)
        return batch if self._convert is None else batch.holding(self._convert(batch.tensors))


class Feed:
    """One iteration over a loader's batches, for one thread at a time."""

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._last = len(loader)
        self._micros = loader.micros
        self._next = first
        self._busy = threading.Lock()
        self._downloads = None
        if loader._download_bytes:
            self._downloads = Downloads(loader._assemble.shards, first, self._last, loader._download_bytes)
        self._prefetcher = Prefetcher(loader._produce(), first, self._last, loader.settings.ahead)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        if not self._busy.acquire(blocking=False):
            raise FeedError(
                "two threads called next() on one iterator of a loader at the same time. Let one thread take the "
                "batches and hand them on, or give each thread its own iter(loader)."
            )
        try:
            return self._take()
        finally:
            self._busy.release()

    def _take(self) -> Batch:
        index = self._next
        if index >= self._last:
            self.close()
            raise StopIteration
        try:
            batch = self._prefetcher.get(index)
            if batch.step * self._micros + batch.micro != index:
                raise FeedError(
                    f"batch {index} was requested but step {batch.step}, micro-batch {batch.micro} was produced. "
                    "This is a bug; nothing was served."
                )
            received = _received(batch)
        except BaseException:
            self.close()
            raise
        self._next = index + 1
        if self._downloads is not None:
            self._downloads.served(index)
        self._loader._position = self._next
        return received

    def close(self) -> None:
        """Stop the threads. A closed iteration can't be resumed."""
        if self._downloads is not None:
            self._downloads.close()
        self._prefetcher.close()


def _received(batch: Batch) -> Batch:
    """Wait until a batch's tensors are on their device."""
    receive = getattr(batch.tensors, "receive", None)
    return batch if receive is None else batch.holding(receive())
