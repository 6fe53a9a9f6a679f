"""Assembles a batch from its index: plan the step, take this rank's share, gather the tokens, collate.

An `Assembler` is a pure function of the index, which counts a rank's micro-batches over all steps; it can be called
from any thread and in any order. The plan of the last step is cached for its other micro-batches.
"""

from __future__ import annotations

import math

import numpy as np
import orjson

from penstock.arrays import Int64
from penstock.feed.batch import Batch, Counts
from penstock.feed.collate import Arrays, Padding, packed, padded, pairs
from penstock.feed.settings import Collate, LoaderSettings
from penstock.feed.tree import RowTrees, tree
from penstock.pack.balance import Work, shares, sizes_of, work_of
from penstock.pack.bins import ranges
from penstock.pack.plan import Plan, StepRows
from penstock.view.gather import Gathered, Gatherer, ShardSet
from penstock.view.mixture import BaseMixture
from penstock.view.view import BaseView, Served


class Assembler:
    """Assembles the batches of one rank."""

    def __init__(self, served: Served, settings: LoaderSettings) -> None:
        self._trees = RowTrees(served) if settings.collate is Collate.TREE else None
        self._served: Served = served if self._trees is None else self._trees
        self.plan = Plan(self._served, settings.plan)
        self._settings = settings
        self._gather = Gatherer(served)
        self._sizes = sizes_of(settings.plan.batch_size, settings.world_size, settings.micro_batch)
        multiple = settings.pad_to_multiple_of
        if settings.collate is Collate.PACKED:
            multiple = math.lcm(multiple, settings.plan.align)
        token = pad_token(served) if settings.pad_id is None else settings.pad_id
        self._padding = Padding(token, settings.side, multiple)
        self._step: tuple[StepRows, list[list[int]], float] | None = None

    @property
    def micros(self) -> int:
        """Micro-batches per step, the same on every rank."""
        return len(self._sizes)

    def __call__(self, index: int) -> Batch:
        """Assemble the batch with this index."""
        step, micro = divmod(index, self.micros)
        rows, cells, weight = self._share(step)
        cell = cells[micro]
        own = np.array([row for row in cell if row >= 0], np.int64)
        items = _items(rows, own)
        if self._gather.download_bytes:
            for part in self._gather.shards(items if self._trees is None else self._trees.items(items)[0]):
                part.dataset.fetch(part.shards)
        if self._trees is not None:
            items, sizes = self._trees.items(items)
            found = self._gather(items)
            arrays, counts = tree(found, sizes, self._padding)
        else:
            found = self._gather(items)
            arrays, counts = self._collated(found, len(cell) - len(own), len(cell))
        if not self._settings.loss_weights:
            del arrays["loss_weights"]
        members = self._gather.members(items)
        return Batch(
            step, rows.epoch, micro, self.micros, arrays, items, found.places, counts, weight, members, self._served
        )  # fmt: skip

    @property
    def download_bytes(self) -> int:
        """Bytes of shards to download ahead of their use; 0 if all shards are on this machine."""
        return self._gather.download_bytes

    def shards(self, index: int) -> list[ShardSet]:
        """The shards that hold the rows of the batch with this index."""
        step, micro = divmod(index, self.micros)
        rows = self.plan.at(step)
        own = np.array([row for row in self._cells(rows)[micro] if row >= 0], np.int64)
        items = _items(rows, own)
        return self._gather.shards(items if self._trees is None else self._trees.items(items)[0])

    def _cells(self, rows: StepRows) -> list[list[int]]:
        """The rows in each of this rank's micro-batches."""
        chosen = self._settings
        return shares(self._work(rows), chosen.plan.batch_size, chosen.world_size, chosen.micro_batch)[chosen.rank]

    def _share(self, step: int) -> tuple[StepRows, list[list[int]], float]:
        """The rows of a step, the rows in each of this rank's micro-batches, and the weight of the whole step."""
        kept = self._step
        if kept is None or kept[0].step != step:
            rows = self.plan.at(step)
            kept = self._step = rows, self._cells(rows), self._weight(rows)
        return kept

    def _weight(self, rows: StepRows) -> float:
        """The total loss weight of a step's predicted tokens; for pairs, the number of pairs."""
        if self._settings.collate is Collate.PAIRS:
            return float(len(rows.items))
        return float(self._served.trained_weights[rows.items].sum(dtype=np.float64))

    def _work(self, rows: StepRows) -> Work:
        lengths = self._served.lengths[rows.items].astype(np.float64)
        return work_of(lengths if lengths.ndim == 1 else np.hypot(lengths[:, 0], lengths[:, 1]), rows.counts)

    def _collated(self, found: Gathered, fillers: int, rows: int) -> tuple[Arrays, Counts]:
        match self._settings.collate:
            case Collate.PADDED:
                return padded(found, fillers, self._padding)
            case Collate.PAIRS:
                return pairs(found, fillers, self._padding)
            case Collate.PACKED:
                plan = self._settings.plan
                assert plan.capacity is not None
                total = rows * plan.capacity if self._settings.pad_to_capacity else 0
                padding = self._padding._replace(total=total, segment=plan.capacity)
                return packed(found, plan.align, fillers, padding)
            case Collate.TREE:
                raise AssertionError("trees are collated by rows")


def _items(rows: StepRows, own: Int64) -> Int64:
    """The items of some rows of a step."""
    ends = np.cumsum(rows.counts)[own]
    return rows.items[ranges(ends - rows.counts[own], ends)[0]]


def pad_token(served: Served) -> int:
    """The tokenizer's pad token, else its EOS token, else 0. Padding is neither attended to nor trained."""
    view = next(iter(served.shares.values())).view if isinstance(served, BaseMixture) else served
    dataset = view.dataset if isinstance(view, BaseView) else None
    specials = dataset.recipe.get("special_tokens") if dataset is not None else None
    raw = getattr(dataset, "tokenizer_json", None)
    if not specials or not isinstance(raw, bytes):
        return 0
    tokenizer = orjson.loads(raw)  # much faster than building the vocabulary for one id
    known = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    for name in ("pad_token", "eos_token"):
        content = specials.get(name)
        if content in known:
            return int(known[content])
    return 0
