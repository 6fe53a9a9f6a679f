"""The rows of an export in order, read as blocks of bounded size.

A row is an item of a view or of one epoch of a mixture or, with a capacity, a packed row. Items are read in dataset
order with no work per sequence: the items of a shard are read together, adjacent ones with a single copy. Packed rows
take sequences from all over the dataset, which costs a few microseconds each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64
from penstock.errors import UsageError, ViewError
from penstock.load.gather import Gatherer, Located, cut_out
from penstock.load.options import PlanOptions
from penstock.load.packing import ranges
from penstock.load.plan import Plan
from penstock.load.policy import Float32, Runs, run_weights
from penstock.load.view import Served, View

Ids = npt.NDArray[Any]  # of any unsigned type, or int64
BLOCK_TOKENS: Final = 1 << 20  # a few megabytes
BLOCK_ROWS: Final = 1 << 15


class Block(NamedTuple):
    """Some rows with their sequences concatenated. For n pairs: n chosen sequences, then n rejected ones."""

    ids: Ids
    trained: Bool  # per token
    weights: Float32 | None  # per token; None if all are 0 or 1
    lengths: Int64  # per sequence
    counts: Int64  # per row: the number of its sequences (1 for pairs)
    prompts: Int64  # per pair: tokens of the common prompt
    sources: Int64  # per sequence (per pair): the source file, or the part of the mixture
    desirable: Int64 | None = None  # per sequence of labelled data (KTO): 1 for a good answer, else 0

    @property
    def row_tokens(self) -> Int64:
        """Tokens per row; for pairs, of both sides."""
        if len(self.prompts):
            return np.asarray(self.lengths.reshape(2, -1).sum(axis=0), np.int64)
        return np.add.reduceat(self.lengths, np.cumsum(self.counts) - self.counts)

    @property
    def starts(self) -> Int64:
        """The offset of each sequence."""
        return np.cumsum(self.lengths) - self.lengths


class ExportRows:
    """All rows of an export, in order."""

    def __init__(
        self,
        served: Served,
        *,
        capacity: int | None = None,
        epoch: int = 0,
        shuffle_seed: int | None = None,
        separator: str | None = None,
    ) -> None:
        if not len(served):
            raise ViewError("the view has no examples, so there is nothing to export. See its ledger for the reasons.")
        if served.is_preference and capacity is not None:
            raise UsageError("preference pairs can't be packed. Omit --capacity.")
        if served.is_labelled and capacity is not None:
            raise UsageError("labelled answers (KTO) can't be packed. Omit --capacity.")
        self.served, self.capacity, self.epoch, self.shuffle_seed = served, capacity, epoch, shuffle_seed
        self.is_preference = served.is_preference
        self.is_labelled = served.is_labelled
        self.views = served.views
        self.separator = None if separator is None else _id_of(self.views[0], separator)
        self._gather = Gatherer(served)
        order = PlanOptions(1, capacity, seed=shuffle_seed or 0, shuffle=shuffle_seed is not None)
        self._plan = Plan(served, order) if capacity is not None or order.shuffle else None
        self._items = None if served.in_order or self._plan is not None else served.epoch_indices(epoch)
        self._part_bounds = np.cumsum([len(view) for view in self.views])

    @cached_property
    def ends(self) -> Int64:
        """The cumulative number of tokens up to and including each row."""
        if self._plan is not None:
            count = self._plan.steps_in(self.epoch)
            firsts = range(0, count, BLOCK_ROWS)
            return np.cumsum(np.concatenate([self._planned_lengths(first, count) for first in firsts]), dtype=np.int64)
        lengths = self.served.lengths if self._items is None else self.served.lengths[self._items]
        return np.cumsum(lengths if lengths.ndim == 1 else lengths.sum(axis=1, dtype=np.int64), dtype=np.int64)

    @property
    def tokens(self) -> int:
        """The total number of tokens."""
        return int(self.ends[-1])

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def weighted(self) -> bool:
        """Whether any loss weight is neither 0 nor 1; such weights are rare."""
        return any(_has_fractions(view) for view in self.views)

    @cached_property
    def largest_id(self) -> int:
        """The largest id of the vocabulary, added tokens included."""
        dataset = self.views[0].dataset
        return dataset.vocabulary.size - 1

    def blocks(self, first: int, last: int) -> Iterator[Block]:
        """Yields the rows first:last in blocks of at most `BLOCK_TOKENS` tokens (or one row)."""
        while first < last:
            before = int(self.ends[first - 1]) if first else 0
            upto = int(np.searchsorted(self.ends, before + BLOCK_TOKENS, side="right"))
            stop = min(max(upto, first + 1), last, first + BLOCK_ROWS)
            positions = np.arange(first, stop)
            if self._plan is not None:
                taken = self._plan.take(self.epoch, positions)
                yield self._gathered(taken.items, taken.counts)
            elif self._items is None:
                yield from self._swept(positions)
            else:
                yield from self._swept(self._items[first:stop])
            first = stop

    def _planned_lengths(self, first: int, count: int) -> Int64:
        assert self._plan is not None
        taken = self._plan.take(self.epoch, np.arange(first, min(first + BLOCK_ROWS, count)))
        lengths = self.served.lengths[taken.items]
        lengths = lengths if lengths.ndim == 1 else lengths.sum(axis=1, dtype=np.int64)
        return np.add.reduceat(lengths, np.cumsum(taken.counts) - taken.counts)

    def _sources(self, items: Int64, places: Int64) -> Int64:
        if len(self.views) > 1:
            return np.searchsorted(self._part_bounds, items, side="right")
        return places[:, 0]

    def _gathered(self, items: Int64, counts: Int64) -> Block:
        """A block of sequences from all over the dataset."""
        found = self._gather(items)
        weights = found.weights if self.weighted else None
        sources = self._sources(items, found.places)
        trained = found.weights > 0
        return Block(
            found.ids, trained, weights, found.lengths, counts, found.prompts, sources, desirable=found.desirable
        )

    def _swept(self, items: Int64) -> Iterator[Block]:
        """Sequences in dataset order: one block per shard, or a single block for pairs."""
        sequences, prompts = self._gather.locate(items)
        changes = (np.diff(sequences.shards) != 0) | (np.diff(sequences.parts) != 0)
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(sequences.shards)]
        runs = [Located(*(field[a:b] for field in sequences)) for a, b in pairwise(cuts)]
        if self.is_preference:
            yield self._pairs(items, runs, prompts)
            return
        for (first, last), run in zip(pairwise(cuts), runs, strict=True):
            ids, trained, weights, places = self._shard_run(run)
            sources = self._sources(items[first:last], places)
            ones = np.ones(last - first, np.int64)
            labels = self._gather.labels(run) if self.is_labelled else None
            given = weights if self.weighted else None
            yield Block(ids, trained, given, run.lengths, ones, prompts, sources, desirable=labels)

    def _pairs(self, items: Int64, runs: list[Located], prompts: Int64) -> Block:
        """All chosen sides, then all rejected ones; their common prompt is not trained."""
        found = [self._shard_run(run) for run in runs]
        ids, trained, weights, places = (_joined([run[n] for run in found]) for n in range(4))
        lengths = np.concatenate([run.lengths for run in runs])
        starts = np.cumsum(lengths) - lengths
        in_prompt, _ = ranges(starts, starts + np.minimum(np.tile(prompts, 2), lengths))
        trained[in_prompt] = False
        if self.weighted:
            weights[in_prompt] = 0
        sources = self._sources(items, places[: len(items)])
        ones = np.ones(len(items), np.int64)
        return Block(ids, trained, weights if self.weighted else None, lengths, ones, prompts, sources)

    def _chain_run(self, sequences: Located) -> tuple[Ids, Bool, Float32, Int64]:
        """The same for a shard in which examples share their beginnings: one after the other."""
        found = self._gather.read(sequences)
        weights = found.weights if self.weighted else found.weights[:0]
        return found.ids, found.weights > 0, weights, found.places

    def _shard_run(self, sequences: Located) -> tuple[Ids, Bool, Float32, Int64]:
        """Ids, loss mask, weights (if any are fractions) and places of sequences from one shard."""
        part = self._gather.parts[int(sequences.parts[0])]
        columns, source, _ = part.shard(int(sequences.shards[0]))
        numbers = sequences.numbers
        if columns.prefixes is not None:
            return self._chain_run(sequences)
        begins = columns.id_offsets[numbers] + sequences.starts
        ends = begins + sequences.lengths
        breaks = np.flatnonzero(begins[1:] != ends[:-1])
        firsts, lasts = begins[np.append(0, breaks + 1)].tolist(), ends[np.append(breaks, len(ends) - 1)].tolist()
        ids = _joined([columns.ids[a:b] for a, b in zip(firsts, lasts, strict=True)])
        bounds = columns.segment_offsets
        chosen: slice | Int64 = slice(int(bounds[numbers[0]]), int(bounds[numbers[-1] + 1]))
        if (np.diff(numbers) != 1).any():
            chosen, _ = ranges(bounds[numbers].astype(np.int64), bounds[numbers + 1].astype(np.int64))
        counts = bounds[numbers + 1] - bounds[numbers]
        runs = Runs(
            np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            columns.segment_ends[chosen],
            columns.segment_roles[chosen],
            columns.segment_parts[chosen],
            columns.segment_messages[chosen],
            None if columns.segment_weights is None else columns.segment_weights[chosen],
        )
        per_run = run_weights(part.mask, runs)
        if np.array_equal(sequences.lengths, runs.sizes):  # whole rows
            spread = runs.lengths
            trained = (per_run > 0).repeat(spread)
            weights = per_run.repeat(spread) if self.weighted else per_run[:0]
        else:
            trained = cut_out(per_run > 0, runs, sequences)
            weights = cut_out(per_run, runs, sequences) if self.weighted else per_run[:0]
        places = np.full((len(numbers), 2), source, np.int64)
        return ids, trained, weights, places


def _id_of(view: View, token: str) -> int:
    found = view.dataset.vocabulary.id_of(token)
    if found is None:
        raise UsageError(f"--separator {token}: not a token of the dataset's tokenizer.")
    return int(found)


def text_of(rows: ExportRows, ids: Ids) -> str:
    """The text of some ids."""
    table = rows.views[0].dataset.vocabulary.token_bytes
    return b"".join([table[token] for token in ids.tolist()]).decode("utf-8", "replace")


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _has_fractions(view: View) -> bool:
    for shard in range(len(view.dataset.shards.examples)):
        columns = view.dataset.shards.structure(shard)
        if columns.segment_weights is None and not view.settings.part_weights:
            continue
        weights = run_weights(view.settings.mask, Runs.of(columns))
        if bool(((weights != 0) & (weights != 1)).any()):
            return True
    return False
