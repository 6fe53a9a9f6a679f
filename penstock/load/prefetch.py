"""Prefetches values in a background thread. Prefetching changes when a value is computed, never what it is.

`Prefetcher` calls a function that depends only on the step number, for consecutive steps, and `get(step)` returns the
results in order. At most `slots` values are pending, including the one being computed. With `slots=0` there is no
thread: `get` computes the value itself.

Guarantees:
- `get(step)` returns the value of that step or raises; it never returns the value of another step.
- An exception in the producer, including KeyboardInterrupt and SystemExit, is raised by the `get` of its step and by
  every later `get`. Values computed before it are returned first.
- `close()` stops the thread and releases the values and the producer. It never raises the producer's exception, so an
  exception in the consuming loop is the one that propagates; a producer exception that no `get` raised is logged.
- A `Prefetcher` that is garbage collected closes itself, because its thread holds no reference to it. All threads stop
  when the interpreter exits.
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
_POLL_SECONDS: Final = 1.0  # how often a waiting `get` checks that the thread is alive


class _Shared(Generic[T]):
    """State shared by both threads. The producer thread references only this, so a `Prefetcher` can be collected."""

    def __init__(self, produce: Callable[[int], T], first: int, last: int, slots: int) -> None:
        self.produce: Callable[[int], T] | None = produce
        self.next, self.last, self.slots = first, last, slots
        self.made: deque[tuple[int, T]] = deque()
        self.error: tuple[int, BaseException] | None = None
        self.closed = threading.Event()
        self.changed = threading.Condition()

    def close(self) -> None:
        """Signal the thread to stop, and release the values and the producer."""
        with self.changed:
            self.closed.set()
            self.made.clear()
            self.produce = None
            self.changed.notify_all()

    def room(self) -> bool:
        """Whether the producer should wake up: to compute a value, or to exit."""
        return self.closed.is_set() or self.next >= self.last or len(self.made) < self.slots


def _run(shared: _Shared[T]) -> None:
    """Thread body: compute the next value as soon as a slot is free."""
    while True:
        with shared.changed:
            shared.changed.wait_for(shared.room)
            if shared.closed.is_set() or shared.next >= shared.last:
                return
            step, produce = shared.next, shared.produce
        assert produce is not None
        try:
            value = produce(step)
        except BaseException as error:  # re-raised by the `get` of this step
            with shared.changed:
                shared.error = step, error
                shared.changed.notify_all()
            return
        with shared.changed:
            if shared.closed.is_set():
                return
            shared.made.append((step, value))
            shared.next = step + 1
            shared.changed.notify_all()
        del value, produce


class Prefetcher(Generic[T]):
    """Computes the values of consecutive steps in a background thread."""

    def __init__(self, produce: Callable[[int], T], first: int, last: int, slots: int = 2) -> None:
        """Prefetch the values of steps first:last, with at most `slots` pending."""
        self._shared = _Shared(produce, first, last, slots)
        self._step = first
        self._error_raised = False  # whether some `get` raised the producer's exception
        self._thread: threading.Thread | None = None
        if slots:
            self._thread = threading.Thread(target=_run, args=(self._shared,), name="penstock-prefetch", daemon=True)
            self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._shared, self._thread)

    @property
    def step(self) -> int:
        """The step that `get` returns next."""
        return self._step

    def get(self, step: int) -> T:
        """Return the value of this step, which must be the next one."""
        shared = self._shared
        if shared.closed.is_set():
            raise FeedError(f"step {step} was requested from a closed feed. Iterate the loader again.")
        if step != self._step or step >= shared.last:
            raise FeedError(
                f"step {step} was requested, but the next step is {self._step} (of {shared.last}). Steps are served in "
                "order; call seek() to move to another step."
            )
        value = self._make(step) if self._thread is None else self._take(step, self._thread)
        self._step += 1
        return value

    def _make(self, step: int) -> T:
        """Compute the value in the calling thread."""
        shared = self._shared
        if shared.error is not None:
            raise shared.error[1]
        assert shared.produce is not None
        try:
            return shared.produce(step)
        except BaseException as error:
            shared.error, self._error_raised = (step, error), True
            raise

    def _take(self, step: int, thread: threading.Thread) -> T:
        shared = self._shared
        with shared.changed:
            while not shared.made:
                if shared.error is not None:
                    self._error_raised = True
                    raise shared.error[1]
                if shared.closed.is_set():
                    raise FeedError(f"the feed was closed while waiting for step {step}.")
                if (
                    not shared.changed.wait(_POLL_SECONDS)
                    and not thread.is_alive()
                    and not shared.made
                    and not shared.error
                ):
                    raise FeedError(
                        f"step {step} will never arrive: the prefetch thread is not running, as after a fork. "
                        "Create the iterator in the process that uses it."
                    )
            made, value = shared.made.popleft()
            shared.changed.notify_all()
        if made != step:
            raise FeedError(
                f"step {step} was requested but step {made} was produced. This is a bug; nothing was served."
            )
        return value

    def close(self) -> None:
        """Stop the thread and release the values and the producer. Calling it again has no effect."""
        error = self._shared.error
        if self._finalizer.detach() is not None:
            _end(self._shared, self._thread)
            if error is not None and not self._error_raised:
                _log.warning("prefetching step %d failed, but the loop ended before reaching it: %r", *error)
        self._shared.error = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(shared: _Shared[T], thread: threading.Thread | None) -> None:
    shared.close()
    if thread is not None and thread is not threading.current_thread():
        thread.join()
