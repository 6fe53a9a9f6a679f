"""One thing after another, where the end of each is done in a thread while the next has begun.

For shards: they are written, and waited for, while the next slice is being prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
Tell = Callable[[T], None]


class Behind(Generic[T]):
    """Tells the results in order, from the calling thread: each before the next one's end begins."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-behind")
        self._pending: tuple[Future[T], Tell[T]] | None = None

    def do(self, begin: Callable[[], Callable[[], T]], tell: Tell[T]) -> None:
        """Begin something, which gives its end. Whatever goes wrong, what was begun before is told first."""
        try:
            end = begin()
        finally:
            self.settle()
        self._pending = self._thread.submit(end), tell

    def settle(self) -> None:
        """Wait for what is pending, and tell its result or raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            result, tell = pending
            tell(result.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._thread:
            self.settle()
