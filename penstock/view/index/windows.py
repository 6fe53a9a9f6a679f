"""Over-length policies: which window of each row is served.

Windows (row, start, length) are in row order, and none is longer than `max_length`. With `split`, the windows of a row
partition it; with `drop`, an over-long row has none; otherwise each row has one. Vectorised, linear in the number of
windows.
"""

from __future__ import annotations

from typing import Final, NamedTuple, assert_never

import numpy as np

from penstock.arrays import Bool, Int64
from penstock.errors import UsageError
from penstock.view.settings import Overlong


class Windows(NamedTuple):
    """Served parts of rows. For pairs, `lengths` has a column per side, and both sides share the start."""

    rows: Int64
    starts: Int64
    lengths: Int64
    prompts: Int64  # pairs: end of the common prompt in the row; empty for single rows

    def where(self, keep: Bool) -> Windows:
        """Only the windows to keep."""
        prompts = self.prompts[keep] if len(self.prompts) else self.prompts
        return Windows(self.rows[keep], self.starts[keep], self.lengths[keep], prompts)


_NO_PROMPTS: Final = np.empty(0, np.int64)


def windows(overlong: Overlong, limit: int | None, sizes: Int64) -> Windows:
    """The windows of single rows. `error` counts as no limit here: the caller raises, since it can name the row."""
    rows = np.arange(len(sizes))
    if limit is None:
        return Windows(rows, np.zeros_like(sizes), sizes, _NO_PROMPTS)
    match overlong:
        case Overlong.TRUNCATE:
            return Windows(rows, np.zeros_like(sizes), np.minimum(sizes, limit), _NO_PROMPTS)
        case Overlong.TRUNCATE_LEFT:
            lengths = np.minimum(sizes, limit)
            return Windows(rows, sizes - lengths, lengths, _NO_PROMPTS)
        case Overlong.DROP:
            return Windows(rows, np.zeros_like(sizes), sizes, _NO_PROMPTS).where(sizes <= limit)
        case Overlong.SPLIT:
            return _split(limit, sizes)
        case Overlong.ERROR:
            return Windows(rows, np.zeros_like(sizes), sizes, _NO_PROMPTS)
        case _:
            assert_never(overlong)


def _split(limit: int, sizes: Int64) -> Windows:
    chunks = np.maximum(-(-sizes // limit), 1)  # an empty row has one empty chunk, so that it is counted
    rows = np.repeat(np.arange(len(sizes)), chunks)
    first = np.cumsum(chunks) - chunks
    starts = (np.arange(len(rows)) - first[rows]) * limit
    return Windows(rows, starts, np.minimum(sizes[rows] - starts, limit), _NO_PROMPTS)


def pair_windows(overlong: Overlong, limit: int | None, sizes: Int64, prompts: Int64) -> Windows:
    """The windows of pairs: `sizes` has a column per side, `prompts` the length of their common prompt.

    `truncate` keeps the head of both sides. `truncate_left` removes the same number of tokens from the start of the
    prompt on both sides, enough for the longer side to fit; if removing the whole prompt is not enough, the completion
    is cut at its end. Both sides therefore always start with the same prompt.
    """
    if overlong is Overlong.SPLIT:
        raise UsageError(
            "overlong='split' can't be used with preference data, because it would split pairs. "
            "Use 'truncate', 'truncate_left', 'drop' or 'error'."
        )
    rows, starts = np.arange(len(sizes)), np.zeros(len(sizes), np.int64)
    if limit is None:
        return Windows(rows, starts, sizes, prompts)
    match overlong:
        case Overlong.TRUNCATE:
            return Windows(rows, starts, np.minimum(sizes, limit), prompts)
        case Overlong.TRUNCATE_LEFT:
            starts = np.clip(sizes.max(axis=1) - limit, 0, prompts)
            return Windows(rows, starts, np.minimum(sizes - starts[:, None], limit), prompts)
        case Overlong.DROP:
            return Windows(rows, starts, sizes, prompts).where(sizes.max(axis=1) <= limit)
        case Overlong.ERROR:
            return Windows(rows, starts, sizes, prompts)
        case _:
            assert_never(overlong)
