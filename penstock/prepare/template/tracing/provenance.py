"""Decides which message owns which characters of what a template prints.

1. In a loop over messages, everything an iteration prints belongs to its message, including text without an owner and
   text of other assistant messages. Text of any other message keeps its owner.
2. Outside such loops and outside captures, a `{{ expression }}` that prints text of exactly one message belongs to
   that message as a whole.
3. Text of an assistant message outside such loops has no owner if one of the loops prints that message too.

Loops insert marks into the printed strings. Marks are empty strings, so the text never changes. Each buffer (the
template itself, a macro, a `{% set %}` block) is resolved separately, and its text carries the resolved spans. The cost
is linear in the number of spans.

Text of assistants also has labels, which say from which field it comes. They are independent of ownership.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import itemgetter
from typing import Any, Final, NamedTuple, SupportsIndex

from markupsafe import Markup

from penstock.prepare.template.budget import Budget

# ---- traced strings

SPAN: Final = 128  # cost of a new span, in characters
_END: Final = 1 << 62
_END_OF: Final = itemgetter(1)  # of a span


class TracedSpan(NamedTuple):
    """A run of characters that belongs to one message, or has one label."""

    start: int
    end: int
    message: int  # or the label, see `turns.Field`
    looped: bool = False  # printed by an iteration of a loop over messages


class Traced(str):
    """A string with the spans that belong to messages, and those with labels: sorted, disjoint and never empty.

    Operations that slice or join it keep the origin of every character. Operations that rewrite characters (`upper`,
    `tojson`, `%`, …) return a string without owners, and with a label only if the whole string has it. A span costs
    about a microsecond, which is charged to the render's budget.
    """

    __slots__ = ("budget", "labels", "spans")
    spans: tuple[TracedSpan, ...]
    labels: tuple[TracedSpan, ...]
    budget: Budget | None

    def __new__(
        cls,
        text: str = "",
        spans: Iterable[TracedSpan] = (),
        budget: Budget | None = None,
        labels: Iterable[TracedSpan] = (),
    ) -> Traced:
        self = str.__new__(cls, text)
        self.spans, self.budget, self.labels = tuple(spans), budget, tuple(labels)
        return self

    def __str__(self) -> str:
        return self  # so that printing keeps the spans

    def cut(self, start: int, end: int) -> Traced:
        """The characters from start to end."""
        if start <= 0 and end >= len(self):
            return self
        spans = tuple(spans_between(self.spans, start, end))
        labels = tuple(spans_between(self.labels, start, end)) if self.labels else ()
        if self.budget is not None:
            self.budget.allocate(SPAN * (len(spans) + len(labels) + 1))
        return Traced(str.__getitem__(self, slice(start, end)), spans, self.budget, labels)

    def _cut_all(self, texts: Iterable[str], gap: int = 0) -> list[str]:
        """Cuts out consecutive texts, with `gap` characters between them."""
        found: list[str] = []
        position = 0
        for text in texts:
            found.append(self.cut(position, position + len(text)))
            position += len(text) + gap
        return found

    # ---- parts

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            return self.cut(start, max(start, end)) if step == 1 else relabelled(self, str.__getitem__(self, key))
        str.__getitem__(self, key)  # raises the usual errors
        index = key.__index__() % len(self)
        return self.cut(index, index + 1)

    def __iter__(self) -> Iterator[str]:
        if self.labels:
            yield from (self.cut(index, index + 1) for index in range(len(self)))
            return
        position = 0
        for start, end, message, looped in self.spans:
            yield from str.__getitem__(self, slice(position, start))
            whole = (TracedSpan(0, 1, message, looped),)
            for character in str.__getitem__(self, slice(start, end)):
                yield Traced(character, whole, self.budget)
            position = end
        yield from str.__getitem__(self, slice(position, None))

    def strip(self, chars: str | None = None, /) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self.cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self.cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> Traced:
        return self.cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> Traced:
        return self.cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def _located(self, texts: list[str], separator: str | None) -> list[str]:
        if separator is not None:
            return self._cut_all(texts, len(separator))
        found: list[str] = []
        position = 0
        for text in texts:
            start = self.find(text, position)
            position = start + len(text)
            found.append(self.cut(start, position))
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._cut_all(str.splitlines(self, True))
        return lines if keepends else [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._cut_all(str.partition(self, sep))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._cut_all(str.rpartition(self, sep))
        return before, found, after

    # ---- sums; `Markup` escapes the other operand

    def __add__(self, other: str, /) -> str:
        return NotImplemented if isinstance(other, Markup) or not isinstance(other, str) else concat((self, other))

    def __radd__(self, other: str, /) -> str:
        return NotImplemented if isinstance(other, Markup) or not isinstance(other, str) else concat((other, self))

    def __mul__(self, times: SupportsIndex, /) -> str:
        made = str.__mul__(self, times)
        return concat([without_owners(self)] * times.__index__()) if made and self.labels else made

    __rmul__ = __mul__

    def join(self, iterable: Iterable[str], /) -> str:
        items = list(iterable)
        str.join(self, items)  # raises the usual errors
        return concat(part for number, item in enumerate(items) for part in ((self, item) if number else (item,)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """Replaces text; new text without a label takes the one that all of the replaced text has."""
        str.replace(self, old, new, count)  # raises the usual errors
        times = count.__index__()
        if not old:
            return traced(new).join(self._characters(times))
        inserted = added = traced(new)
        position = 0
        parts: list[tuple[str, int, int]] = []
        for kept in str.split(self, old, times):
            parts.append((self, position, len(kept)))
            position += len(kept) + len(old)
            if self.labels and not added.labels and new:
                label = label_of(self.cut(position - len(old), position))
                inserted = Traced(new, added.spans, self.budget, (TracedSpan(0, len(new), label),) if label else ())
            parts.append((inserted, 0, len(new)))
        return _assemble(parts[:-1])

    def _characters(self, count: int) -> list[str]:
        """The texts between which `replace("", …)` inserts: single characters, then the rest."""
        times = min(count, len(self) + 1) if count >= 0 else len(self) + 1
        return ["", *(self[index] for index in range(times - 1)), self.cut(times - 1, _END)] if times else [self]


def _rewriting(name: str) -> Callable[..., str]:
    method = getattr(str, name)

    @functools.wraps(method)
    def rewrite(self: Traced, *args: Any, **kwargs: Any) -> str:
        return relabelled(self, method(self, *args, **kwargs))

    return rewrite


for _name in (
    *("capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "rjust", "swapcase", "title", "translate"),
    *("upper", "zfill"),
):
    setattr(Traced, _name, _rewriting(_name))


def spans_between(spans: Sequence[TracedSpan], start: int, end: int) -> Iterator[TracedSpan]:
    """The spans of a part, counted from its start."""
    for number in range(bisect_right(spans, start, key=_END_OF), len(spans)):
        first, last, message, looped = spans[number]
        if first >= end or start == end:
            break
        yield TracedSpan(max(first, start) - start, min(last, end) - start, message, looped)


def concat(parts: Iterable[str]) -> Traced:
    """Joins parts, keeping the spans of traced ones."""
    return _assemble([(part, 0, len(part)) for part in parts])


def _assemble(parts: list[tuple[str, int, int]]) -> Traced:
    """Joins parts (string, start, length); the spans of a complete first part are reused."""
    spans: list[TracedSpan] = []
    labels: list[TracedSpan] = []
    texts: list[str] = []
    budget = None
    size = reused = 0
    for text, start, length in parts:
        whole = length == len(text)
        texts.append(text if whole else str.__getitem__(text, slice(start, start + length)))
        if isinstance(text, Traced) and (text.spans or text.labels):
            budget = budget or text.budget
            if not size and whole:
                spans += text.spans
                labels += text.labels
                reused = len(spans) + len(labels)
            elif whole:
                add_shifted(spans, text.spans, size)
                if text.labels:
                    add_shifted(labels, text.labels, size)
            else:
                add_shifted(spans, spans_between(text.spans, start, start + length), size)
                add_shifted(labels, spans_between(text.labels, start, start + length), size)
        size += length
    if budget is not None:
        count = len(spans) + len(labels)
        budget.allocate(count + max(0, count - reused) * SPAN)
    return Traced("".join(texts), spans, budget, labels)


def add_shifted(spans: list[TracedSpan], more: Iterable[TracedSpan], shift: int) -> None:
    """Appends spans of a text that is appended at this place."""
    for start, end, message, looped in more:
        add_span(spans, TracedSpan(start + shift, end + shift, message, looped))


def add_span(spans: list[TracedSpan], span: TracedSpan) -> None:
    """Appends a span, or extends the last one."""
    start, end, message, looped = span
    if start == end:
        return
    if spans:
        first, last, before, before_looped = spans[-1]
        if last == start and before == message and before_looped == looped:
            spans[-1] = TracedSpan(first, end, message, looped)
            return
    spans.append(span)


def traced(text: str) -> Traced:
    """Converts a text to a traced string."""
    return text if isinstance(text, Traced) else Traced(text)


def trace(value: Any, message: int, budget: Budget) -> Any:
    """Copies a JSON value with all of its strings traced to a message."""
    if isinstance(value, str):
        return Traced(value, (TracedSpan(0, len(value), message),) if value else (), budget)
    if isinstance(value, dict):
        return {trace(key, message, budget): trace(item, message, budget) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(trace(item, message, budget) for item in value)
    return value


# ---- labels


def labelled(text: str, label: int, budget: Budget | None) -> str:
    """A text without an owner and, unless the label is 0, with a label."""
    return Traced(text, (), budget, (TracedSpan(0, len(text), label),)) if label and text else str.__str__(text)


def relabelled(original: Traced, text: str) -> str:
    """A text that was made from the characters of another one."""
    return labelled(text, label_of(original), original.budget)


def label_of(text: Traced) -> int:
    """The label that the whole text has, or 0."""
    start, end, label, _ = text.labels[0] if text.labels else (0, 0, 0, False)
    return label if start == 0 and end == len(text) else 0


def without_owners(text: str) -> str:
    """A text with its labels only."""
    return Traced(text, (), text.budget, text.labels) if isinstance(text, Traced) and text.labels else str.__str__(text)


# ---- ownership


class Span(NamedTuple):
    """Text that one message printed."""

    message: int
    start: int
    end: int


@dataclass(eq=False, slots=True)
class Iteration:
    """One iteration of a loop; its message may become known only while it runs."""

    item: Any
    message: int | None


@dataclass(eq=False, slots=True)
class Loop:
    """A loop that is running."""

    iteration: Iteration | None = None


class Event(Enum):
    """What a mark stands for."""

    ITERATION = auto()  # an iteration begins, which ends the previous one
    LEAVE = auto()  # a loop ends
    GENERATION = auto()  # a generation block begins
    END_GENERATION = auto()


class Mark(str):
    """An empty string that marks an event among the printed strings."""

    __slots__ = ("event", "iteration", "loop")
    event: Event
    loop: Loop | None
    iteration: Iteration | None

    def __new__(cls, event: Event, loop: Loop | None = None) -> Mark:
        self = super().__new__(cls)
        self.event, self.loop = event, loop
        self.iteration = None if loop is None else loop.iteration
        return self

    def __str__(self) -> str:
        return self  # so that printing keeps it


class _Open(NamedTuple):
    """An iteration that has not ended in this buffer."""

    loop: Loop | None
    iteration: Iteration | None
    start: int


@dataclass(slots=True)
class Buffer:
    """Collects printed strings."""

    assistants: Sequence[bool]  # whether message n is an assistant message
    generations: list[tuple[int, int]] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _spans: list[TracedSpan] = field(default_factory=list)
    _labels: list[TracedSpan] = field(default_factory=list)
    _size: int = 0
    _open: list[_Open] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)  # of generation blocks

    def collect(self, chunks: Iterable[str], budget: Budget) -> Traced:
        """Joins the printed strings into one text with owners."""
        for chunk in chunks:
            if isinstance(chunk, Mark):
                self._read(chunk)
            else:
                self._texts.append(chunk)
                if isinstance(chunk, Traced):
                    budget.allocate(SPAN * (len(chunk.spans) + len(chunk.labels)))
                    add_shifted(self._spans, chunk.spans, self._size)
                    if chunk.labels:
                        add_shifted(self._labels, chunk.labels, self._size)
                self._size += len(chunk)
        while self._open:
            self._close()
        return Traced("".join(self._texts), self._spans, budget, self._labels)

    def _read(self, mark: Mark) -> None:
        match mark.event:
            case Event.ITERATION:
                self._leave(mark.loop)
                self._open.append(_Open(mark.loop, mark.iteration, self._size))
            case Event.LEAVE:
                self._leave(mark.loop)
            case Event.GENERATION:
                self._starts.append(self._size)
            case Event.END_GENERATION:
                self.generations.append((self._starts.pop(), self._size))

    def _leave(self, loop: Loop | None) -> None:
        if self._open and self._open[-1].loop is loop:
            self._close()

    def _close(self) -> None:
        """End the innermost iteration."""
        _, iteration, start = self._open.pop()
        message = None if iteration is None else iteration.message
        if message is None:
            return
        position = start
        for span in _take_from(self._spans, start):
            add_span(self._spans, TracedSpan(position, span.start, message, True))
            owner = message if self.assistants[span.message] else span.message
            add_span(self._spans, TracedSpan(span.start, span.end, owner, True))
            position = span.end
        add_span(self._spans, TracedSpan(position, self._size, message, True))


def _take_from(spans: list[TracedSpan], start: int) -> list[TracedSpan]:
    """Removes and returns the spans from a position onwards."""
    taken: list[TracedSpan] = []
    while spans and spans[-1].end > start:
        span = spans.pop()
        if span.start < start:
            spans.append(span._replace(end=start))
            span = span._replace(start=start)
        taken.append(span)
    return taken[::-1]


def claim_statement(text: Traced) -> Traced:
    """Applies rule 2 to a printed expression."""
    if len({span.message for span in text.spans}) != 1:
        return text
    looped = any(span.looped for span in text.spans)
    return Traced(text, [TracedSpan(0, len(text), text.spans[0].message, looped)], text.budget, text.labels)


def owned_spans(traced_spans: Iterable[TracedSpan], assistants: Sequence[bool]) -> list[Span]:
    """Applies rule 3, and merges adjacent spans of a message."""
    traced_spans = list(traced_spans)
    looped = {span.message for span in traced_spans if span.looped}
    spans: list[Span] = []
    for span in traced_spans:
        if not span.looped and span.message in looped and assistants[span.message]:
            continue
        if spans and spans[-1].message == span.message and spans[-1].end == span.start:
            spans[-1] = spans[-1]._replace(end=span.end)
        else:
            spans.append(Span(span.message, span.start, span.end))
    return spans
