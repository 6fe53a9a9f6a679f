"""Builds the index of a view: which window of which row is served.

The scan reads the segments and offsets of one shard at a time (for pairs, also the ids of the common prompts). Rows
that can't be served are counted by reason in the ledger or named in the error; none is skipped silently. A million rows
of ten segments take about a second, with no Python per row; the index takes 12 bytes per example (20 per pair).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int32, Int64
from penstock.errors import RegionsUnknown, ViewError
from penstock.view.examples import Examples, named, place_of
from penstock.view.index.holdout import Holdout
from penstock.view.index.shard import Rows, each_row_once, row_hashes, serve
from penstock.view.index.windows import Windows
from penstock.view.ledger import Ledger
from penstock.view.policy import run_weights
from penstock.view.runs import Float32, Runs
from penstock.view.settings import LossPolicy, Overlong, UnknownRegions, ViewSettings

_NAMED: Final = 5  # rows named in an error
_Compact = tuple[npt.NDArray[np.integer], Int32, Int32, Int32]


class Index(NamedTuple):
    """The served windows in order, and the ledger."""

    bounds: Int64  # rows before each shard, and the total
    rows: npt.NDArray[np.integer]  # row number in the dataset; 4 bytes where that is enough
    starts: Int32
    lengths: Int32  # pairs: a column per side
    prompts: Int32  # pairs: end of the common prompt in the row
    ledger: Ledger


def scan(examples: Examples, settings: ViewSettings) -> Index:
    """Build the index of a view, or raise if some row can't be served."""
    _check_roles(examples, settings)
    shards = range(len(examples.shard_examples))
    holdout = Holdout(settings, (each_row_once(examples.structure(shard)) for shard in shards))
    bounds, found, ledger = [0], [_none(examples)], Ledger()
    unknown_rows, weighted = list[Int64](), False
    for shard in shards:
        columns = examples.structure(shard)
        rows = Rows.of(columns)
        part = holdout.shows(row_hashes(columns))
        unknown = part & rows.unknown & settings.train_on.needs_regions
        _check_lengths(examples, settings, rows.longest, part & ~unknown, bounds[-1])
        served, counts = serve(rows, part, unknown, settings)
        found.append(_compact(served, bounds[-1]))
        ledger += counts
        unknown_rows.append(np.flatnonzero(unknown) + bounds[-1])
        weighted = weighted or _any_weight(rows.runs)
        bounds.append(bounds[-1] + len(part))
    _check_regions(examples, settings, unknown_rows)
    _check_weights(examples, settings, weighted)
    numbers, starts, lengths, prompts = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Index(np.array(bounds, np.int64), numbers, starts, lengths, prompts, ledger)


def trained_weights(examples: Examples, settings: ViewSettings, index: Index) -> Float32:
    """The sum of the loss weights of each window, without its first token, which is never predicted."""
    totals = np.empty(len(index.rows), np.float32)
    cuts = np.searchsorted(index.rows, index.bounds).tolist()  # windows are in row order
    for shard, (first, last) in enumerate(pairwise(cuts)):
        if first == last:
            continue
        runs = Runs.of(examples.structure(shard))
        weights = run_weights(settings.train_on, runs).astype(np.float64)
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


def _none(examples: Examples) -> _Compact:
    shape = (0, 2) if examples.is_preference else (0,)
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


def _check_roles(examples: Examples, settings: ViewSettings) -> None:
    """Adopted rows record which tokens were trained, but not which role wrote them."""
    if examples.recipe.get("adopted") and settings.train_on not in (LossPolicy.ALL_TOKENS, LossPolicy.CUSTOMIZED):
        raise RegionsUnknown(
            f"the dataset was adopted: it records which tokens were trained, but not which message they belong to, and "
            f"train_on={settings.train_on.value!r} needs that. Use train_on='customized' for the mask that the rows "
            "came with, or 'all_tokens'."
        )


def _check_lengths(examples: Examples, settings: ViewSettings, sizes: Int64, usable: Bool, before: int) -> None:
    limit = settings.max_length
    if limit is None or settings.overlong is not Overlong.ERROR:
        return
    for row in np.flatnonzero(usable & (sizes > limit)):
        raise ViewError(
            f"{named(place_of(examples, before + int(row)))} has {sizes[row]} tokens, more than max_length={limit}. "
            "Raise max_length, or use overlong='truncate', 'truncate_left', 'drop' or 'split'."
        )


def _check_regions(examples: Examples, settings: ViewSettings, unknown_rows: list[Int64]) -> None:
    unknown = np.concatenate(unknown_rows) if unknown_rows else np.empty(0, np.int64)
    if not len(unknown) or settings.regions_unknown is UnknownRegions.DROP:
        return
    first = ", ".join(named(place_of(examples, int(row))) for row in unknown[:_NAMED])
    raise RegionsUnknown(
        f"{len(unknown)} of {len(examples)} rows have unknown regions, but "
        f"train_on={settings.train_on.value!r} needs them: {first}{', …' if len(unknown) > _NAMED else ''}. "
        "Drop them with regions_unknown='drop', or use train_on='all_tokens'."
    )


def _check_weights(examples: Examples, settings: ViewSettings, weighted: bool) -> None:
    if settings.train_on is LossPolicy.CUSTOMIZED and not weighted and not examples.recipe.get("adopted"):
        raise ViewError(
            f"train_on='customized' needs per-message weights, but none of the {len(examples)} rows has any. "
            "Give messages a weight (keys weight, train, loss, …), or choose another policy."
        )
