"""Tokens lost to a maximum length, and fill rates of packed rows by capacity. Both need only the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.load.packing import Histogram, best_fit

_SMALLEST: Final = 32
_LARGEST: Final = 1 << 17
_MOST: Final = 8  # limits or capacities to compare
_MANY: Final = 16  # longest sequences in the largest capacity

Lengths = npt.NDArray[np.integer]


class Limit(NamedTuple):
    """A maximum length, and the tokens that truncating to it would lose."""

    max_length: int
    sequences: int  # longer than that
    tokens: int  # beyond it
    share: float  # of all tokens


class Fill(NamedTuple):
    """Packed rows of one capacity: `wasted` is the share of padding, `cut` the tokens that don't fit in a row."""

    capacity: int
    rows: int
    tokens: int
    wasted: float
    cut: int


def limits(lengths: Lengths, chosen: int | None = None) -> tuple[Limit, ...]:
    """Powers of two around the lengths, and the configured maximum length."""
    if not len(lengths):
        return ()
    total = int(lengths.sum(dtype=np.int64))
    return tuple(
        Limit(
            limit,
            int(np.count_nonzero(lengths > limit)),
            beyond := int(np.maximum(lengths.astype(np.int64) - limit, 0).sum()),
            beyond / max(total, 1),
        )
        for limit in candidates(2 * int(lengths.max()) - 1, chosen)
    )


def fills(lengths: Lengths, chosen: int | None = None) -> tuple[Fill, ...]:
    """Packing at several capacities; sequences longer than the capacity would be truncated."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return ()
    total = int(lengths.sum(dtype=np.int64))
    found = []
    for capacity in candidates(_MANY * int(lengths.max()), chosen):
        kept = np.minimum(lengths, capacity)
        rows, tokens = best_fit(Histogram.of(kept), capacity).total, int(kept.sum(dtype=np.int64))
        found.append(Fill(capacity, rows, tokens, 1 - tokens / (rows * capacity), total - tokens))
    return tuple(found)


def best(found: Sequence[Fill]) -> Fill | None:
    """The capacity with the least padding plus cut tokens; the smaller one on a tie."""

    def waste(fill: Fill) -> tuple[float, int]:
        return round(fill.wasted + fill.cut / max(fill.tokens + fill.cut, 1), 4), fill.capacity

    return min(found, key=waste, default=None)


def candidates(top: int, chosen: int | None) -> list[int]:
    """The largest powers of two up to `top`, and the configured number."""
    top = min(max(top, _SMALLEST), _LARGEST)
    powers = [1 << bit for bit in range(_SMALLEST.bit_length() - 1, top.bit_length())][-_MOST:]
    return sorted({*powers, *([chosen] if chosen else [])})
