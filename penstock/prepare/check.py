"""Compares results of a slice with those of the reference engines, row by row.

The spot check of a build, `cache verify --recheck` and the check of other users' shards differ in the rows they choose;
`differing_rows` redoes and compares them for all three.

The spot check chooses two kinds of rows: a seeded sample (a function of the slice's digest and row sizes alone; at
least one row, at most about 0.1% of the bytes, which costs about 3% of the time), and every row that took a branch of
the template in a direction that this process had not compared yet. A long conversation is rendered whole, but encoded
only up to the first end of a turn after `WINDOW` bytes. For a row over a megabyte, both engines run again on a copy
with fewer messages and shorter texts. Rows that were rejected by code that both engines share are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from penstock.prepare.encode.columns import Columns
from penstock.prepare.modes import TurnsMode
from penstock.prepare.pipeline import DROPPED, Pipeline
from penstock.prepare.slice_record import SliceRecord
from penstock.prepare.sources.slices import SliceRows

SHARE = 0.001
WINDOW = 8_000
LONG_ROW = 1_000_000  # bytes
SHORT_BYTES, SHORT_STRING = 200_000, 20_000
_BY_ENGINES = ("template", DROPPED, "special_tokens_in_text")  # kinds of rejections that engines decide
_EXAMPLE_COLUMNS = ("row_hashes", "sides", "prefixes", "desirable")
_SEGMENT_COLUMNS = ("segment_ends", "segment_roles", "segment_parts", "segment_messages", "segment_weights")


def differing_rows(
    pipeline: Pipeline,
    rows: SliceRows,
    numbers: Sequence[int],
    columns: Columns,
    rejected: Iterable[Mapping[str, Any]],
    *,
    window: int = 0,
) -> list[int]:
    """Returns those of the numbered rows for which a result of their slice is not the references'."""
    place = {row: k for k, row in enumerate(numbers)}
    oversize = {place[row]: size for row, size in rows.oversize.items() if row in place}
    picked = SliceRows([rows.rows[row] for row in numbers], [rows.lines[row] for row in numbers], oversize)
    expected = pipeline.run(picked, by_reference=True, window=window)
    refused = {numbers[entry["row"]]: {**entry, "row": numbers[entry["row"]]} for entry in expected.rejected}
    found = {entry["row"]: entry for entry in rejected}
    return [
        row
        for row, k in place.items()
        if found.get(row) != refused.get(row) or not same_examples(columns, row, expected.columns, k, expected.cut)
    ]


def same_examples(
    stored: Columns, row: int, expected: Columns, k: int, cut: set[tuple[int, int]] | frozenset[Any] = frozenset()
) -> bool:
    """Whether the examples of row `row` of `stored` equal those of row `k` of `expected`.

    Only the beginnings are compared of examples that are `cut`, given as row and side.
    """
    ours, theirs = np.flatnonzero(stored.rows == row).tolist(), np.flatnonzero(expected.rows == k).tolist()
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        side = 0 if expected.sides is None else int(expected.sides[other])
        for a, b in zip(_example(stored, one), _example(expected, other), strict=True):
            if (k, side) in cut and a is not None and b is not None:
                a = a[: len(b)]
            if not _same(a, b):
                return False
    return True


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


def sampled_rows(slice_digest: str, sizes: Sequence[int]) -> list[int]:
    """Returns the sorted numbers of the rows that a spot check redoes in any case."""
    if not sizes:
        return []
    order = np.random.Generator(np.random.PCG64(int(slice_digest.removeprefix("b3-")[:16], 16))).permutation(len(sizes))
    budget = sum(sizes) * SHARE
    chosen = [int(order[0])]
    spent = sizes[chosen[0]]
    for row in order[1:64].tolist():
        if spent + sizes[row] > budget:
            break
        chosen.append(row)
        spent += sizes[row]
    return sorted(chosen)


def mismatches(pipeline: Pipeline, rows: SliceRows, sample: Sequence[int], record: SliceRecord) -> list[int]:
    """Returns the sampled rows of a slice for which the references' result differs."""
    shared = {entry["row"] for entry in record.rejected if entry["kind"] not in _BY_ENGINES}
    asked = [row for row in sample if row not in shared]
    long = [row for row in asked if len(rows.rows[row]) > LONG_ROW]
    usual = [row for row in asked if row not in long]
    window = WINDOW if pipeline.recipe.turns is TurnsMode.CONVERSATION else 0
    wrong = differing_rows(pipeline, rows, usual, record.columns, record.rejected, window=window)
    if long:
        short = SliceRows([shortened(rows.rows[row]) for row in long], [1] * len(long))
        again, numbers = pipeline.run(short), range(len(long))
        wrong += [long[k] for k in differing_rows(pipeline, short, numbers, again.columns, again.rejected)]
    return sorted(wrong)


def shortened(row: bytes) -> bytes:
    """Returns a row of the same form with fewer messages and shorter texts, or the row itself if it isn't JSON."""
    try:
        return orjson.dumps(_Shortener().cut(orjson.loads(row)))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return row


class _Shortener:
    """Cuts a value to about `SHORT_BYTES`."""

    def __init__(self) -> None:
        self._budget = SHORT_BYTES

    def cut(self, value: Any) -> Any:
        """Keeps the beginning of strings and the first elements of lists."""
        self._budget -= 8
        if isinstance(value, str):
            kept = value[: max(0, min(self._budget, SHORT_STRING))]
            self._budget -= len(kept)
            return kept
        if isinstance(value, dict):
            return {key: self.cut(own) for key, own in value.items()}
        if isinstance(value, list):
            return [self.cut(own) for own in value if self._budget > 0]
        return value
