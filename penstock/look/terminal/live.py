"""Progress of a command or a build: a live line in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.build.progress import Progress

PLAIN_EVERY = 5.0  # seconds between lines outside a terminal


def amount(number: float, unit: str = "") -> str:
    """1234567 → 1.2M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}{unit}"
    return f"{number:.0f}{unit}"


def duration(seconds: float) -> str:
    """3725 → 1:02:05."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


P = TypeVar("P")


class LiveProgress(Generic[P]):
    """Shows progress on a console as one line."""

    def __init__(self, console: Console, line: Callable[[P], str]) -> None:
        self._console, self._line = console, line
        self._live = Live(console=console, transient=True, refresh_per_second=8) if console.is_terminal else None
        self._last = time.monotonic()

    def __enter__(self) -> LiveProgress[P]:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: P) -> None:
        line = self._line(progress)
        if self._live is not None:
            self._live.update(Text(line, style="cyan"))
        elif time.monotonic() - self._last >= PLAIN_EVERY:
            self._last = time.monotonic()
            self._console.print(line, highlight=False)


def workers(progress: Progress) -> str:
    """The number of workers, and of nodes if they are on a cluster."""
    text = f"{progress.workers} worker{'s' if progress.workers != 1 else ''}"
    return f"{text} on {progress.nodes} node{'s' if progress.nodes != 1 else ''}" if progress.nodes else text


def progress_line(progress: Progress) -> str:
    """One line with slices, speed, time left and memory."""
    seconds = max(progress.seconds, 1e-9)
    share = f" {100 * progress.bytes_seen / progress.bytes_total:.0f}%" if progress.bytes_total else ""
    parts = [
        f"slices {progress.slices_done + progress.slices_reused}{share}",
        f"{amount(progress.rows / seconds)} rows/s",
        f"{amount(progress.bytes_per_second, 'B')}/s",
        f"{amount(progress.tokens / seconds)} tokens/s",
        workers(progress),
        f"{progress.memory >> 20} MB each",
    ]
    if progress.slices_reused:
        parts.insert(1, f"{progress.slices_reused} reused")
    if progress.waiting:
        parts.append("waiting for other processes")
    elif progress.eta is not None:
        parts.append(f"{duration(progress.eta)} left")
    return " · ".join(parts)
