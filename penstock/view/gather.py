"""Many items of a view or a mixture at once, as flat arrays: what collating reads.

Enters: item numbers, in any order and from any shard. Leaves: their tokens and loss weights one sequence after the
other, equal to those of `view[i]`, and where each comes from. Of pairs come all chosen sides, then all rejected ones.
Costs some 2 µs a sequence and 0.1 ms a call, besides copying; weights are computed once for all runs of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.chat.regions import Int32, Int64, UInt8
from penstock.store.columns import Columns
from penstock.view.mixture import Mixture
from penstock.view.policy import LossPolicy, run_weights
from penstock.view.runs import Float32, Runs, UInt32
from penstock.view.view import Served, View


class Gathered(NamedTuple):
    """Sequences one after the other. Of n pairs there are 2n sequences, but n places and n prompts."""

    ids: Int64
    weights: Float32
    lengths: Int64  # per sequence
    places: Int64  # per item: source and row
    prompts: Int64  # per pair: tokens of the common prompt


class _Cut(NamedTuple):
    """One sequence to gather."""

    columns: Columns
    number: int  # in its shard
    start: int
    length: int
    policy: LossPolicy


_Found = tuple[list[_Cut], tuple[int, int]]  # one cut per side; source and row


class Gatherer:
    """Reads items of one view or mixture. It has no state but look-up tables, and may be used from any thread."""

    def __init__(self, served: Served) -> None:
        if isinstance(served, Mixture):
            views = [share.view for share in served.shares.values()]
        else:
            assert isinstance(served, View), "a view or a mixture of views"
            views = [served]
        self._parts = [_Part(view) for view in views]
        self._bounds = np.cumsum([len(view) for view in views])
        self._pairs = served.is_preference

    def __call__(self, items: Int64) -> Gathered:
        """The tokens, weights and places of these items."""
        found = list(self._found(items))
        sides = 2 if self._pairs else 1
        cuts = [cuts[side] for side in range(sides) for cuts, _ in found]
        places = np.array([place for _, place in found], np.int64).reshape(-1, 2)
        lengths = np.array([cut.length for cut in cuts], np.int64)
        ids = np.concatenate([_ids(cut) for cut in cuts], dtype=np.int64) if cuts else np.empty(0, np.int64)
        weights = _weights(cuts, lengths)
        prompts = np.empty(0, np.int64)
        if self._pairs:
            prompts = self._prompts(items)
            before = np.cumsum(lengths) - lengths
            prompt = np.arange(len(ids)) < np.repeat(before + np.tile(prompts, 2), lengths)
            weights[prompt] = 0
        return Gathered(ids, weights, lengths, places, prompts)

    def _found(self, items: Int64) -> Iterator[_Found]:
        """The cuts and the place of each item, in the order of the items."""
        if len(self._parts) == 1:
            return self._parts[0].find(items)
        which = np.searchsorted(self._bounds, items, side="right")
        streams = [part.find(self._own(items, which, number)) for number, part in enumerate(self._parts)]
        return (next(streams[number]) for number in which.tolist())

    def _own(self, items: Int64, which: Int64, number: int) -> Int64:
        """The items of one part, as it numbers them."""
        own: Int64 = items[which == number] - (int(self._bounds[number - 1]) if number else 0)
        return own

    def _prompts(self, items: Int64) -> Int64:
        which = np.searchsorted(self._bounds, items, side="right")
        prompts = np.empty(len(items), np.int64)
        for number, part in enumerate(self._parts):
            prompts[which == number] = part.prompts(self._own(items, which, number))
        return prompts


class _Part:
    """One view, with the tables that find its items."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._dataset = view.dataset
        self._index = view.scanned()._index
        self._sides = 2 if view.is_preference else 1
        self._first_examples = np.cumsum(view.dataset.shard_examples) - view.dataset.shard_examples
        self._origins: dict[int, tuple[int, int]] = {}  # by shard: its source, and what to add to its row numbers

    def find(self, items: Int64) -> Iterator[_Found]:
        """Per item: one cut per side, and its place."""
        index, policy = self._index, self._view.settings.train_on
        numbers = index.rows[items].astype(np.int64)
        shards = np.searchsorted(index.bounds, numbers, side="right") - 1
        local = (numbers - index.bounds[shards]) * self._sides
        lengths = index.lengths[items].reshape(len(items), self._sides)
        for shard, number, start, sizes in zip(
            shards.tolist(), local.tolist(), index.starts[items].tolist(), lengths.tolist(), strict=True
        ):
            columns = self._dataset.columns(shard)
            cuts = [_Cut(columns, number + side, start, size, policy) for side, size in enumerate(sizes)]
            source, first_row = self._origins.get(shard) or self._origin(shard, columns)
            yield cuts, (source, first_row + int(columns.rows[number]))

    def prompts(self, items: Int64) -> Int64:
        """Tokens of the common prompt of each pair, as far as it is served."""
        return (self._index.prompts[items] - self._index.starts[items]).astype(np.int64)

    def _origin(self, shard: int, columns: Columns) -> tuple[int, int]:
        place = self._dataset.locate(int(self._first_examples[shard]))
        self._origins[shard] = place.source, place.row - int(columns.rows[0])
        return self._origins[shard]


def _ids(cut: _Cut) -> UInt32 | np.ndarray[tuple[int], np.dtype[np.uint16]]:
    first = int(cut.columns.id_offsets[cut.number]) + cut.start
    return cut.columns.ids[first : first + cut.length]


def _weights(cuts: list[_Cut], lengths: Int64) -> Float32:
    """The loss weight of every token: the policy sees whole rows, the window is cut out afterwards."""
    if not cuts:
        return np.empty(0, np.float32)
    runs = _runs(cuts)
    per_run = _run_weights(cuts, runs)
    starts = np.repeat(np.array([cut.start for cut in cuts], np.int64), runs.counts)
    limits = np.repeat(lengths, runs.counts)
    ends = np.minimum(np.maximum(runs.ends - starts, 0), limits).astype(np.uint32)
    return per_run.repeat(runs._replace(ends=ends).lengths)


def _run_weights(cuts: list[_Cut], runs: Runs) -> Float32:
    policies = [cut.policy for cut in cuts]
    weights = run_weights(policies[0], runs)
    for other in set(policies) - {policies[0]}:
        own = np.repeat(np.array([policy is other for policy in policies]), runs.counts)
        np.copyto(weights, run_weights(other, runs), where=own)
    return weights


def _runs(cuts: list[_Cut]) -> Runs:
    """The runs of these rows, joined."""
    ends, roles, parts, messages = list[UInt32](), list[UInt8](), list[UInt8](), list[Int32]()
    given, weighted = list[Float32](), False
    counts = [0]
    for columns, number, *_ in cuts:
        own = slice(int(columns.segment_offsets[number]), int(columns.segment_offsets[number + 1]))
        ends.append(columns.segment_ends[own])
        roles.append(columns.segment_roles[own])
        parts.append(columns.segment_parts[own])
        messages.append(columns.segment_messages[own])
        counts.append(own.stop - own.start)
        weighted = weighted or columns.segment_weights is not None
    if weighted:
        given = [_given(cut, count) for cut, count in zip(cuts, counts[1:], strict=True)]
    return Runs(
        np.cumsum(counts, dtype=np.int64),
        np.concatenate(ends),
        np.concatenate(roles),
        np.concatenate(parts),
        np.concatenate(messages),
        np.concatenate(given) if weighted else None,
    )


def _given(cut: _Cut, count: int) -> Float32:
    weights = cut.columns.segment_weights
    if weights is None:
        return np.full(count, np.nan, np.float32)
    first = int(cut.columns.segment_offsets[cut.number])
    return weights[first : first + count]
