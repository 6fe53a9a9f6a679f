"""Progress of a command or a build: a live line in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from penstock.build.progress import Progress
from penstock.prepare.chat.notes import describe_note
from penstock.printable import printable

if TYPE_CHECKING:
    from penstock.build.outcome import Outcome
    from penstock.build.progress import Progress
    from penstock.store.dataset import Dataset


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


# ---- outcome ---------------------------------------------------------------------------------------------------------
#
# The summary of a build, as facts for a terminal, a notebook or a script.


WARNING = "warning"
Fact = tuple[str, str]  # (label, text); the label is '' if the line continues the one above


def facts(outcome: Outcome) -> list[Fact]:
    """Rows and tokens processed, rows left out, and speed."""
    progress = outcome.progress
    found = [*dataset_facts(outcome.dataset), ("slices", _slices(outcome))]
    if outcome.tokenizer:
        found.append(("tokenizer", outcome.tokenizer))
    if progress.slices_done:
        found.append(("engines", _engines(outcome)))
        speed = f"{amount(progress.bytes_per_second, 'B')}/s, {amount(progress.rows / progress.seconds)} rows/s"
        found.append(("time", f"{duration(progress.seconds)} ({speed}, {workers(progress)})"))
    if progress.checked:
        found.append(("spot check", _checks(outcome)))
    if progress.others_checked:
        refused = f", {progress.others_refused} refused and rebuilt" if progress.others_refused else ""
        compared = f"{progress.others_rows:,} rows compared with the reference engines{refused}"
        found.append(("others' shards", f"{progress.others_checked}: {compared}"))
    if outcome.quarantine:
        found.append(("set aside", str(outcome.quarantine)))
    return [*found, *((WARNING, text) for text in outcome.warnings)]


def dataset_facts(dataset: Dataset) -> list[Fact]:
    """The contents of a dataset, according to its ledger."""
    ledger = dataset.ledger
    rejected = sum(ledger.rejected.values())
    found = [("rows", f"{ledger.rows:,} in = {ledger.kept:,} kept + {rejected:,} rejected")]
    found += [("", f"{count:,} {kind}") for kind, count in ledger.rejected.items()]
    found.append(("tokens", f"{dataset.tokens:,} in {ledger.examples:,} examples"))
    names = [name for name in ("p50", "p90", "p99", "max") if name in ledger.lengths]
    found.append(("lengths", ", ".join(f"{name} {ledger.lengths[name]:,}" for name in names)))
    if ledger.regions_unknown:
        found.append(("regions", f"{ledger.regions_unknown:,} examples with unknown regions"))
    notes = ledger.notes.items()
    return found + [
        ("note", f"{note}: {describe_note(note, count, dataset.recipe)}{_first_noted(dataset, note)}")
        for note, count in notes
    ]


def _first_noted(dataset: Dataset, note: str) -> str:
    """The location of the first row with a note; rows are counted from 0."""
    place = dataset.ledger.first_noted.get(note)
    if place is None or place[0] >= len(dataset.source_names):
        return ""
    return " (first: {} row {})".format(*dataset.file_row(*place))


def one_line(outcome: Outcome) -> str:
    """The same facts on one line."""
    dataset, progress = outcome.dataset, outcome.progress
    how = "found in the cache" if outcome.hit else f"prepared in {duration(progress.seconds)}"
    rejected = sum(dataset.ledger.rejected.values())
    aside = f", {rejected:,} rows set aside" if rejected else ""
    return f"penstock: {len(dataset):,} rows, {dataset.tokens:,} tokens {how}{aside} ({dataset.key[:11]})"


def as_html(title: str, lines: list[Fact]) -> str:
    """Facts as a small table for a notebook."""
    cell = '<td style="text-align:left;vertical-align:top;white-space:pre-wrap">'
    rows = "".join(
        f"<tr>{cell}<b>{escape(label)}</b></td>{cell}{escape(printable(text))}</td></tr>" for label, text in lines
    )
    return f"<div><code>{escape(title)}</code><table>{rows}</table></div>"


def _slices(outcome: Outcome) -> str:
    progress = outcome.progress
    if outcome.hit:
        return f"{len(outcome.dataset.shards)} found in the cache: nothing to do"
    parts = [f"{progress.slices_done} encoded"]
    if progress.slices_retried:
        parts.append(f"{progress.slices_retried} of them again, after {progress.retries} lost workers")
    if progress.slices_reused:
        parts.append(f"{progress.slices_reused} found in the cache")
    if progress.slices_elsewhere:
        parts.append(f"{progress.slices_elsewhere} encoded by other processes")
    return ", ".join(parts)


WITH_FAST_ENGINE = ("masks by offsets", "text composed to NFC")  # slower ways that don't need the reference for ids


def _engines(outcome: Outcome) -> str:
    rows = max(outcome.progress.examples, 1)
    lines = []
    encoder, not_served = outcome.progress.encoder
    stages = [("encode", encoder)]
    if outcome.dataset.manifest.recipe["templates"]:
        stages.insert(0, ("render", "compiled template"))
    for stage, fast in stages:
        why = {k: n for k, n in outcome.progress.engines.get(stage, {}).items() if k not in WITH_FAST_ENGINE}
        slow = min(sum(why.values()), rows)
        share = "" if slow == 0 else f" for {100 * (rows - slow) / rows:.2f}% of the rows"
        lines.append(f"{stage}: {fast}{share}{_reasons(why)}")
    if not_served:
        lines.append(f"encode: {not_served}")
    return "\n".join(lines)


def _checks(outcome: Outcome) -> str:
    """The checks against the references."""
    progress = outcome.progress
    text = f"{progress.checked:,} rows compared with jinja2 and tokenizers"
    if progress.mismatches:
        return f"{text}: {progress.mismatches:,} differed, and their slices were recomputed"
    taken, compared = progress.paths
    ways = f", among them {compared} of the {taken} ways that rows take through the template" if taken else ""
    return f"{text}{ways}: all equal"


def _reasons(why: Mapping[str, int]) -> str:
    """Why rows took the slower way."""
    reasons = "; ".join(f"{n:,} rows more slowly: {reason}" for reason, n in sorted(why.items(), key=lambda e: -e[1]))
    return f" ({reasons})" if reasons else ""


# ---- watching --------------------------------------------------------------------------------------------------------
#
# Progress of `ps.prepare`: a line in a terminal, a display in a notebook, nothing elsewhere.


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


# ---- console ---------------------------------------------------------------------------------------------------------
#
# The console of all commands: text from data controls neither the terminal nor the style.


class Terminal(Console):
    """A rich console whose strings are plain text, without markup; unprintable characters are printed as escapes."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        super().__init__(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of printable text; rich's own control codes pass."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
