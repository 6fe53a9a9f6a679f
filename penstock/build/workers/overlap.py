"""Overlaps two-step tasks: the second step of each runs in a thread while the first step of the next runs.

A build writes each shard this way while it prepares the next slice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
OnResult = Callable[[T], None]


class Overlap(Generic[T]):
    """Runs tasks in order. Results are delivered on the calling thread, each before the next second step starts."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-overlap")
        self._pending: tuple[Future[T], OnResult[T]] | None = None

    def run(self, begin: Callable[[], Callable[[], T]], on_result: OnResult[T]) -> None:
        """Runs `begin` and submits the function it returns. The previous result is delivered even if `begin` fails."""
        try:
            end = begin()
        finally:
            self.flush()
        self._pending = self._thread.submit(end), on_result

    def flush(self) -> None:
        """Waits for the pending task, and delivers its result or raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            result, on_result = pending
            on_result(result.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._thread:
            self.flush()
