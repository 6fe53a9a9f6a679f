"""Assembles a batch from its index: plan the step, take this rank's share, gather the tokens, collate.

An `Assembler` is a pure function of the index, which counts a rank's micro-batches over all steps; it can be called
from any thread and in any order. The plan of the last step is cached for its other micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from penstock.arrays import Bool, Int32, Int64
from penstock.errors import UsageError
from penstock.load.collate import Arrays, Batch, Counts, Padding, packed, padded, pairs
from penstock.load.example import IGNORED
from penstock.load.gather import Gathered, Gatherer, ShardSet
from penstock.load.options import Collate, LoaderOptions
from penstock.load.packing import ranges
from penstock.load.plan import Plan, StepRows
from penstock.load.policy import Float32
from penstock.load.view import Served

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


# ---- balance ---------------------------------------------------------------------------------------------------------
# Balances a step: assigns its rows to ranks and micro-batches so that all have about the same work.
#
# The work of a row is Σ length² over its sequences, the cost of attention. Every row is in exactly one cell (a rank's
# micro-batch); the n-th cells of all ranks have the same size, so all ranks run the same number of batches. Missing
# rows are -1: rows without loss fill them.
#
# Greedy, heaviest row first: each row goes to the rank with the least work that still has room, and likewise to a
# micro-batch within the rank. A rank's micro-batches are then sorted by work, so that ranks which synchronise after
# each one wait as little as possible. Rows within a cell keep the plan's order. Costs about 1 µs per row, and nothing
# for one rank without micro-batches.


Work = npt.NDArray[np.float64]


def sizes_of(rows: int, world_size: int, micro_batch: int | None) -> list[int]:
    """The micro-batch sizes of each rank for a step of `rows` rows."""
    share = -(-rows // world_size)
    size = min(micro_batch or share, share)
    whole, rest = divmod(share, size)
    return [size] * whole + [rest] * (rest > 0)


def shares(work: Work, rows: int, world_size: int, micro_batch: int | None) -> list[list[list[int]]]:
    """Row numbers by rank and micro-batch; `rows` is the full size of a step, and `work` may cover fewer."""
    sizes = sizes_of(rows, world_size, micro_batch)
    every = [sum(sizes)] * world_size
    return [_micro_batches(rank, work, sizes) for rank in _deal(range(len(work)), work, every)]


def _micro_batches(rows: list[int], work: Work, sizes: list[int]) -> list[list[int]]:
    cells = _deal(rows, work, sizes)
    # Only cells of equal size may be reordered; a smaller one stays last.
    equal = sum(size == sizes[0] for size in sizes)
    cells[:equal] = sorted(cells[:equal], key=lambda cell: -sum(work[row] for row in cell))
    return [cell + [-1] * (size - len(cell)) for cell, size in zip(cells, sizes, strict=True)]


def _deal(rows: Sequence[int], work: Work, sizes: list[int]) -> list[list[int]]:
    """Deals rows to cells of the given sizes, heaviest first, each to the cell with the least work."""
    if len(sizes) == 1:
        return [list(rows)]
    cells: list[list[int]] = [[] for _ in sizes]
    heap = [(0.0, cell) for cell, size in enumerate(sizes) if size]
    own = np.asarray(rows, np.int64)
    for row in own[np.argsort(-work[own], kind="stable")].tolist():
        load, cell = heapq.heappop(heap)
        cells[cell].append(row)
        if len(cells[cell]) < sizes[cell]:
            heapq.heappush(heap, (load + float(work[row]), cell))
    return [sorted(cell) for cell in cells]


def work_of(lengths: Work, counts: Int64) -> Work:
    """Σ length² per row, where row i has `counts[i]` sequences."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, weights=lengths**2, minlength=len(counts)).astype(np.float64)


# ---- tree ------------------------------------------------------------------------------------------------------------
# Trees: the chains of a row as one sequence that stores their common prefixes once.
#
#     root   a b c d e f g
#     chain        c' x y      shares the root's tokens up to c: attends to a b, then to itself
#     chain            e' z
#
# A chain follows its root, starting with the last token that both share; that token is repeated, so that each next
# token is predicted from its own branch. A token attends to its own branch up to itself, and to the root before the
# point where its branch starts. Positions are those of the separate sequences, so the logits equal those of separate
# rows.
#
# `tree` returns input_ids, labels, position_ids int64 [1, T]; loss_weights float32 [1, T]; attention_mask float32 [1,
# 1, T, T], 0 where a token attends and the lowest number elsewhere, for eager attention and SDPA; branches int64 [1,
# T], the number of a token's branch; parents and starts int64 [n], the root of each branch (itself for a root) and the
# position where it starts. `block_mask` turns the last three into a mask for flex attention.


class RowTrees:
    """The items of a view in which all examples of a row form one."""

    varies, in_order = False, True

    def __init__(self, served: Served) -> None:
        if served.single is None:
            raise UsageError("collate='tree' takes one view, not a mixture, whose parts serve single chains.")
        self._view = served.single
        found, _ = Gatherer(served).locate(np.arange(len(served)))
        prefixes = np.zeros(len(served), np.int64)
        rows = np.zeros(len(served), np.int64)
        for shard in np.unique(found.shards).tolist():
            own, columns = np.flatnonzero(found.shards == shard), self._view.dataset.shards.structure(shard)
            rows[own] = columns.rows[found.numbers[own]]
            if columns.prefixes is not None:
                prefixes[own] = columns.prefixes[found.numbers[own]]
        changes = (np.diff(found.shards) != 0) | (np.diff(rows) != 0)
        self._bounds = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(served)]))
        shared = np.minimum(np.maximum(prefixes - 1, 0), found.lengths)
        self.lengths: Int32 = np.add.reduceat(found.lengths - shared, self._bounds[:-1]).astype(np.int32)

    @property
    def trained_weights(self) -> Float32:
        """Per row, the sum of its predicted tokens' loss weights."""
        return np.add.reduceat(self._view.trained_weights, self._bounds[:-1])

    def epoch_indices(self, epoch: int) -> Int64:
        """Every row, once per epoch."""
        return np.arange(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def items(self, rows: Int64) -> tuple[Int64, Int64]:
        """The examples of these rows, and the number of examples of each."""
        counts = self._bounds[rows + 1] - self._bounds[rows]
        found = [np.arange(self._bounds[row], self._bounds[row + 1]) for row in rows.tolist()]
        return np.concatenate([np.empty(0, np.int64), *found]), counts


class _Branch(NamedTuple):
    first: int  # in the gathered tokens
    last: int
    start: int  # its position
    root: int  # the number of its branch


def tree(found: Gathered, counts: Int64, padding: Padding) -> tuple[Arrays, Counts]:
    """Lay the sequences of rows out as one row of trees; the last sequence of each row is its root."""
    branches = _branches(found, counts.tolist())
    sizes = np.array([b.last - b.first for b in branches], np.int64)
    total = int(sizes.sum())
    width = max(total, 1)
    width += -width % padding.multiple
    places = np.concatenate([np.empty(0, np.int64), *(np.arange(b.first, b.last) for b in branches)])
    ids, labels = np.full(width, padding.token, np.int64), np.full(width, IGNORED, np.int64)
    weights, positions = np.zeros(width, np.float32), np.zeros(width, np.int64)
    ids[:total], weights[:total] = found.ids[places], found.weights[places]
    weights[np.cumsum(sizes) - sizes] = 0
    labels[:total] = np.where(weights[:total] > 0, ids[:total], IGNORED)
    starts = np.array([b.start for b in branches], np.int64)
    positions[:total] = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes - starts, sizes)
    owner = np.full(width, len(branches), np.int64)  # padding is a branch of its own
    owner[:total] = np.repeat(np.arange(len(branches)), sizes)
    positions[total:] = np.arange(width - total)
    parents = np.array([*(b.root for b in branches), len(branches)], np.int64)
    starts = np.append(starts, 0)
    arrays: Arrays = {
        "input_ids": ids[None],
        "labels": labels[None],
        "position_ids": positions[None],
        "loss_weights": weights[None],
        "attention_mask": _additive(attends(owner, positions, parents, starts)),
        "branches": owner[None],
        "parents": parents,
        "starts": starts,
    }
    trained = int(np.count_nonzero(weights))
    return arrays, Counts(len(found.lengths), total, trained, width - total, 0)


def attends(owner: Int64, positions: Int64, parents: Int64, starts: Int64) -> Bool:
    """Which tokens (rows) attend to which (columns)."""
    same = owner[:, None] == owner
    earlier = same & (positions[:, None] >= positions)
    in_root = (parents[owner][:, None] == owner) & ~same & (positions < starts[owner][:, None])
    return np.asarray(earlier | in_root)


def _additive(mask: Bool) -> Any:
    return np.where(mask, np.float32(0), np.finfo(np.float32).min)[None, None]


def _branches(found: Gathered, counts: list[int]) -> list[_Branch]:
    """The root of each row, then its chains from the point where they branch off."""
    ends = np.cumsum(found.lengths)
    branches: list[_Branch] = []
    first = 0
    for count in counts:
        root = first + count - 1
        number = len(branches)
        begin, end = int(ends[root] - found.lengths[root]), int(ends[root])
        branches.append(_Branch(begin, end, 0, number))
        for sequence in range(first, root):
            own, last = int(ends[sequence] - found.lengths[sequence]), int(ends[sequence])
            start = max(_shared(found, own, last, begin, end) - 1, 0)
            branches.append(_Branch(own + start, last, start, number if start else len(branches)))
        first = root + 1
    return branches


def _shared(found: Gathered, own: int, last: int, begin: int, end: int) -> int:
    """Number of tokens that a sequence shares with its root before the first token it trains."""
    size = min(last - own, end - begin)
    differ = (found.ids[own : own + size] != found.ids[begin : begin + size]) | (found.weights[own : own + size] > 0)
    return int(differ.argmax()) if differ.any() else size


def block_mask(tensors: Any, **options: Any) -> BlockMask:
    """The mask of a batch for flex attention; `options` are passed to torch's `create_block_mask`."""
    from torch.nn.attention.flex_attention import create_block_mask

    owner, positions = tensors["branches"][0], tensors["position_ids"][0]
    parents, starts = tensors["parents"], tensors["starts"]

    def attends_to(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        own, other = owner[query], owner[key]
        earlier = (own == other) & (positions[query] >= positions[key])
        in_root = (parents[own] == other) & (own != other) & (positions[key] < starts[own])
        return earlier | in_root

    options = {"device": owner.device, **options}
    return create_block_mask(attends_to, B=None, H=None, Q_LEN=len(owner), KV_LEN=len(owner), **options)


# ---- assemble --------------------------------------------------------------------------------------------------------


class Assembler:
    """Assembles the batches of one rank."""

    def __init__(self, served: Served, settings: LoaderOptions) -> None:
        self._trees = RowTrees(served) if settings.collate is Collate.TREE else None
        self._served = served
        self._items = served if self._trees is None else self._trees
        self.plan = Plan(self._items, settings)
        self._settings = settings
        self._gather = Gatherer(served)
        self._sizes = sizes_of(settings.batch_size, settings.ranks[1], settings.micro_batch)
        multiple = settings.pad_to_multiple_of
        if settings.collate is Collate.PACKED:
            multiple = math.lcm(multiple, settings.align)
        token = pad_token(served) if settings.pad_id is None else settings.pad_id
        self._padding = Padding(token, settings.padding_side, multiple)
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
                part.dataset.shards.fetch(part.shards)
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
        chosen, (rank, world_size) = self._settings, self._settings.ranks
        return shares(self._work(rows), chosen.batch_size, world_size, chosen.micro_batch)[rank]

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
        return float(self._items.trained_weights[rows.items].sum(dtype=np.float64))

    def _work(self, rows: StepRows) -> Work:
        lengths = self._items.lengths[rows.items].astype(np.float64)
        return work_of(lengths if lengths.ndim == 1 else np.hypot(lengths[:, 0], lengths[:, 1]), rows.counts)

    def _collated(self, found: Gathered, fillers: int, rows: int) -> tuple[Arrays, Counts]:
        match self._settings.collate:
            case Collate.PADDED:
                return padded(found, fillers, self._padding)
            case Collate.PAIRS:
                return pairs(found, fillers, self._padding)
            case Collate.PACKED:
                chosen = self._settings
                assert chosen.capacity is not None
                total = rows * chosen.capacity if chosen.pad_to_capacity else 0
                padding = self._padding._replace(total=total, segment=chosen.capacity)
                return packed(found, chosen.align, fillers, padding)
            case Collate.TREE | None:
                raise AssertionError("trees are collated by rows, and options are resolved")


def _items(rows: StepRows, own: Int64) -> Int64:
    """The items of some rows of a step."""
    ends = np.cumsum(rows.counts)[own]
    return rows.items[ranges(ends - rows.counts[own], ends)[0]]


def pad_token(served: Served) -> int:
    """The tokenizer's pad token, else its EOS token, else 0. Padding is neither attended to nor trained."""
    dataset = served.views[0].dataset
    specials = dataset.recipe.get("special_tokens")
    if not specials:
        return 0
    tokenizer = orjson.loads(dataset.tokenizer_json)  # much faster than building the vocabulary for one id
    known = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    for name in ("pad_token", "eos_token"):
        content = specials.get(name)
        if content in known:
            return int(known[content])
    return 0
