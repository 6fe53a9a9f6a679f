"""Divides the slices among any number of processes that build the same data, through claims in the cache.

A process first takes its own share, then any slices that others have neither finished nor claimed. Slices are found and
claimed only when a worker is ready for them, so processes that start together finish together, even if some never start
or die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto

from penstock.build.slice_plans import SliceFinder
from penstock.build.workers.process import Task
from penstock.errors import SourceError
from penstock.prepare.sources.slices import Slice, SourceFile
from penstock.store.cache import Cache
from penstock.store.manifest import shard_name

OnTask = Callable[[Task], None]


class _Status(Enum):
    OURS = auto()
    DONE = auto()  # the shard exists
    BUSY = auto()  # another process has claimed it


class Sharing:
    """The slices of one build from the view of this process. `slices` is filled during the first pass."""

    def __init__(
        self,
        cache: Cache,
        finder: SliceFinder,
        files: Sequence[SourceFile],
        recipe: str,
        *,
        force: bool,
        one_host: bool = True,  # whether the workers run on this host, and so can share what is read here
    ) -> None:
        self._cache = cache
        self._finder = finder
        self._files = files
        self._recipe = recipe
        self._force = force
        self._one_host = one_host
        self.claims = cache.claims()
        self._seen: set[str] = set()
        self._before: dict[str, object] = {}  # with `force`: the files that existed at the start
        self.slices: list[Slice] = []
        self.pending: list[Task] = []  # slices of other ranks or processes

    def own(self, found: Iterator[Slice], rank: int, world_size: int, reused: OnTask) -> Iterator[Task]:
        """Yields our share of the slices as they are found; unfinished slices of others go to `pending`."""
        for number, part in enumerate(found):
            task = Task(shard_name(self._recipe, part.digest), part, self._files[part.file].path)
            self.slices.append(part.without_data())
            if task.name in self._seen:  # the same bytes occur twice in the data; one shard serves both
                reused(task)
                continue
            self._seen.add(task.name)
            status = self._claim(task, ours=number % world_size == rank)
            if status is _Status.OURS:
                if self._one_host:
                    self._finder.prefetch(part)
                yield task
            elif status is _Status.DONE:
                reused(task)
            else:
                self.pending.append(replace(task, slice=part.without_data()))

    def others(self, finished: OnTask) -> Iterator[Task]:
        """Yields the pending slices that no other process has claimed."""
        waiting, self.pending = self.pending, []
        self._cache.refresh(task.name for task in waiting)
        for number, task in enumerate(waiting):
            status = self._claim(task)
            if status is _Status.BUSY:
                self.pending.append(task)
            elif status is _Status.DONE:
                finished(task)
            elif not task.slice.kind.is_streamed:
                if self._one_host:
                    self._finder.prefetch(task.slice)
                yield task
            else:
                yield from self._streamed(task, waiting[number + 1 :], finished)
                return

    def _streamed(self, first: Task, rest: Sequence[Task], finished: OnTask) -> Iterator[Task]:
        """Yields slices of streamed sources, after reading their bytes again in one pass."""
        wanted = {(task.slice.file, task.slice.first_row): task for task in (first, *rest)}
        for part in self._finder.find():
            task = wanted.pop((part.file, part.first_row), None)
            if task is None:
                continue
            if task.slice.digest != part.digest:
                break
            status = _Status.OURS if task is first else self._claim(task)
            if status is _Status.OURS:
                yield replace(task, slice=part)
            elif status is _Status.DONE:
                finished(task)
            else:
                self.pending.append(task)
            if not wanted:
                return
        raise SourceError(
            f"{first.path}: changed while it was read. Run again once nothing writes to it; finished slices are kept."
        )

    def _claim(self, task: Task, *, ours: bool = True) -> _Status:
        if self._is_done(task.name):
            return _Status.DONE
        if not ours or not self.claims.take(task.name):
            return _Status.BUSY
        if self._is_done(task.name, now=True):  # finished by another process in the meantime
            self.claims.release(task.name)
            return _Status.DONE
        return _Status.OURS

    def _is_done(self, name: str, *, now: bool = False) -> bool:
        if not self._force:
            return self._cache.is_committed(name) if now else self._cache.has_shard(name)
        stamp = self._cache.shard_stamp(name)
        return self._before.setdefault(name, stamp) != stamp

    def close(self) -> None:
        """Releases all claims."""
        self.claims.close()
