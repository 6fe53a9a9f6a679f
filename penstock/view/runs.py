"""Segments as arrays of runs, the form in which policies, windows and statistics read a shard.

`Runs` holds the segments of a shard (or of a few of its examples), and `Tally` counts the tokens of selected runs
inside windows of rows. Token ids are never read. The cost is a few passes over the segments, plus two binary searches
per window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int32, Int64, UInt8
from penstock.chat.conversation import Part, Role
from penstock.store.chains import context_parts, last_messages, row_of, segment_places, shared_segments
from penstock.store.columns import Columns

Float32 = npt.NDArray[np.float32]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]


class Runs(NamedTuple):
    """The segments of consecutive examples; example i owns entries offsets[i]:offsets[i+1]."""

    offsets: Int64
    ends: UInt32  # in tokens from the example's own start
    roles: UInt8
    parts: UInt8
    messages: Int32
    weights: Float32 | None  # NaN: not given
    last_users: Int32 | None = None  # per example: last user message of its row, or -1 (only if rows share runs)
    last_assistants: Int32 | None = None

    @classmethod
    def of(cls, columns: Columns, first: int = 0, last: int | None = None) -> Runs:
        """The runs of examples first:last of a shard (all of them by default), without copying if nothing is shared."""
        if columns.prefixes is not None:
            last = columns.examples if last is None else last
            return cls._of_chain(columns, first) if last == first + 1 else cls._of_chains(columns)._part(first, last)
        offsets = columns.segment_offsets[first : (columns.examples if last is None else last) + 1].astype(np.int64)
        own = slice(int(offsets[0]), int(offsets[-1]))
        weights = columns.segment_weights
        return cls(
            offsets - offsets[0],
            columns.segment_ends[own],
            columns.segment_roles[own],
            columns.segment_parts[own],
            columns.segment_messages[own],
            None if weights is None else weights[own],
        )

    @classmethod
    def _of_chains(cls, columns: Columns) -> Runs:
        """The runs of all examples of a shard; shared runs are repeated."""
        places, offsets, shared = segment_places(columns)
        is_shared = np.arange(len(places)) - np.repeat(offsets[:-1], np.diff(offsets)) < np.repeat(
            shared, np.diff(offsets)
        )
        weights = columns.segment_weights
        return cls(
            offsets,
            columns.segment_ends[places],
            columns.segment_roles[places],
            context_parts(columns.segment_parts[places], is_shared),
            columns.segment_messages[places],
            None if weights is None else weights[places],
            last_messages(columns, Role.USER),
            last_messages(columns, Role.ASSISTANT),
        )

    @classmethod
    def _of_chain(cls, columns: Columns, number: int) -> Runs:
        """The runs of one example of a shard with shared runs."""
        shared, bounds = shared_segments(columns, number), columns.segment_offsets
        own = slice(bounds.item(number), bounds.item(number + 1))
        head = np.zeros(shared.stop - shared.start + own.stop - own.start, np.bool_)
        head[: shared.stop - shared.start] = True

        def both(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.concatenate((values[shared], values[own]))

        first, root = row_of(columns, number)
        row = slice(bounds.item(first), bounds.item(root + 1))
        roles, messages, weights = columns.segment_roles[row], columns.segment_messages[row], columns.segment_weights
        return cls(
            np.array([0, len(head)], np.int64),
            both(columns.segment_ends),
            both(columns.segment_roles),
            context_parts(both(columns.segment_parts), head),
            both(columns.segment_messages),
            None if weights is None else both(weights),
            *(messages[roles == role].max(initial=-1, keepdims=True) for role in (Role.USER, Role.ASSISTANT)),
        )

    def _part(self, first: int, last: int) -> Runs:
        """The runs of the examples first:last."""
        own = slice(int(self.offsets[first]), int(self.offsets[last]))
        return Runs(
            self.offsets[first : last + 1] - self.offsets[first],
            self.ends[own],
            self.roles[own],
            self.parts[own],
            self.messages[own],
            None if self.weights is None else self.weights[own],
            None if self.last_users is None else self.last_users[first:last],
            None if self.last_assistants is None else self.last_assistants[first:last],
        )

    @property
    def counts(self) -> Int64:
        """Runs per example."""
        return np.diff(self.offsets)

    @property
    def lengths(self) -> UInt32:
        """Tokens per run."""
        lengths = self.ends.copy()
        lengths[1:] -= self.ends[:-1]  # wraps where an example begins; set below
        if len(self.offsets) > 2:
            first = self.offsets[:-1][self.counts > 0]
            lengths[first] = self.ends[first]
        return lengths

    @property
    def sizes(self) -> Int64:
        """Tokens per example."""
        sizes = np.zeros(len(self.offsets) - 1, np.int64)
        filled = self.counts > 0
        sizes[filled] = self.ends[self.offsets[1:][filled] - 1]
        return sizes

    @property
    def unknown(self) -> Bool:
        """Which examples have unknown regions: those with a single run that belongs to no message."""
        unknown: Bool = self.counts == 1
        only = self.offsets[:-1][unknown]
        unknown[unknown] = (self.by(Role.NONE) & self.of_part(Part.GLUE))[only]
        return unknown

    def by(self, *roles: Role) -> Bool:
        """Which runs belong to messages with these roles."""
        return _among(self.roles, roles)

    def of_part(self, *parts: Part) -> Bool:
        """Which runs are one of these parts of a message."""
        return _among(self.parts, parts)

    def highest_message(self, chosen: Bool) -> Int32:
        """Per example, the highest message number among the selected runs, or -1."""
        highest = np.full(len(self.offsets) - 1, -1, np.int32)
        filled = self.counts > 0
        if filled.any():
            numbers = np.where(chosen, self.messages, np.int32(-1))
            highest[filled] = np.maximum.reduceat(numbers, self.offsets[:-1][filled])
        return highest


def _among(values: UInt8, wanted: tuple[Role, ...] | tuple[Part, ...]) -> Bool:
    found: Bool = values == wanted[0].value
    for other in wanted[1:]:
        found = found | (values == other.value)
    return found


class Tally:
    """Counts the tokens of selected runs, per example and inside windows of examples."""

    __slots__ = ("_before", "_chosen", "_ends", "_lengths", "_offsets")

    def __init__(self, runs: Runs, chosen: Bool) -> None:
        self._offsets, self._chosen, self._lengths = runs.offsets, chosen, runs.lengths
        self._ends = np.concatenate(([0], np.cumsum(self._lengths, dtype=np.int64)))
        self._before = np.concatenate(([0], np.cumsum(self._lengths * chosen, dtype=np.int64)))

    @property
    def totals(self) -> Int64:
        """Selected tokens per example."""
        return np.diff(self._before[self._offsets])

    def between(self, rows: Int64, starts: Int64, ends: Int64) -> Int64:
        """Selected tokens in the window starts:ends of each row."""
        base = self._ends[self._offsets[rows]]
        return self._up_to(base + ends) - self._up_to(base + starts)

    def _up_to(self, tokens: Int64) -> Int64:
        """Selected tokens among the first `tokens` tokens of all examples concatenated."""
        if not len(self._chosen):
            return np.zeros(len(tokens), np.int64)
        run = np.searchsorted(self._ends[1:], tokens)
        return self._before[run] + (tokens - self._ends[run]) * self._chosen[run]
