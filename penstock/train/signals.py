"""SIGTERM and SIGINT: the step in progress is finished and saved, then the run ends with 143 or 130.

Inside `Signals.deferring()` a signal is only noted; a second one of the same kind ends the process at once. Outside,
while data and model are made ready, there is nothing to save and a signal ends the process at once, too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

KINDS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Notes that the process was asked to stop."""

    def __init__(self) -> None:
        self.received = 0  # number of the signal, 0 for none
        self._deferring = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Take over the signals; only a main thread can, elsewhere they stay as they are."""
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
        """Let steps finish before a signal has its way."""
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
