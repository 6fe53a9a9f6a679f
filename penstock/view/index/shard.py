"""Applies a view's settings to one shard: selects the windows of its rows to serve, and accounts for all rows.

Every served window holds at least one trained token (pairs: on both sides). Windows have row numbers within the shard,
and the ledger adds up. Vectorised; each row is visited once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.arrays import Bool, Int64
from penstock.store.columns import Columns
from penstock.view.index.prompts import prompt_lengths
from penstock.view.index.windows import Windows, pair_windows, windows
from penstock.view.ledger import Ledger, Reason
from penstock.view.policy import run_weights
from penstock.view.runs import Runs, Tally, UInt64
from penstock.view.settings import ViewSettings


class Rows(NamedTuple):
    """The rows of one shard: single examples, or pairs."""

    columns: Columns
    runs: Runs
    sizes: Int64  # pairs: a column per side
    unknown: Bool  # unknown regions (pairs: on either side)

    @classmethod
    def of(cls, columns: Columns) -> Rows:
        """All rows of a shard."""
        runs = Runs.of(columns)
        if columns.sides is None:
            return cls(columns, runs, runs.sizes, runs.unknown)
        return cls(columns, runs, runs.sizes.reshape(-1, 2), runs.unknown[0::2] | runs.unknown[1::2])

    @property
    def tokens(self) -> Int64:
        """Tokens per row, of both sides."""
        return _both(self.sizes)

    @property
    def longest(self) -> Int64:
        """Tokens per row, of the longer side."""
        return self.sizes if self.sizes.ndim == 1 else self.sizes.max(axis=1)


def row_hashes(columns: Columns) -> UInt64:
    """One hash per row; the sides of a pair share it."""
    return columns.row_hashes if columns.sides is None else columns.row_hashes[0::2]


def each_row_once(columns: Columns) -> UInt64:
    """The hashes of the rows that a shard's examples come from, once per row."""
    hashes = row_hashes(columns)
    if columns.prefixes is None:
        return hashes
    return hashes[np.flatnonzero(np.diff(columns.rows, prepend=np.uint32(0xFFFFFFFF)))]


def serve(rows: Rows, part: Bool, unknown: Bool, settings: ViewSettings) -> tuple[Windows, Ledger]:
    """The windows to serve from the rows of `part`, a side of the hold-out. Rows flagged `unknown` are dropped."""
    usable = np.flatnonzero(part & ~unknown)
    cut, trained = _cut_singles(rows, usable, settings) if rows.sizes.ndim == 1 else _cut_pairs(rows, usable, settings)
    keep = (trained if trained.ndim == 1 else trained.min(axis=1)) > 0
    served = cut.where(keep)

    cut_rows, kept_rows = np.zeros_like(part), np.zeros_like(part)
    cut_rows[cut.rows], kept_rows[served.rows] = True, True
    cut_tokens, tokens = _both(cut.lengths), rows.tokens
    of_kept = kept_rows[cut.rows]
    trained_tokens = int(trained[keep].sum())
    overlong = part & ~unknown & ~cut_rows
    untrained = cut_rows & ~kept_rows
    ledger = Ledger(
        rows=int(part.sum()),
        kept=int(kept_rows.sum()),
        examples=len(served.rows),
        other_part=int((~part).sum()),
        tokens=int(tokens[part].sum()),
        trained=trained_tokens,
        masked=int(cut_tokens[keep].sum()) - trained_tokens,
        truncated=int(tokens[kept_rows].sum()) - int(cut_tokens[of_kept].sum()),
        dropped_rows=_counts(
            {
                Reason.REGIONS_UNKNOWN: unknown.sum(),
                Reason.OVERLONG: overlong.sum(),
                Reason.NO_TRAINED_TOKEN: untrained.sum(),
            }
        ),
        dropped_tokens=_counts(
            {
                Reason.REGIONS_UNKNOWN: tokens[unknown].sum(),
                Reason.OVERLONG: tokens[overlong].sum(),
                Reason.NO_TRAINED_TOKEN: tokens[untrained].sum(),
                Reason.CHUNK_WITHOUT_TRAINED_TOKEN: cut_tokens[of_kept & ~keep].sum(),
            }
        ),
    )
    return served, ledger


def _cut_singles(rows: Rows, usable: Int64, settings: ViewSettings) -> tuple[Windows, Int64]:
    """Windows of usable rows, and the trained tokens in each."""
    tally = Tally(rows.runs, run_weights(settings.train_on, rows.runs) > 0)
    cut = windows(settings.overlong, settings.max_length, rows.sizes[usable])
    cut = cut._replace(rows=usable[cut.rows])
    trained = tally.totals[cut.rows]
    partial = cut.lengths != rows.sizes[cut.rows]
    some = cut.where(partial)
    trained[partial] = tally.between(some.rows, some.starts, some.starts + some.lengths)
    return cut, trained


def _cut_pairs(rows: Rows, usable: Int64, settings: ViewSettings) -> tuple[Windows, Int64]:
    """Windows of usable pairs, and the trained tokens after the common prompt on each side."""
    tally = Tally(rows.runs, run_weights(settings.train_on, rows.runs) > 0)
    prompts = prompt_lengths(rows.columns, rows.runs)[usable]
    cut = pair_windows(settings.overlong, settings.max_length, rows.sizes[usable], prompts)
    cut = cut._replace(rows=usable[cut.rows])
    trained = np.empty_like(cut.lengths)
    for side in (0, 1):
        ends = cut.starts + cut.lengths[:, side]
        trained[:, side] = tally.between(2 * cut.rows + side, np.minimum(cut.prompts, ends), ends)
    return cut, trained


def _both(tokens: Int64) -> Int64:
    return tokens if tokens.ndim == 1 else tokens.sum(axis=1)


def _counts(counts: dict[Reason, np.int64]) -> dict[str, int]:
    return {reason.value: int(count) for reason, count in counts.items() if count}
