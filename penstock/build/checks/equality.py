"""Compares the examples of a row in two sets of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.store.columns import Columns

_EXAMPLE_COLUMNS = ("row_hashes", "sides", "prefixes", "desirable")
_SEGMENT_COLUMNS = ("segment_ends", "segment_roles", "segment_parts", "segment_messages", "segment_weights")


def same_examples(stored: Columns, row: int, expected: Columns, k: int) -> bool:
    """Whether the examples of row `row` of `stored` equal those of row `k` of `expected`."""
    ours, theirs = np.flatnonzero(stored.rows == row).tolist(), np.flatnonzero(expected.rows == k).tolist()
    return len(ours) == len(theirs) and all(
        _same(a, b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(_example(stored, one), _example(expected, other), strict=True)
    )


def _example(columns: Columns, number: int) -> list[npt.NDArray[Any] | None]:
    tokens = slice(int(columns.id_offsets[number]), int(columns.id_offsets[number + 1]))
    runs = slice(int(columns.segment_offsets[number]), int(columns.segment_offsets[number + 1]))
    parts: list[npt.NDArray[Any] | None] = [columns.ids[tokens]]
    for names, where in ((_EXAMPLE_COLUMNS, slice(number, number + 1)), (_SEGMENT_COLUMNS, runs)):
        for name in names:
            values = getattr(columns, name)
            parts.append(None if values is None else values[where])
    return parts


def _same(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    """Whether two columns are equal. A missing column equals one of NaN (weights) or of zeros (prefixes), because
    the other rows of a slice decide whether its shard has the column."""
    if a is None or b is None:
        given = b if a is None else a
        return given is None or bool(np.isnan(given).all() if given.dtype.kind == "f" else not given.any())
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
