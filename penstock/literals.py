"""Searches texts for any of many literal strings, such as the added tokens of a tokenizer.

The result is that of a regular expression of all strings, longest first. Such an expression takes a minute to compile
for the 100,000 tokens of a speech model, and tries each of them wherever one may begin; here, building is linear in the
strings, and a position where one may begin costs a look-up per length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import AnyStr, Generic


class Literals(Generic[AnyStr]):
    """A set of strings to search for. Empty strings are ignored; false if there are no others."""

    def __init__(self, contents: Iterable[AnyStr]) -> None:
        self._contents: frozenset[AnyStr] = frozenset(content for content in contents if content)
        lengths: dict[AnyStr, set[int]] = {}  # by first character
        for content in self._contents:
            lengths.setdefault(content[:1], set()).add(len(content))
        self._lengths: dict[AnyStr, list[int]] = {first: sorted(own, reverse=True) for first, own in lengths.items()}
        self._first: re.Pattern[AnyStr] | None = None
        if lengths:
            self._first = re.compile(_either([re.escape(first) for first in lengths]))

    def __bool__(self) -> bool:
        return bool(self._contents)

    def find(self, text: AnyStr, start: int = 0) -> tuple[int, int] | None:
        """Returns where the first match begins and ends; the longest one of those that begin there."""
        if self._first is None:
            return None
        for candidate in self._first.finditer(text, start):
            at = candidate.start()
            for length in self._lengths[candidate[0]]:
                if (part := text[at : at + length]) in self._contents:
                    return at, at + len(part)  # shorter at the end of the text
        return None

    def first(self, texts: Iterable[AnyStr]) -> AnyStr | None:
        """Returns the first match in the first of the texts that has one."""
        for text in texts:
            if (found := self.find(text)) is not None:
                return text[found[0] : found[1]]
        return None

    def spans(self, text: AnyStr) -> Iterator[tuple[int, int]]:
        """Yields where matches begin and end, from left to right and without overlaps."""
        end = 0
        while (found := self.find(text, end)) is not None:
            yield found
            end = found[1]

    def within(self, text: AnyStr) -> set[AnyStr]:
        """Returns all strings that occur in a text, overlapping ones included."""
        if self._first is None:
            return set()
        ends = (
            (candidate.start(), candidate.start() + length)
            for candidate in self._first.finditer(text)
            for length in self._lengths[candidate[0]]
        )
        return {part for start, end in ends if (part := text[start:end]) in self._contents}


def _either(patterns: list[AnyStr]) -> AnyStr:
    bar = "|" if isinstance(patterns[0], str) else b"|"
    return bar.join(patterns)
