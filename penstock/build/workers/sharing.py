"""Which slices are ours to make, when any number of processes work on the same data: decided through claims.

First our own share, then whatever others have neither finished nor claimed. Slices are found, and claimed, only when
a worker is ready for them, so processes that started at once end at once, whoever never starts or dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from penstock.build.planning import SliceFinder
from penstock.build.workers.process import Task
from penstock.errors import SourceError
from penstock.sources import Slice, SourceFile
from penstock.store.cache import Cache
from penstock.store.claims import Claims
from penstock.store.manifest import shard_name

OnTask = Callable[[Task], None]


class _Answer(Enum):
    OURS = auto()
    DONE = auto()  # the shard is there
    BUSY = auto()  # another process has claimed it


class Sharing:
    """The slices of one build, as this process sees them. `slices` fills up during the first pass."""

    def __init__(
        self, cache: Cache, finder: SliceFinder, files: Sequence[SourceFile], recipe: str, *, force: bool
    ) -> None:
        self._cache = cache
        self._finder = finder
        self._files = files
        self._recipe = recipe
        self._force = force
        self._claims = Claims(cache.tree)
        self._seen: set[str] = set()
        self._before: dict[str, tuple[int, int] | None] = {}  # with `force`: what was there when we first looked
        self.slices: list[Slice] = []
        self.left: list[Task] = []  # what other ranks or processes should do

    def own(self, found: Iterator[Slice], rank: int, world_size: int, reused: OnTask) -> Iterator[Task]:
        """Our share of the slices, as they are found; what is neither there nor ours goes to `left`."""
        for number, part in enumerate(found):
            task = Task(shard_name(self._recipe, part.digest), part, self._files[part.file].path)
            self.slices.append(part.without_data())
            if task.name in self._seen:  # the same bytes stand elsewhere in the data; one shard serves both
                reused(task)
                continue
            self._seen.add(task.name)
            answer = self._ask(task, ours=number % world_size == rank)
            if answer is _Answer.OURS:
                yield task
            elif answer is _Answer.DONE:
                reused(task)
            else:
                self.left.append(replace(task, slice=part.without_data()))

    def others(self, finished: OnTask) -> Iterator[Task]:
        """What is left and nobody works on."""
        waiting, self.left = self.left, []
        for number, task in enumerate(waiting):
            answer = self._ask(task)
            if answer is _Answer.BUSY:
                self.left.append(task)
            elif answer is _Answer.DONE:
                finished(task)
            elif not task.slice.kind.is_streamed:
                yield task
            else:
                yield from self._streamed(task, waiting[number + 1 :], finished)
                return

    def _streamed(self, first: Task, rest: Sequence[Task], finished: OnTask) -> Iterator[Task]:
        """Slices of streamed sources are read again for their bytes, in one pass."""
        wanted = {(task.slice.file, task.slice.first_row): task for task in (first, *rest)}
        for part in self._finder.find():
            task = wanted.pop((part.file, part.first_row), None)
            if task is None:
                continue
            if task.slice.digest != part.digest:
                break
            answer = _Answer.OURS if task is first else self._ask(task)
            if answer is _Answer.OURS:
                yield replace(task, slice=part)
            elif answer is _Answer.DONE:
                finished(task)
            else:
                self.left.append(task)
            if not wanted:
                return
        raise SourceError(
            f"{first.path}: changed while it was read. Run again once nothing writes to it; finished slices are kept."
        )

    def _ask(self, task: Task, *, ours: bool = True) -> _Answer:
        if self._is_there(task.name):
            return _Answer.DONE
        if not ours or not self._claims.take(task.name):
            return _Answer.BUSY
        if self._is_there(task.name):  # finished by another process since we looked
            self._claims.release(task.name)
            return _Answer.DONE
        return _Answer.OURS

    def _is_there(self, name: str) -> bool:
        if not self._force:
            return self._cache.has_shard(name)
        stamp = _stamp(self._cache.shard_path(name))
        return self._before.setdefault(name, stamp) != stamp

    def release(self, task: Task) -> None:
        """The task is done."""
        self._claims.release(task.name)

    def close(self) -> None:
        """Give all claims back."""
        self._claims.close()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
