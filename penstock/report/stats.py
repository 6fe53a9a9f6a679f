"""Statistics of a dataset or a view, from segments and offsets alone.

Enters: a dataset (all its rows; trained is what `all_assistant_messages` trains), or a view (what it serves, after
truncation). Leaves: `Stats`. A pair counts as one row and as two sequences. Costs a few passes over the segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.chat.conversation import Role
from penstock.view.examples import Examples
from penstock.view.ledger import Reason
from penstock.view.runs import Tally, UInt64
from penstock.view.settings import Overlong, UnknownRegions, ViewSettings
from penstock.view.shard import Rows, row_hashes
from penstock.view.view import View


@dataclass(frozen=True, slots=True)
class Spread:
    """How numbers are spread: values of a quantile are ones that occur."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int

    @classmethod
    def of(cls, values: npt.NDArray[np.integer]) -> Spread:
        """Zeros where there are no values."""
        if not len(values):
            return cls(0.0, 0, 0, 0, 0)
        p50, p90, p99 = np.percentile(values, [50, 90, 99], method="higher")
        return cls(float(values.mean()), int(p50), int(p90), int(p99), int(values.max()))


class Bin(NamedTuple):
    """Sequences of at least `low` and less than `high` tokens."""

    low: int
    high: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a dataset, or a view of it, holds."""

    rows: int
    sequences: int
    tokens: int
    trained: int
    trained_share: float
    lengths: Spread  # tokens per sequence
    messages: Spread  # per sequence with known regions
    histogram: tuple[Bin, ...]
    tokens_by_role: dict[str, int]
    rows_without_trained_token: int
    rows_with_unknown_regions: int
    duplicate_rows: int  # rows whose content occurred before
    cut_rows: int = 0  # by the maximum length: rows that lost tokens,
    cut_tokens: int = 0  # and the tokens they lost

    def to_json(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {**asdict(self), "histogram": [bar._asdict() for bar in self.histogram]}


class Windows(NamedTuple):
    """What is looked at in one shard: windows of its rows (of pairs: `lengths` has a column per side)."""

    rows: Rows
    numbers: Int64
    starts: Int64
    lengths: Int64


class Counts(NamedTuple):
    """What one shard adds."""

    lengths: Int64  # per sequence
    messages: Int64  # per sequence with known regions
    hashes: UInt64  # per row
    unknown: int
    roles: Counter[str]


def stats(target: Examples | View) -> Stats:
    """Statistics of all rows of a dataset, or of what a view serves."""
    if isinstance(target, View):
        view, counts = target, [_count(windows) for windows in _served(target)]
        left_out = view.ledger.dropped_rows.get(Reason.REGIONS_UNKNOWN, 0)
    else:
        view, left_out = View(target, ViewSettings(regions_unknown=UnknownRegions.DROP)), 0
        counts = [_count(windows) for windows in _all(target)]
    lengths = np.concatenate([_NONE, *(count.lengths for count in counts)])
    hashes = np.sort(np.concatenate([_NONE.astype(np.uint64), *(count.hashes for count in counts)]))
    roles = sum((count.roles for count in counts), Counter[str]())
    tokens, trained = int(lengths.sum()), view.ledger.trained
    cut_rows, cut_tokens = _cut(view) if isinstance(target, View) else (0, 0)
    return Stats(
        rows=len(hashes),
        sequences=len(lengths),
        tokens=tokens,
        trained=trained,
        trained_share=trained / tokens if tokens else 0.0,
        lengths=Spread.of(lengths),
        messages=Spread.of(np.concatenate([_NONE, *(count.messages for count in counts)])),
        histogram=_histogram(lengths),
        tokens_by_role={role.name.lower(): roles[role.name.lower()] for role in Role if roles[role.name.lower()]},
        rows_without_trained_token=view.ledger.dropped_rows.get(Reason.NO_TRAINED_TOKEN, 0),
        rows_with_unknown_regions=left_out + sum(count.unknown for count in counts),
        duplicate_rows=int(np.count_nonzero(hashes[1:] == hashes[:-1])),
        cut_rows=cut_rows,
        cut_tokens=cut_tokens,
    )


def _cut(view: View) -> tuple[int, int]:
    """Rows over the view's maximum length, and the tokens that they lose by it."""
    most, how = view.settings.max_length, view.settings.overlong
    if most is None or how is Overlong.SPLIT:
        return 0, 0
    rows = tokens = 0
    for shard in range(len(view.dataset.shard_examples)):
        sizes = Rows.of(view.dataset.columns(shard)).sizes.reshape(-1, 2 if view.is_preference else 1)
        over = sizes[sizes.max(axis=1, initial=0) > most]
        rows += len(over)
        tokens += int((over if how is Overlong.DROP else np.maximum(over - most, 0)).sum())
    return rows, tokens


_NONE: Final = np.empty(0, np.int64)


def _all(dataset: Examples) -> Iterator[Windows]:
    for shard in range(len(dataset.shard_examples)):
        rows = Rows.of(dataset.columns(shard))
        numbers = np.arange(len(rows.sizes))
        yield Windows(rows, numbers, np.zeros_like(numbers), rows.sizes)


def _served(view: View) -> Iterator[Windows]:
    rows_per_shard = view.dataset.shard_examples // (2 if view.is_preference else 1)
    before = np.concatenate(([0], np.cumsum(rows_per_shard)))
    cuts = np.searchsorted(view.numbers, before)
    for shard, (first, last) in enumerate(pairwise(cuts)):
        own = slice(int(first), int(last))
        yield Windows(
            Rows.of(view.dataset.columns(shard)),
            view.numbers[own].astype(np.int64) - before[shard],
            view.starts[own].astype(np.int64),
            view.lengths[own].astype(np.int64),
        )


def _count(windows: Windows) -> Counts:
    rows, runs = windows.rows, windows.rows.runs
    sides = 1 if windows.lengths.ndim == 1 else 2
    sequences = (sides * windows.numbers[:, None] + np.arange(sides)).ravel()
    starts, lengths = np.repeat(windows.starts, sides), windows.lengths.ravel()
    roles = Counter[str]()
    for role in Role:
        of_role = runs.by(role)
        if of_role.any():
            roles[role.name.lower()] = int(Tally(runs, of_role).between(sequences, starts, starts + lengths).sum())
    own = np.unique(windows.numbers)  # a split row is one row
    messages = runs.highest_message(np.ones(len(runs.roles), np.bool_)).astype(np.int64) + 1
    known = sequences[~runs.unknown[sequences]]
    return Counts(lengths, messages[known], row_hashes(rows.columns)[own], int(rows.unknown[own].sum()), roles)


def _histogram(lengths: Int64) -> tuple[Bin, ...]:
    """Bins between powers of two, from the first to the last that is not empty."""
    if not len(lengths):
        return ()
    bits = np.frexp(lengths.astype(np.float64))[1]  # 0 for no tokens, 1 for one, 2 for two and three, …
    counts = np.bincount(bits)
    first = int(bits.min())
    return tuple(Bin(2**bit // 2, 2**bit, int(counts[bit])) for bit in range(first, len(counts)))
