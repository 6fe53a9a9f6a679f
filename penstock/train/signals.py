"""SIGTERM and SIGINT: the current step is finished and saved, then the run exits with 143 or 130.

Within `Signals.deferring()` a signal is only recorded; a second one of the same kind ends the process immediately.
Outside, while data and model are prepared, there is nothing to save and the first signal ends the process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

KINDS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Records that the process was asked to stop."""

    def __init__(self) -> None:
        self.received = 0  # signal number, or 0
        self._deferring = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Installs the signal handlers; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self._note) for kind in KINDS}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defers signals until the step ends."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._deferring or self.received == number:
            raise SystemExit(128 + number)
        self.received = number
