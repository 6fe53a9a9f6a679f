"""The loader: batches of a view or a mixture, in order, made ahead of the loop, resumable at any of them.

Enters: a view or a mixture, and the options of `LoaderArguments`. Leaves: batches by iteration. A batch is a pure
function of (dataset, view, plan settings, seed, step): the thread that works ahead changes only when it is made.

Iterating starts at the first batch, or where `load_state_dict` or `seek` left off. A state says which batch comes next;
batches that were made ahead and not served do not count. Each iterator has a thread of its own, and ends it when it is
exhausted, closed or forgotten. Memory: 5 bytes a row when packed, nothing when padded (mixtures: 4).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, Unpack

from penstock.arguments import LoaderArguments
from penstock.errors import FeedError
from penstock.feed.ahead import Ahead
from penstock.feed.assemble import Assembler
from penstock.feed.batch import Batch
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
        self._position = position  # the batch that comes next, as a state says it
        self._entry = position  # where the next iteration begins
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self.steps = settings.steps if settings.epochs is None else self.plan.steps(settings.epochs)

    @property
    def plan(self) -> Plan:
        """Which rows a step holds."""
        return self._assemble.plan

    @property
    def micros(self) -> int:
        """Batches of a step, the same on every rank."""
        return self._assemble.micros

    @property
    def first(self) -> int:
        """The batch that the next iteration begins with, counting micro-batches."""
        return self._entry

    def __len__(self) -> int:
        """How many batches a whole run has, on every rank."""
        assert self.steps is not None
        return self.steps * self.micros

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Any batch, made now; the iteration does not move."""
        if not 0 <= micro < self.micros:
            raise IndexError(f"micro-batch {micro} of {self.micros}")
        return self._produce()(step * self.micros + micro)

    def __iter__(self) -> Feed:
        first, self._entry = self._entry, 0
        feed = Feed(self, first)
        self._feeds.add(feed)
        return feed

    def seek(self, step: int) -> None:
        """Let the next iteration begin with this step; iterations under way end."""
        self._move(step, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain JSON values: the next batch is that of `step`."""
        return state_of(self.served, self.settings, *divmod(self._position, self.micros), self.micros)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a state, which must be of the same dataset, view and plan."""
        self._move(*checked_state(state, self.served, self.settings, self.micros))

    def _move(self, step: int, micro: int) -> None:
        assert self.steps is not None
        if not 0 <= step <= self.steps:
            raise FeedError(f"step {step} is not one of this run's {self.steps}. Raise epochs or steps to go on.")
        self.close()
        self._position = self._entry = step * self.micros + micro

    def close(self) -> None:
        """End all iterations under way, and their threads."""
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
    """From a batch's number to the batch as it is served. It knows no loader and no iterator, so both can be freed."""

    def __init__(self, assemble: Assembler, settings: LoaderSettings) -> None:
        self._assemble = assemble
        self._outlet = None
        if settings.framework is Framework.TORCH:
            from penstock.feed.torch_tensors import Outlet

            self._outlet = Outlet(settings.pin_memory, settings.device)

    def __call__(self, index: int) -> Batch:
        batch = self._assemble(index)
        return batch if self._outlet is None else batch.holding(self._outlet(batch.tensors))


class Feed:
    """One iteration over a loader's batches."""

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._last = len(loader)
        self._micros = loader.micros
        self._next = first
        self._ahead = Ahead(loader._produce(), first, self._last, loader.settings.ahead)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        index = self._next
        if index >= self._last:
            self.close()
            raise StopIteration
        try:
            batch = self._ahead.get(index)
            if batch.step * self._micros + batch.micro != index:
                raise FeedError(
                    f"batch {index} was asked for, and that of step {batch.step}, micro-batch {batch.micro} was made. "
                    "This is a bug; nothing was served."
                )
            received = _received(batch)
        except BaseException:
            self.close()
            raise
        self._next = index + 1
        self._loader._position = self._next
        return received

    def close(self) -> None:
        """End the thread; the iteration can't go on."""
        self._ahead.close()


def _received(batch: Batch) -> Batch:
    """The batch, once its tensors are where the loop will use them."""
    receive = getattr(batch.tensors, "receive", None)
    return batch if receive is None else batch.holding(receive())
