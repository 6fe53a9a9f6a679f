"""Strings that know which message each of their characters comes from.

To a template, a `Traced` string is an ordinary string. Operations that slice or join it keep the origin of every
character; operations that rewrite characters (`upper`, `tojson`, `%`, …) return a plain string. Each run of characters
with one origin costs about a microsecond, which is charged to the render's budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, SupportsIndex

from markupsafe import Markup

from penstock.template.jinja.budget import Budget

SPAN: Final = 128  # cost of a new span, in characters
_END: Final = 1 << 62


class Span(NamedTuple):
    """A run of characters that belongs to one message."""

    start: int
    end: int
    message: int
    looped: bool = False  # printed by an iteration of a loop over messages


class Traced(str):
    """A string with the spans that belong to messages: sorted, disjoint and never empty."""

    __slots__ = ("budget", "spans")
    spans: tuple[Span, ...]
    budget: Budget | None

    def __new__(cls, text: str = "", spans: Iterable[Span] = (), budget: Budget | None = None) -> Traced:
        self = super().__new__(cls, text)
        self.spans, self.budget = tuple(spans), budget
        return self

    def __str__(self) -> str:
        return self  # so that printing keeps the spans

    def spans_between(self, start: int, end: int, to: int = 0) -> Iterator[Span]:
        """The spans of a part, shifted to begin at `to`."""
        shift = to - start
        for number in range(bisect_right(self.spans, start, key=_end_of), len(self.spans)):
            first, last, message, looped = self.spans[number]
            if first >= end or start == end:
                break
            yield Span(max(first, start) + shift, min(last, end) + shift, message, looped)

    def cut(self, start: int, end: int) -> Traced:
        """The characters from start to end."""
        if start <= 0 and end >= len(self):
            return self
        spans = tuple(self.spans_between(start, end))
        if self.budget is not None:
            self.budget.allocate(SPAN * (len(spans) + 1))
        return Traced(str.__getitem__(self, slice(start, end)), spans, self.budget)

    def _cut_all(self, pieces: Iterable[str], gap: int = 0) -> list[str]:
        """Cuts out consecutive pieces, with `gap` characters between them."""
        found: list[str] = []
        position = 0
        for piece in pieces:
            found.append(self.cut(position, position + len(piece)))
            position += len(piece) + gap
        return found

    # ---- parts

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            return self.cut(start, max(start, end)) if step == 1 else str.__getitem__(self, key)
        str.__getitem__(self, key)  # raises the usual errors
        index = key.__index__() % len(self)
        return self.cut(index, index + 1)

    def __iter__(self) -> Iterator[str]:
        position = 0
        for start, end, message, looped in self.spans:
            yield from str.__getitem__(self, slice(position, start))
            whole = (Span(0, 1, message, looped),)
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

    def _located(self, pieces: list[str], separator: str | None) -> list[str]:
        if separator is not None:
            return self._cut_all(pieces, len(separator))
        found: list[str] = []
        position = 0
        for piece in pieces:
            start = self.find(piece, position)
            position = start + len(piece)
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

    # ---- sums

    def __add__(self, other: str, /) -> str:
        return concat((self, other)) if _joins(other) else NotImplemented

    def __radd__(self, other: str, /) -> str:
        return concat((other, self)) if _joins(other) else NotImplemented

    def join(self, iterable: Iterable[str], /) -> str:
        items = list(iterable)
        str.join(self, items)  # raises the usual errors
        return concat(part for number, item in enumerate(items) for part in ((self, item) if number else (item,)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        str.replace(self, old, new, count)  # raises the usual errors
        times = count.__index__()
        if not old:
            return traced(new).join(self._characters(times))
        added, position = traced(new), 0
        parts: list[tuple[str, int, int]] = []
        for kept in str.split(self, old, times):
            parts.append((self, position, len(kept)))
            parts.append((added, 0, len(added)))
            position += len(kept) + len(old)
        return _assemble(parts[:-1])

    def _characters(self, count: int) -> list[str]:
        """The pieces between which `replace("", …)` inserts: single characters, then the rest."""
        times = min(count, len(self) + 1) if count >= 0 else len(self) + 1
        return ["", *(self[index] for index in range(times - 1)), self.cut(times - 1, _END)] if times else [self]


def concat(parts: Iterable[str]) -> Traced:
    """Joins parts, keeping the spans of traced ones."""
    return _assemble([(part, 0, len(part)) for part in parts])


def _assemble(parts: list[tuple[str, int, int]]) -> Traced:
    """Joins parts (string, start, length); the spans of a complete first part are reused."""
    spans: list[Span] = []
    texts: list[str] = []
    budget = None
    size = 0
    for text, start, length in parts:
        whole = length == len(text)
        texts.append(text if whole else str.__getitem__(text, slice(start, start + length)))
        if isinstance(text, Traced) and text.spans:
            budget = budget or text.budget
            if whole and not size:
                spans += text.spans
            else:
                for span in text.spans_between(start, start + length, size):
                    add_span(spans, span)
        size += length
    if budget is not None:
        reused = len(parts[0][0].spans) if isinstance(parts[0][0], Traced) else 0
        budget.allocate(len(spans) + max(0, len(spans) - reused) * SPAN)
    return Traced("".join(texts), spans, budget)


def add_span(spans: list[Span], span: Span) -> None:
    """Appends a span, or extends the last one."""
    start, end, message, looped = span
    if start == end:
        return
    if spans:
        first, last, before, before_looped = spans[-1]
        if last == start and before == message and before_looped == looped:
            spans[-1] = Span(first, end, message, looped)
            return
    spans.append(span)


def traced(text: str) -> Traced:
    """Converts a text to a traced string."""
    return text if isinstance(text, Traced) else Traced(text)


def trace(value: Any, message: int, budget: Budget) -> Any:
    """Copies a JSON value with all of its strings traced to a message."""
    if isinstance(value, str):
        return Traced(value, (Span(0, len(value), message),) if value else (), budget)
    if isinstance(value, dict):
        return {trace(key, message, budget): trace(item, message, budget) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(trace(item, message, budget) for item in value)
    return value


def _end_of(span: Span) -> int:
    return span.end


def _joins(other: object) -> bool:
    """Whether `+` is plain concatenation; `Markup` escapes the other operand."""
    return isinstance(other, str) and not isinstance(other, Markup)
