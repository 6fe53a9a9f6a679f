"""Loss masks: the weight of each run of tokens in the loss.

`run_weights` returns one weight per run, 0 where it is not trained. The same function handles one example and a whole
shard, so ledgers count exactly what is served.

An assistant message is trained on its body and its stop token, never on its header or on white space after the stop.
Of an assistant's message, the options `parts` and `part_weights` may choose and weight parts (`load.parts`). If the row
gives a message a weight, it applies to the runs that the policy trains, and multiplies with that of the part; under
`customized` it also selects messages of other roles. Runs that belong to no message are trained only by `all_tokens`.
Context that is trained in another example of the row is never trained here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int32, Int64, UInt8
from penstock.load.options import LossMask, LossPolicy
from penstock.load.packing import ranges
from penstock.load.parts import EVERY_PART, part_table
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.prepare.faithful.prefixes import context_parts, last_messages, row_of, segment_places, shared_segments

# ---- runs ------------------------------------------------------------------------------------------------------------
#
# Segments as arrays of runs, the form in which policies, windows and statistics read a shard.
#
# `Runs` holds the segments of a shard (or of a few of its examples), and `Tally` counts the tokens of selected runs
# inside windows of rows. Token ids are never read. The cost is a few passes over the segments, plus two binary searches
# per window.


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


def tokens_by(groups: UInt8, runs: Runs, rows: Int64, starts: Int64, ends: Int64) -> Int64:
    """Tokens of each group of runs in the windows starts:ends of these rows; `groups` has a number per run."""
    firsts, lasts = np.zeros((2, len(runs.offsets) - 1), np.uint32)
    if len(rows) > len(firsts) or (np.bincount(rows, minlength=1) > 1).any():  # rows are split
        at, _ = ranges(runs.offsets[rows], runs.offsets[rows + 1])
        offsets = np.concatenate(([0], np.cumsum(runs.counts[rows])))
        groups, runs = groups[at], runs._replace(offsets=offsets, ends=runs.ends[at])
        firsts, lasts = starts.astype(np.uint32), ends.astype(np.uint32)
    else:
        firsts[rows], lasts[rows] = starts, ends
    clipped = np.minimum(runs.ends, np.repeat(lasts, runs.counts))
    if firsts.any():
        offset = np.repeat(firsts, runs.counts)
        clipped = np.maximum(clipped, offset) - offset
    return np.bincount(groups, runs._replace(ends=clipped).lengths, minlength=256).astype(np.int64)


# ---- policy ----------------------------------------------------------------------------------------------------------


def run_weights(mask: LossMask, runs: Runs) -> Float32:
    """The loss weight of each run."""
    chosen, parts = _chosen(mask.policy, runs), _part_weights(mask, runs)
    weights = parts * chosen
    if runs.weights is None:
        return weights
    given = ~np.isnan(runs.weights)
    if mask.policy is not LossPolicy.CUSTOMIZED:
        given &= chosen
    np.multiply(runs.weights, parts, out=weights, where=given)
    return weights


def undivided(mask: LossMask, runs: Runs) -> Bool:
    """Which examples have a trained answer whose parts are needed and unknown."""
    found = np.zeros(len(runs.offsets) - 1, np.bool_)
    if part_table(mask.parts, mask.weights).divides:
        bodies = runs.by(Role.ASSISTANT) & runs.of_part(Part.BODY)
        if bodies.any():
            whole = np.flatnonzero(bodies & (run_weights(LossMask(mask.policy), runs) > 0) & (runs.lengths > 0))
            found[np.searchsorted(runs.offsets, whole, side="right") - 1] = True
    return found


def _chosen(policy: LossPolicy, runs: Runs) -> Bool:
    """The runs of messages that the policy trains in rows without weights."""
    assistant = runs.by(Role.ASSISTANT)
    match policy:
        case LossPolicy.ALL_ASSISTANT_MESSAGES | LossPolicy.CUSTOMIZED:
            return assistant
        case LossPolicy.LAST_ASSISTANT_MESSAGE:
            last = runs.highest_message(assistant) if runs.last_assistants is None else runs.last_assistants
            trained: Bool = runs.messages == np.repeat(last, runs.counts)
            return trained & assistant
        case LossPolicy.LAST_ASSISTANT_TURN:
            last = runs.highest_message(runs.by(Role.USER)) if runs.last_users is None else runs.last_users
            trained = runs.messages > np.repeat(last, runs.counts)
            return trained & assistant
        case LossPolicy.ALL_USER_AND_SYSTEM_MESSAGES:
            return runs.by(Role.USER, Role.SYSTEM)
        case LossPolicy.ALL_MESSAGES | LossPolicy.ALL_TOKENS:
            return np.ones(len(runs.roles), np.bool_)


def _part_weights(mask: LossMask, runs: Runs) -> Float32:
    """The weight of each run's part, in a message that is trained."""
    if mask.policy is LossPolicy.ALL_TOKENS:
        return EVERY_PART[runs.parts]
    table = part_table(mask.parts, mask.weights)
    weights = table.assistant[runs.parts]
    if mask.policy in _OTHERS and (mask.parts or mask.weights):
        np.copyto(weights, table.other[runs.parts], where=runs.roles != Role.ASSISTANT)
    return weights


_OTHERS = (LossPolicy.ALL_MESSAGES, LossPolicy.ALL_USER_AND_SYSTEM_MESSAGES, LossPolicy.CUSTOMIZED)
