"""Makes values ahead of the one who asks for them, in a background thread. It changes when they are made, never what.

Enters: a function from a step to a value, that depends on the step alone, and a range of steps. Leaves: `get(step)`,
in order. At most `slots` values are made and not yet taken, the one in the making included; with 0 slots everything
happens inside `get`, with no thread.

The contract:
- `get(step)` gives the value of this step or raises; a value of another step is never served.
- An error of the producer is raised by the `get` of its step, and by every later one: whatever it is, KeyboardInterrupt
  and SystemExit too. Values made before it are served first.
- `close()` ends the thread and lets go of values and producer. It never raises the producer's error, so an exception
  of the loop is the one that propagates; an error that nobody asked for is logged.
- An `Ahead` that is forgotten closes itself: its thread does not keep it alive. So does the end of the interpreter.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from penstock.errors import FeedError

T = TypeVar("T")
_log = logging.getLogger(__name__)
_PATIENCE: Final = 1.0  # seconds between looks at whether the thread is still there


class _Desk(Generic[T]):
    """What the two threads share. The producer's thread knows this and nothing else, so that `Ahead` can be freed."""

    def __init__(self, produce: Callable[[int], T], first: int, last: int, slots: int) -> None:
        self.produce: Callable[[int], T] | None = produce
        self.next, self.last, self.slots = first, last, slots
        self.made: deque[tuple[int, T]] = deque()
        self.error: tuple[int, BaseException] | None = None
        self.closed = threading.Event()
        self.changed = threading.Condition()

    def close(self) -> None:
        """Tell the thread to end, and let go of everything."""
        with self.changed:
            self.closed.set()
            self.made.clear()
            self.produce = None
            self.changed.notify_all()

    def room(self) -> bool:
        """Whether the producer has something to do, or to leave for."""
        return self.closed.is_set() or self.next >= self.last or len(self.made) < self.slots


def _work(desk: _Desk[T]) -> None:
    """The thread: make the next value as soon as there is room for it."""
    while True:
        with desk.changed:
            desk.changed.wait_for(desk.room)
            if desk.closed.is_set() or desk.next >= desk.last:
                return
            step, produce = desk.next, desk.produce
        assert produce is not None
        try:
            value = produce(step)
        except BaseException as error:  # whatever it is, it belongs to the one who asks for this step
            with desk.changed:
                desk.error = step, error
                desk.changed.notify_all()
            return
        with desk.changed:
            if desk.closed.is_set():
                return
            desk.made.append((step, value))
            desk.next = step + 1
            desk.changed.notify_all()
        del value, produce


class Ahead(Generic[T]):
    """Values of consecutive steps, made ahead."""

    def __init__(self, produce: Callable[[int], T], first: int, last: int, slots: int = 2) -> None:
        """Values of the steps first:last, with up to `slots` of them waiting."""
        self._desk = _Desk(produce, first, last, slots)
        self._step = first
        self._told = False  # whether a `get` raised the producer's error
        self._thread: threading.Thread | None = None
        if slots:
            self._thread = threading.Thread(target=_work, args=(self._desk,), name="penstock-ahead", daemon=True)
            self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._desk, self._thread)

    @property
    def step(self) -> int:
        """The step that `get` gives next."""
        return self._step

    def get(self, step: int) -> T:
        """The value of this step, which must be the next one."""
        desk = self._desk
        if desk.closed.is_set():
            raise FeedError(f"step {step} was asked of a feed that is closed. Iterate the loader again.")
        if step != self._step or step >= desk.last:
            raise FeedError(
                f"step {step} was asked for, but the next one is {self._step} (of {desk.last}). Steps come in order; "
                "seek to the step, or start again there."
            )
        value = self._make(step) if self._thread is None else self._take(step, self._thread)
        self._step += 1
        return value

    def _make(self, step: int) -> T:
        """Without a thread: now."""
        desk = self._desk
        if desk.error is not None:
            raise desk.error[1]
        assert desk.produce is not None
        try:
            return desk.produce(step)
        except BaseException as error:
            desk.error, self._told = (step, error), True
            raise

    def _take(self, step: int, thread: threading.Thread) -> T:
        desk = self._desk
        with desk.changed:
            while not desk.made:
                if desk.error is not None:
                    self._told = True
                    raise desk.error[1]
                if desk.closed.is_set():
                    raise FeedError(f"the feed was closed while step {step} was waited for.")
                if not desk.changed.wait(_PATIENCE) and not thread.is_alive() and not desk.made and not desk.error:
                    raise FeedError(
                        f"nobody makes step {step}: the thread is gone, as after a fork. "
                        "Iterate the loader in the process that uses it."
                    )
            made, value = desk.made.popleft()
            desk.changed.notify_all()
        if made != step:
            raise FeedError(f"step {step} was asked for and step {made} was made. This is a bug; nothing was served.")
        return value

    def close(self) -> None:
        """End the thread, and let go of values and producer; safe to call again."""
        error = self._desk.error
        if self._finalizer.detach() is not None:
            _end(self._desk, self._thread)
            if error is not None and not self._told:
                _log.warning("step %d failed ahead of the loop, which never came to it: %r", *error)
        self._desk.error = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(desk: _Desk[T], thread: threading.Thread | None) -> None:
    desk.close()
    if thread is not None and thread is not threading.current_thread():
        thread.join()
