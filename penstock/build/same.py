"""Whether two shards hold the same examples of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.store.columns import Columns

_OF_EXAMPLES = ("row_hashes", "sides", "prefixes", "desirable")
_OF_SEGMENTS = ("segment_ends", "segment_roles", "segment_parts", "segment_messages", "segment_weights")


def same_examples(stored: Columns, row: int, made: Columns, k: int) -> bool:
    """Whether all examples of a row are the same in both."""
    ours, theirs = np.flatnonzero(stored.rows == row).tolist(), np.flatnonzero(made.rows == k).tolist()
    return len(ours) == len(theirs) and all(
        _same(a, b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(_example(stored, one), _example(made, other), strict=True)
    )


def _example(columns: Columns, number: int) -> list[npt.NDArray[Any] | None]:
    tokens = slice(int(columns.id_offsets[number]), int(columns.id_offsets[number + 1]))
    runs = slice(int(columns.segment_offsets[number]), int(columns.segment_offsets[number + 1]))
    parts: list[npt.NDArray[Any] | None] = [columns.ids[tokens]]
    for names, place in ((_OF_EXAMPLES, slice(number, number + 1)), (_OF_SEGMENTS, runs)):
        for name in names:
            values = getattr(columns, name)
            parts.append(None if values is None else values[place])
    return parts


def _same(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    """Weights may be missing in one and be none (NaN) in the other, prefixes missing and zero: whether a shard has the
    column is the slice's matter."""
    if a is None or b is None:
        given = b if a is None else a
        return given is None or bool(np.isnan(given).all() if given.dtype.kind == "f" else not given.any())
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
