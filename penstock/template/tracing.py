"""Strings that know which message each of their characters comes from.

A `Traced` string is an ordinary string to a template. What cuts it up or puts it together keeps the origin of every
character; what rewrites characters (`upper`, `tojson`, `%`, …) gives a plain string. Cost: Python speed, one tuple per
run of characters with one origin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, SupportsIndex

from markupsafe import Markup


class Span(NamedTuple):
    """A run of characters that belongs to one message."""

    start: int
    end: int
    message: int
    looped: bool = False  # printed by an iteration of a loop over the messages


class Traced(str):
    """A string with the spans of it that belong to messages: sorted, apart, none empty."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str = "", spans: Iterable[Span] = ()) -> Traced:
        self = super().__new__(cls, text)
        self.spans = tuple(spans)
        return self

    def __str__(self) -> str:
        return self  # so that printing keeps the spans

    def cut(self, start: int, end: int) -> Traced:
        """The characters from start to end."""
        spans = []
        for number in range(bisect_right(self.spans, start, key=_end), len(self.spans)):
            span = self.spans[number]
            if span.start >= end:
                break
            spans.append(Span(max(span.start, start) - start, min(span.end, end) - start, span.message, span.looped))
        return Traced(str.__getitem__(self, slice(start, end)), spans)

    def _cut_all(self, pieces: Iterable[str], gap: int = 0) -> list[Traced]:
        """The pieces, which stand in this order with gaps between them."""
        found, position = [], 0
        for piece in pieces:
            found.append(self.cut(position, position + len(piece)))
            position += len(piece) + gap
        return found

    # ---- parts

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            return self.cut(start, max(start, end)) if step == 1 else str.__getitem__(self, key)
        str.__getitem__(self, key)  # where it fails
        index = key.__index__() % len(self)
        return self.cut(index, index + 1)

    def __iter__(self) -> Iterator[str]:
        return (self.cut(index, index + 1) for index in range(len(self)))

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
            return [*self._cut_all(pieces, len(separator))]
        found, position = [], 0
        for piece in pieces:
            start = self.find(piece, position)
            position = start + len(piece)
            found.append(self.cut(start, position))
        return [*found]

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._cut_all(str.splitlines(self, True))
        return [*lines] if keepends else [line.cut(0, len(str.splitlines(line)[0])) for line in lines]

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
        str.join(self, items)  # where it fails
        return concat(part for item in items for part in (self, item)).cut(len(self) if items else 0, MAX)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        str.replace(self, old, new, count)  # where it fails
        times = count.__index__()
        return traced(new).join(self.split(old, times) if old else self._between(times))

    def _between(self, count: int) -> list[str]:
        """The pieces that replacing `""` joins: each character on its own, up to the last insertion."""
        cuts = min(count, len(self) + 1) if count >= 0 else len(self) + 1
        return ["", *(self[index] for index in range(cuts - 1)), self.cut(cuts - 1, MAX)] if cuts else [self]


MAX = 1 << 62


def concat(parts: Iterable[str]) -> Traced:
    """The parts joined, with the spans of those that are traced."""
    texts: list[str] = []
    spans: list[Span] = []
    size = 0
    for part in parts:
        texts.append(part)
        if isinstance(part, Traced):
            for start, end, message, looped in part.spans:
                add_span(spans, Span(start + size, end + size, message, looped))
        size += len(part)
    return Traced("".join(texts), spans)


def add_span(spans: list[Span], span: Span) -> None:
    """Append a span, or lengthen the last one."""
    if spans and spans[-1].end == span.start and spans[-1][2:] == span[2:]:
        span = Span(spans.pop().start, *span[1:])
    if span.start < span.end:
        spans.append(span)


def traced(text: str) -> Traced:
    """The same text, as a string that can be joined with traced ones."""
    return text if isinstance(text, Traced) else Traced(text)


def trace(value: Any, message: int) -> Any:
    """A value made of JSON types, all of its strings traced to a message."""
    if isinstance(value, str):
        return Traced(value, (Span(0, len(value), message),) if value else ())
    if isinstance(value, dict):
        return {trace(key, message): trace(item, message) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(trace(item, message) for item in value)
    return value


def _end(span: Span) -> int:
    return span.end


def _joins(other: object) -> bool:
    """Whether `+` is a plain join: Markup does it its own way."""
    return isinstance(other, str) and not isinstance(other, Markup)
