"""Reads many items of a view or a mixture at once, as flat arrays for collating.

`Gatherer` takes item numbers in any order and from any shard. It returns their tokens and loss weights (concatenated,
and equal to those of `view[i]`) and their locations. Pairs are returned as all chosen sides, then all rejected sides.
The cost is about 3 µs per sequence and 0.1 ms per call, plus copying; weights are computed once for all runs of a call.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32, Int64, UInt8
from penstock.errors import PenstockError
from penstock.load.options import LossMask
from penstock.load.policy import Float32, Runs, UInt32, run_weights
from penstock.load.view import Served, View
from penstock.prepare.chat.conversation import Role
from penstock.prepare.encode.columns import Columns
from penstock.prepare.faithful.prefixes import tokens
from penstock.store.dataset import Dataset

Scalar = TypeVar("Scalar", bound=np.generic)


class Gathered(NamedTuple):
    """Concatenated sequences. For n pairs there are 2n sequences, but n places and n prompts."""

    ids: Int64
    weights: Float32
    lengths: Int64  # per sequence
    places: Int64  # per item: source and row
    prompts: Int64  # per pair: tokens of the common prompt
    desirable: Int64 | None = None  # per sequence of labelled data (KTO): 1 for a good answer, else 0


class Located(NamedTuple):
    """Sequences to gather."""

    parts: Int64  # the view of the mixture
    shards: Int64
    numbers: Int64  # in the shard
    starts: Int64
    lengths: Int64


class ShardSet(NamedTuple):
    """Shards of one dataset."""

    dataset: Dataset
    shards: list[int]


class Gatherer:
    """Reads items of one view or mixture. Its only state is look-up tables, and it can be used from any thread."""

    def __init__(self, served: Served) -> None:
        views, self._names = served.views, list(served.members) if served.single is None else []
        self.parts = [_Part(view) for view in views]
        self._bounds = np.cumsum([len(view) for view in views])
        self._pairs = served.is_preference
        self._labelled = served.is_labelled
        remote = [view.dataset.shards.download_bytes for view in views if view.dataset.shards.download_bytes]
        self.download_bytes = min(remote, default=0)

    def members(self, items: Int64) -> tuple[str, ...]:
        """In a mixture, the name of the member that each item comes from; else nothing."""
        if not self._names:
            return ()
        return tuple(self._names[part] for part in np.searchsorted(self._bounds, items, side="right").tolist())

    def shards(self, items: Int64) -> list[ShardSet]:
        """The shards that hold these items, in the order of the items."""
        sequences, _ = self.locate(items)
        found: dict[int, dict[int, None]] = {}
        for part, shard in zip(sequences.parts.tolist(), sequences.shards.tolist(), strict=True):
            found.setdefault(part, {})[shard] = None
        return [ShardSet(self.parts[part].dataset, list(shards)) for part, shards in found.items()]

    def __call__(self, items: Int64) -> Gathered:
        """The tokens, weights and places of these items."""
        sequences, prompts = self.locate(items)
        found = self.read(sequences)
        if not self._pairs or not len(found.lengths):
            return found._replace(prompts=prompts)
        weights, lengths = found.weights, found.lengths
        before = np.cumsum(lengths) - lengths
        weights[np.arange(len(weights)) < np.repeat(before + np.tile(prompts, 2), lengths)] = 0
        return found._replace(prompts=prompts, places=found.places[: len(items)])

    def read(self, sequences: Located) -> Gathered:
        """The tokens, weights and places of these sequences; the sides of a pair are read separately."""
        lengths = sequences.lengths
        if not len(lengths):
            nothing = np.empty(0, np.int64)
            return Gathered(nothing, np.empty(0, np.float32), nothing, nothing.reshape(0, 2), nothing)
        ids, runs, places = self._read(sequences)
        weights = cut_out(self._run_weights(sequences.parts, runs), runs, sequences)
        desirable = self.labels(sequences) if self._labelled else None
        return Gathered(ids, weights, lengths, np.array(places, np.int64), lengths[:0], desirable)

    def labels(self, sequences: Located) -> Int64:
        """For each sequence of labelled data (KTO), 1 if its answer is desirable, else 0."""
        found = []
        for part, shard, number in zip(*(field.tolist() for field in sequences[:3]), strict=True):
            labels = self.parts[part].shard(shard)[0].desirable
            assert labels is not None, "a shard of labelled data"
            found.append(int(labels[number]))
        return np.array(found, np.int64)

    def trained_origins(self, items: Int64) -> tuple[UInt8, UInt8, Int64]:
        """The roles and parts of the tokens predicted with a loss, in order, and the number of them in each item."""
        sequences, _ = self.locate(items)
        if not len(sequences.lengths):
            return np.empty(0, np.uint8), np.empty(0, np.uint8), np.empty(0, np.int64)
        _, runs, _ = self._read(sequences)
        trained = cut_out(self._run_weights(sequences.parts, runs), runs, sequences) > 0
        firsts = np.cumsum(sequences.lengths) - sequences.lengths
        trained[firsts] = False
        roles, parts = (cut_out(values, runs, sequences)[trained] for values in (runs.roles, runs.parts))
        return roles, parts, np.add.reduceat(trained.astype(np.int64), firsts)

    def locate(self, items: Int64) -> tuple[Located, Int64]:
        """Locate the sequences of these items, and the prompts of pairs."""
        if len(self.parts) == 1:
            return self.parts[0].locate(items, 0)
        which = np.searchsorted(self._bounds, items, side="right")
        order = np.argsort(which, kind="stable")  # all items of the first part, of the second, …
        found = []
        for number, part in enumerate(self.parts):
            own = items[which == number]
            found.append(part.locate(own - (int(self._bounds[number - 1]) if number else 0), number))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        sides = 2 if self._pairs else 1

        def joined(arrays: list[Int64], sides: int) -> Int64:
            rows = [array.reshape(sides, -1) for array in arrays]
            return np.concatenate(rows, axis=1)[:, back].reshape(-1)

        fields = zip(*(sequences for sequences, _ in found), strict=True)
        located = Located(*(joined(list(arrays), sides) for arrays in fields))
        prompts = [prompts for _, prompts in found]
        return located, joined(prompts, 1) if self._pairs else prompts[0][:0]

    def _read(self, sequences: Located) -> tuple[Int64, Runs, list[tuple[int, int]]]:
        """The tokens, complete runs and places of the sequences. This is the only per-sequence loop, so it is hot."""
        ids, ends, roles, parts, messages = [], list[UInt32](), list[UInt8](), list[UInt8](), list[Int32]()
        given, counts, places = list[Float32 | None](), [0], list[tuple[int, int]]()
        chained: dict[int, Runs] = {}  # sequences that may share a prefix with others of their row
        views = self.parts
        for part, shard, number, start, length in zip(*(field.tolist() for field in sequences), strict=True):
            columns, source, first_row = views[part].shard(shard)
            if columns.prefixes is not None:
                one = chained[len(places)] = Runs.of(columns, number, number + 1)
                ids.append(tokens(columns, number, start, start + length))
                ends.append(one.ends)
                roles.append(one.roles)
                parts.append(one.parts)
                messages.append(one.messages)
                given.append(one.weights)
                counts.append(len(one.roles))
                places.append((source, first_row + columns.rows.item(number)))
                continue
            first = columns.id_offsets.item(number) + start
            own = slice(columns.segment_offsets.item(number), columns.segment_offsets.item(number + 1))
            ids.append(columns.ids[first : first + length])
            ends.append(columns.segment_ends[own])
            roles.append(columns.segment_roles[own])
            parts.append(columns.segment_parts[own])
            messages.append(columns.segment_messages[own])
            given.append(None if columns.segment_weights is None else columns.segment_weights[own])
            counts.append(own.stop - own.start)
            places.append((source, first_row + columns.rows.item(number)))
        runs = Runs(
            np.cumsum(counts, dtype=np.int64),
            np.concatenate(ends),
            np.concatenate(roles),
            np.concatenate(parts),
            np.concatenate(messages),
            _joined_weights(given, counts[1:]),
        )
        return np.concatenate(ids, dtype=np.int64), _of_whole_rows(runs, chained) if chained else runs, places

    def _run_weights(self, parts: Int64, runs: Runs) -> Float32:
        """The weight of each run by the mask of its view."""
        masks = [part.mask for part in self.parts]
        weights = run_weights(masks[0], runs)
        for other in set(masks) - {masks[0]}:
            own = np.array([mask == other for mask in masks])[parts]
            np.copyto(weights, run_weights(other, runs), where=np.repeat(own, runs.counts))
        return weights


class _Part:
    """One view, with the tables that find its items."""

    def __init__(self, view: View) -> None:
        self.dataset = view.dataset
        self._index = view.index
        self._sides = 2 if view.is_preference else 1
        self._first_examples = np.cumsum(view.dataset.shards.examples) - view.dataset.shards.examples
        self._origins: dict[int, tuple[int, int]] = {}  # by shard: its source and the offset of its row numbers
        self.mask: LossMask = view.settings.mask

    def locate(self, items: Int64, part: int) -> tuple[Located, Int64]:
        """The sequences of these items (for pairs, all chosen, then all rejected), and the prompts of pairs."""
        index, sides = self._index, self._sides
        numbers = index.rows[items].astype(np.int64)
        shards = np.searchsorted(index.bounds, numbers, side="right") - 1
        local = (numbers - index.bounds[shards]) * sides
        starts = index.starts[items].astype(np.int64)
        lengths = index.lengths[items].astype(np.int64)
        if sides == 1:
            return Located(np.full(len(items), part), shards, local, starts, lengths), local[:0]
        both = Located(
            np.full(2 * len(items), part),
            np.tile(shards, 2),
            np.concatenate((local, local + 1)),
            np.tile(starts, 2),
            lengths.T.reshape(-1),
        )
        return both, index.prompts[items].astype(np.int64) - starts

    def shard(self, shard: int) -> tuple[Columns, int, int]:
        """The columns of a shard, its source, and the source row that corresponds to its row 0."""
        columns = self.dataset.shards.columns(shard)
        origin = self._origins.get(shard)
        if origin is None:
            place = self.dataset.locate(int(self._first_examples[shard]))
            origin = self._origins[shard] = place.source, place.row - int(columns.rows[0])
        return columns, *origin


def cut_out(per_run: npt.NDArray[Scalar], runs: Runs, sequences: Located) -> npt.NDArray[Scalar]:
    """Expand per-run values to tokens and cut out the windows. The policy has already seen the whole rows."""
    counts = runs.counts
    ends = runs.ends - np.repeat(sequences.starts, counts)
    ends = np.minimum(np.maximum(ends, 0), np.repeat(sequences.lengths, counts)).astype(np.uint32)
    return per_run.repeat(runs._replace(ends=ends).lengths)


def _of_whole_rows(runs: Runs, chained: dict[int, Runs]) -> Runs:
    """The runs, with the last messages of each sequence's whole row."""
    users, assistants = (runs.highest_message(runs.by(role)) for role in (Role.USER, Role.ASSISTANT))
    for number, one in chained.items():
        assert one.last_users is not None
        assert one.last_assistants is not None
        users[number], assistants[number] = one.last_users[0], one.last_assistants[0]
    return runs._replace(last_users=users, last_assistants=assistants)


def _joined_weights(given: list[Float32 | None], counts: list[int]) -> Float32 | None:
    """The weights that rows give their messages; NaN for runs from shards without weights."""
    if all(weights is None for weights in given):
        return None
    empty = (np.full(count, np.nan, np.float32) for count in counts)
    return np.concatenate([none if own is None else own for own, none in zip(given, empty, strict=True)])


# ---- download --------------------------------------------------------------------------------------------------------
#
# Downloads the shards that the next steps need, if the dataset is in an object store.
#
# The plan knows which rows each step holds, and so which shards: a thread walks through the plan ahead of the feed and
# downloads them to the local tier, several at a time and in the order in which they are needed. What it downloads and
# when never changes a batch: a shard that is not there yet is downloaded, or waited for, when its batch is assembled.


DOWNLOADS = 8  # at a time
AHEAD_BATCHES = 1000

ShardsOf = Callable[[int], list[ShardSet]]


class _Window:
    """How far the downloads may be ahead of the feed. It references no iterator, so that one can be collected."""

    def __init__(self, first: int, max_bytes: int) -> None:
        self._position = first  # the next batch to serve
        self._max_bytes = max_bytes
        self._bytes: dict[int, int] = {}  # requested for each batch that was not served yet
        self._closed = False
        self._changed = threading.Condition()
        self.free = threading.Semaphore(2 * DOWNLOADS)

    def served(self, index: int) -> None:
        with self._changed:
            self._position = index + 1
            for old in [batch for batch in self._bytes if batch <= index]:
                del self._bytes[old]
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def is_closed(self) -> bool:
        return self._closed

    def wait_for_room(self, index: int) -> bool:
        """Wait until this batch may be looked at; False if the window was closed."""

        def has_room() -> bool:
            near = index <= self._position
            few = index < self._position + AHEAD_BATCHES and sum(self._bytes.values()) < self._max_bytes
            return self._closed or near or few

        with self._changed:
            self._changed.wait_for(has_room)
            return not self._closed

    def requested(self, index: int, size: int) -> None:
        with self._changed:
            if index >= self._position:
                self._bytes[index] = self._bytes.get(index, 0) + size


class Downloads:
    """Walks through the plan from batch `first` on, with at most `max_bytes` of shards ahead of the feed."""

    def __init__(self, shards_of: ShardsOf, first: int, last: int, max_bytes: int) -> None:
        """`shards_of` returns the shards of a batch, by its index."""
        self._window = _Window(first, max_bytes)
        threading.Thread(
            target=_walk, args=(self._window, shards_of, first, last), name="penstock-downloads", daemon=True
        ).start()
        self._finalizer = weakref.finalize(self, self._window.close)

    def served(self, index: int) -> None:
        """Batch `index` was served."""
        self._window.served(index)

    def close(self) -> None:
        """Stop. Downloads under way end by themselves."""
        self._finalizer()


def _walk(window: _Window, shards_of: ShardsOf, first: int, last: int) -> None:
    seen: set[tuple[int, int]] = set()
    pool = ThreadPoolExecutor(DOWNLOADS, "penstock-download")
    try:
        for index in range(first, last):
            if not window.wait_for_room(index):
                return
            for part in shards_of(index):
                new = [shard for shard in part.shards if (id(part.dataset), shard) not in seen]
                seen.update((id(part.dataset), shard) for shard in new)
                window.requested(index, sum(part.dataset.shards.bytes[shard] for shard in new))
                for shard in new:
                    while not window.free.acquire(timeout=0.5):
                        if window.is_closed():
                            return
                    pool.submit(_download, window, part, shard)
            if len(seen) > 1 << 16:  # early ones may have left the local tier since
                seen.clear()
    except PenstockError:  # assembling the batch raises it
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=window.is_closed())


def _download(window: _Window, part: ShardSet, shard: int) -> None:
    try:
        if not window.is_closed():
            with contextlib.suppress(PenstockError):  # the batch that needs the shard tries again, and raises it
                part.dataset.shards.fetch((shard,))
    finally:
        window.free.release()
