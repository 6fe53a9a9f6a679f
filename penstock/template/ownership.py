"""Decides which message owns which characters of what a template prints.

1. In a loop over messages, everything an iteration prints belongs to its message, including text without an owner and
   text of other assistant messages. Text of any other message keeps its owner.
2. Outside such loops and outside captures, a `{{ expression }}` that prints text of exactly one message belongs to
   that message as a whole.
3. Text of an assistant message outside such loops has no owner if one of the loops prints that message too.

Loops insert marks into the printed strings. Marks are empty strings, so the text never changes. Each buffer (the
template itself, a macro, a `{% set %}` block) is resolved separately, and its text carries the resolved spans. The cost
is linear in the number of spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from penstock.template.jinja.budget import Budget
from penstock.template.jinja.traced_string import SPAN, Span, Traced, add_span

Piece = tuple[int, int, int]  # message, start, end


@dataclass(eq=False, slots=True)
class Iteration:
    """One iteration of a loop; its message may become known only while it runs."""

    item: Any
    message: int | None


@dataclass(eq=False, slots=True)
class Loop:
    """A loop that is running."""

    iteration: Iteration | None = None

    @property
    def message(self) -> int | None:
        """The message that owns the current iteration."""
        return None if self.iteration is None else self.iteration.message


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
    _spans: list[Span] = field(default_factory=list)
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
                    budget.allocate(SPAN * len(chunk.spans))
                    for start, end, message, looped in chunk.spans:
                        add_span(self._spans, Span(start + self._size, end + self._size, message, looped))
                self._size += len(chunk)
        while self._open:
            self._close()
        return Traced("".join(self._texts), self._spans, budget)

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
            add_span(self._spans, Span(position, span.start, message, True))
            owner = message if self.assistants[span.message] else span.message
            add_span(self._spans, Span(span.start, span.end, owner, True))
            position = span.end
        add_span(self._spans, Span(position, self._size, message, True))


def _take_from(spans: list[Span], start: int) -> list[Span]:
    """Removes and returns the spans from a position onwards."""
    taken: list[Span] = []
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
    return Traced(text, [Span(0, len(text), text.spans[0].message, looped)], text.budget)


def pieces_of(spans: Iterable[Span], assistants: Sequence[bool]) -> list[Piece]:
    """Applies rule 3, and merges adjacent spans of a message."""
    spans = list(spans)
    looped = {span.message for span in spans if span.looped}
    pieces: list[Piece] = []
    for span in spans:
        if not span.looped and span.message in looped and assistants[span.message]:
            continue
        if pieces and pieces[-1][0] == span.message and pieces[-1][2] == span.start:
            pieces[-1] = (span.message, pieces[-1][1], span.end)
        else:
            pieces.append((span.message, span.start, span.end))
    return pieces
