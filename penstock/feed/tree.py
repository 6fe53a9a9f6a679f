"""Trees: the chains of a row as one sequence that stores their common prefixes once.

    root   a b c d e f g
    chain        c' x y      shares the root's tokens up to c: attends to a b, then to itself
    chain            e' z

A chain follows its root, starting with the last token that both share; that token is repeated, so that each next token
is predicted from its own branch. A token attends to its own branch up to itself, and to the root before the point where
its branch starts. Positions are those of the separate sequences, so the logits equal those of separate rows.

`tree` returns input_ids, labels, position_ids int64 [1, T]; loss_weights float32 [1, T]; attention_mask float32
[1, 1, T, T], 0 where a token attends and the lowest number elsewhere, for eager attention and SDPA; branches int64
[1, T], the number of a token's branch; parents and starts int64 [n], the root of each branch (itself for a root) and
the position where it starts. `block_mask` turns the last three into a mask for flex attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.arrays import Bool, Int32, Int64
from penstock.errors import UsageError
from penstock.feed.batch import Counts
from penstock.feed.collate import Arrays, Padding
from penstock.view.example import IGNORED, Example, Pair
from penstock.view.gather import Gathered, Gatherer
from penstock.view.ledger import Ledger
from penstock.view.runs import Float32
from penstock.view.view import BaseView, Served

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class RowTrees:
    """A view in which all examples of a row form one item."""

    def __init__(self, served: Served) -> None:
        if not isinstance(served, BaseView):
            raise UsageError("collate='tree' takes one view, not a mixture, whose parts serve single chains.")
        self._view = served
        found, _ = Gatherer(served).locate(np.arange(len(served)))
        prefixes = np.zeros(len(served), np.int64)
        rows = np.zeros(len(served), np.int64)
        for shard in np.unique(found.shards).tolist():
            own, columns = np.flatnonzero(found.shards == shard), served.dataset.structure(shard)
            rows[own] = columns.rows[found.numbers[own]]
            if columns.prefixes is not None:
                prefixes[own] = columns.prefixes[found.numbers[own]]
        changes = (np.diff(found.shards) != 0) | (np.diff(rows) != 0)
        self._bounds = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(served)]))
        shared = np.minimum(np.maximum(prefixes - 1, 0), found.lengths)
        self.lengths: Int32 = np.add.reduceat(found.lengths - shared, self._bounds[:-1]).astype(np.int32)

    @property
    def digest(self) -> str:
        """That of the view."""
        return self._view.digest

    @property
    def is_preference(self) -> bool:
        """Pairs have no trees."""
        return False

    @property
    def is_labelled(self) -> bool:
        """Whether each answer is labelled as desirable or not (KTO)."""
        return self._view.is_labelled

    @property
    def ledger(self) -> Ledger:
        """That of the view."""
        return self._view.ledger

    @property
    def trained_weights(self) -> Float32:
        """Per row, the sum of its predicted tokens' loss weights."""
        return np.add.reduceat(self._view.trained_weights, self._bounds[:-1])

    def epoch_indices(self, epoch: int) -> Int64:
        """Every row, once per epoch."""
        return np.arange(len(self), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: Any) -> Example | Pair:
        return self._view[int(self._bounds[index + 1]) - 1]

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
