"""Progress of `ps.prepare`: a line in a terminal, a display in a notebook, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.look.terminal.live import LiveProgress, progress_line
from penstock.look.terminal.outcome import as_html, facts, one_line

if TYPE_CHECKING:
    from penstock.build.prepare import Outcome
    from penstock.build.progress import Progress

REFRESH = 0.2  # seconds between updates of a notebook's display


class Watched:
    """Shows nothing."""

    def __enter__(self) -> Watched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, progress: Progress) -> None:
        """Called after every slice."""

    def done(self, outcome: Outcome) -> None:
        """Called when the dataset is complete."""


class WatchedInTerminal(Watched):
    """A live line during the build and a final line, both on standard error."""

    def __init__(self) -> None:
        from penstock.look.terminal.console import Terminal

        self._console = Terminal(stderr=True)
        self._live = LiveProgress(self._console, progress_line)

    def __enter__(self) -> Watched:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, progress: Progress) -> None:
        self._live(progress)

    def done(self, outcome: Outcome) -> None:
        self._console.print(one_line(outcome), highlight=False, markup=False, soft_wrap=True)


class WatchedInNotebook(Watched):
    """A display that is updated in place and finally shows the summary."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._last >= REFRESH:
            self._last = time.monotonic()
            self._show(f"<code>{progress_line(progress)}</code>", progress_line(progress))

    def done(self, outcome: Outcome) -> None:
        self._show(as_html(one_line(outcome), facts(outcome)), one_line(outcome))

    def _show(self, html: str, text: str) -> None:
        from IPython.display import display

        shown = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)


def watched(progress: bool | None) -> Watched:
    """The progress display: always with True, never with False, else in terminals and notebooks."""
    if progress is False:
        return Watched()
    if _in_notebook():
        return WatchedInNotebook()
    return WatchedInTerminal() if progress or sys.stderr.isatty() else Watched()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None
