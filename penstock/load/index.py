"""Builds the index of a view: which window of which row is served.

The scan reads the segments and offsets of one shard at a time (for pairs, also the ids of the common prompts). Rows
that can't be served are counted by reason in the ledger or named in the error; none is skipped silently. A million rows
of ten segments take about a second, with no Python per row; the index takes 12 bytes per example (20 per pair).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int32, Int64
from penstock.errors import RegionsUnknown, ViewError
from penstock.load.example import named
from penstock.load.options import HoldoutSide, LossPolicy, Overlong, UnknownRegions, ViewOptions
from penstock.load.parts import PART_NAMES, part_table
from penstock.load.policy import Float32, Runs, UInt64, run_weights, tokens_by
from penstock.load.windows import Ledger, Rows, Windows, each_row_once, row_hashes, serve
from penstock.store.dataset import Dataset

# ---- keyed -----------------------------------------------------------------------------------------------------------
#
# Stateless pseudo-random numbers: maps a 64-bit word and a key to a uniform word, on every machine and numpy version.
#
# Hold-outs, mixtures and shuffles are built on it. The cost is a few nanoseconds per word.


def splitmix64(words: UInt64) -> UInt64:
    """The finaliser of SplitMix64, a bijection of 64-bit words with good avalanche."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def keyed_hashes(words: UInt64, key: int) -> UInt64:
    """Mix words with a key: uniform, and independent between keys."""
    return splitmix64(words ^ splitmix64(np.array([key], np.uint64)))


def keyed_permutation(size: int, key: int) -> Int64:
    """A permutation of 0 to size-1 that depends only on the key."""
    return np.argsort(keyed_hashes(np.arange(size, dtype=np.uint64), key))


# ---- holdout ---------------------------------------------------------------------------------------------------------
# The hold-out: assigns each row to one part, depending only on the seed and the row's content.
#
# A row is held out if its keyed hash is at or below a threshold. Equal rows are therefore on the same side, and order,
# slicing and mixing don't move a row. If a fraction is held out, rows appended later move no older row; if a number is,
# they can only move older rows back to the training part. The cost is one multiply-shift chain per row, and for a
# number of rows also 8 bytes per row while the threshold is computed.


class Holdout:
    """Decides which rows belong to a view's part."""

    __slots__ = ("_part", "_seed", "_threshold")

    def __init__(self, chosen: ViewOptions, hashes: Iterable[UInt64]) -> None:
        """`hashes` are the row hashes by shard, read only if a number of rows is held out."""
        self._part, self._seed = chosen.holdout_side, chosen.holdout_seed
        self._threshold: np.uint64 | None = None
        match chosen.holdout:
            case None:
                pass
            case int(count):
                self._threshold = _nth_smallest(count, [keyed_hashes(shard, self._seed) for shard in hashes])
            case float(fraction):
                self._threshold = np.uint64(int(fraction * 2.0**64))

    def shows(self, hashes: UInt64) -> Bool:
        """Which of these rows belong to the view's part."""
        if self._threshold is None:
            return np.ones(len(hashes), np.bool_)
        held_out = keyed_hashes(hashes, self._seed) <= self._threshold
        return held_out if self._part is HoldoutSide.HELD_OUT else ~held_out


def _nth_smallest(count: int, keyed: list[UInt64]) -> np.uint64:
    rows = np.concatenate(keyed) if keyed else np.empty(0, np.uint64)
    if count >= len(rows):
        raise ViewError(
            f"holdout={count} leaves nothing to train on: the dataset has {len(rows)} rows. Hold out fewer."
        )
    return np.uint64(np.partition(rows, count - 1)[count - 1])


# ---- scan ------------------------------------------------------------------------------------------------------------


_NAMED: Final = 5  # rows named in an error
_PARTS: Final = 16  # codes of parts are below
_NOTHING: Final = np.empty(0, np.int64)
_Compact = tuple[npt.NDArray[np.integer], Int32, Int32, Int32]


class Index(NamedTuple):
    """The served windows in order, and the ledger."""

    bounds: Int64  # rows before each shard, and the total
    rows: npt.NDArray[np.integer]  # row number in the dataset; 4 bytes where that is enough
    starts: Int32
    lengths: Int32  # pairs: a column per side
    prompts: Int32  # pairs: end of the common prompt in the row
    ledger: Ledger


def scan(dataset: Dataset, settings: ViewOptions) -> Index:
    """Build the index of a view, or raise if some row can't be served."""
    _check_roles(dataset, settings)
    shards = range(len(dataset.shards.examples))
    holdout = Holdout(settings, (each_row_once(dataset.shards.structure(shard)) for shard in shards))
    bounds, found, ledger = [0], [_none(dataset)], Ledger()
    unknown_rows, undivided_rows, weighted = list[Int64](), list[Int64](), False
    for shard in shards:
        columns = dataset.shards.structure(shard)
        rows = Rows.of(columns)
        part = holdout.shows(row_hashes(columns))
        unknown = part & rows.unusable(settings.mask)
        _check_lengths(dataset, settings, rows.longest, part & ~unknown, bounds[-1])
        served, counts = serve(rows, part, unknown, settings)
        found.append(_compact(served, bounds[-1]))
        ledger += counts
        for found_rows, which in ((unknown_rows, rows.unknown), (undivided_rows, ~rows.unknown)):
            found_rows.append(np.flatnonzero(unknown & which) + bounds[-1])
        weighted = weighted or _any_weight(rows.runs)
        bounds.append(bounds[-1] + len(part))
    if settings.regions_unknown is UnknownRegions.ERROR:
        _check_regions(dataset, settings, np.concatenate([*unknown_rows, _NOTHING]))
        _check_parts(dataset, settings, np.concatenate([*undivided_rows, _NOTHING]))
    _check_weights(dataset, settings, weighted)
    numbers, starts, lengths, prompts = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Index(np.array(bounds, np.int64), numbers, starts, lengths, prompts, ledger)


def trained_weights(dataset: Dataset, settings: ViewOptions, index: Index) -> Float32:
    """The sum of the loss weights of each window, without its first token, which is never predicted."""
    totals = np.empty(len(index.rows), np.float32)
    cuts = np.searchsorted(index.rows, index.bounds).tolist()  # windows are in row order
    for shard, (first, last) in enumerate(pairwise(cuts)):
        if first == last:
            continue
        runs = Runs.of(dataset.shards.structure(shard))
        weights = run_weights(settings.mask, runs).astype(np.float64)
        lengths = runs.lengths
        ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        before = np.concatenate(([0.0], np.cumsum(lengths * weights)))
        base = ends[runs.offsets[index.rows[first:last] - index.bounds[shard]]]
        windows = slice(first, last)
        bounds = base + index.starts[windows] + 1, base + index.starts[windows] + index.lengths[windows]
        run = [np.searchsorted(ends[1:], bound) for bound in bounds]
        start, end = (before[k] + (bound - ends[k]) * weights[k] for k, bound in zip(run, bounds, strict=True))
        totals[windows] = end - start
    return totals


def with_parts(dataset: Dataset, settings: ViewOptions, index: Index) -> Ledger:
    """The ledger, with trained and masked tokens counted by part."""
    counts, sides = np.zeros((2, _PARTS), np.int64), 2 if dataset.is_preference else 1
    cuts = np.searchsorted(index.rows, index.bounds).tolist()
    for shard, (first, last) in enumerate(pairwise(cuts)):
        runs = Runs.of(dataset.shards.structure(shard))
        groups = runs.parts + _PARTS * (run_weights(settings.mask, runs) > 0).astype(np.uint8)
        own, starts = sides * (index.rows[first:last] - index.bounds[shard]), index.starts[first:last].astype(np.int64)
        for side in range(sides):
            ends = starts + index.lengths[first:last].reshape(-1, sides)[:, side]
            answers = np.clip(index.prompts[first:last].astype(np.int64), starts, ends) if sides == 2 else starts
            counts += tokens_by(groups, runs, own + side, answers, ends)[: 2 * _PARTS].reshape(2, -1)
            if sides == 2:
                counts[0] += tokens_by(runs.parts, runs, own + side, starts, answers)[:_PARTS]
    masked, trained = ({name: int(half[part]) for part, name in PART_NAMES.items() if half[part]} for half in counts)
    return replace(index.ledger, trained_by_part=trained, masked_by_part=masked)


def _none(dataset: Dataset) -> _Compact:
    shape = (0, 2) if dataset.is_preference else (0,)
    return np.empty(0, np.uint32), np.empty(0, np.int32), np.empty(shape, np.int32), np.empty(0, np.int32)


def _compact(served: Windows, before: int) -> _Compact:
    """Number the rows over the whole dataset, in the smallest types that hold them."""
    small = np.uint32 if before < 2**31 else np.int64
    return (
        (served.rows + before).astype(small),
        served.starts.astype(np.int32),
        served.lengths.astype(np.int32),
        served.prompts.astype(np.int32),
    )


def _any_weight(runs: Runs) -> bool:
    return runs.weights is not None and not bool(np.isnan(runs.weights).all())


def _check_roles(dataset: Dataset, settings: ViewOptions) -> None:
    """Adopted rows record which tokens were trained, but not which role wrote them."""
    if dataset.recipe.get("adopted") and settings.policy not in (LossPolicy.ALL_TOKENS, LossPolicy.CUSTOMIZED):
        raise RegionsUnknown(
            f"the dataset was adopted: it records which tokens were trained, but not which message they belong to, and "
            f"train_on={settings.policy.value!r} needs that. Use train_on='customized' for the mask that the rows "
            "came with, or 'all_tokens'."
        )
    if dataset.recipe.get("adopted") and (settings.parts or part_table(*settings.mask[1:]).divides):
        raise RegionsUnknown(
            "the dataset was adopted: it records which tokens were trained, but not which parts of a message they are. "
            "Leave parts and part_weights out."
        )


def _check_lengths(dataset: Dataset, settings: ViewOptions, sizes: Int64, usable: Bool, before: int) -> None:
    limit = settings.max_length
    if limit is None or settings.overlong is not Overlong.ERROR:
        return
    for row in np.flatnonzero(usable & (sizes > limit)):
        raise ViewError(
            f"{named(dataset, before + int(row))} has {sizes[row]} tokens, more than max_length={limit}. "
            "Raise max_length, or use overlong='truncate', 'truncate_left', 'drop' or 'split'."
        )


def _check_regions(dataset: Dataset, settings: ViewOptions, unknown: Int64) -> None:
    if len(unknown):
        raise RegionsUnknown(
            f"{len(unknown)} of {len(dataset)} rows have unknown regions, but "
            f"train_on={settings.policy.value!r} needs them: {_first(dataset, unknown)}. "
            "Drop them with regions_unknown='drop', or use train_on='all_tokens'."
        )


def _check_parts(dataset: Dataset, settings: ViewOptions, undivided: Int64) -> None:
    if len(undivided):
        option = f"parts={settings.parts!r}" if settings.parts else f"part_weights={dict(settings.part_weights)}"
        raise RegionsUnknown(
            f"{len(undivided)} of {len(dataset)} rows have answers that are not divided into parts, but {option} needs "
            f"that: {_first(dataset, undivided)}. Prepare the data again if an older release did, drop the rows with "
            f"regions_unknown='drop', or leave {option.partition('=')[0]} out."
        )


def _first(dataset: Dataset, rows: Int64) -> str:
    return ", ".join(named(dataset, int(row)) for row in rows[:_NAMED]) + (", …" if len(rows) > _NAMED else "")


def _check_weights(dataset: Dataset, settings: ViewOptions, weighted: bool) -> None:
    if settings.policy is LossPolicy.CUSTOMIZED and not weighted and not dataset.recipe.get("adopted"):
        raise ViewError(
            f"train_on='customized' needs per-message weights, but none of the {len(dataset)} rows has any. "
            "Give messages a weight (keys weight, train, loss, …), or choose another policy."
        )
