"""Compares rows of a shard that somebody else made with what the reference engines make of them.

Nothing that the shard says is taken for granted: first its structure and counts are checked against the slice's rows,
all of them; then the chosen rows are redone whole.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.build.pipeline import Pipeline
from penstock.build.slice_job import described
from penstock.sources import SliceRows
from penstock.store.columns import Columns
from penstock.store.shard import ShardMeta

SHARE = 0.005  # of a shard's bytes
LEAST_ROWS, MOST_BYTES = 8, 1 << 16  # a few rows at least, unless they are large
_OF_EXAMPLES = ("row_hashes", "sides", "desirable")
_OF_SEGMENTS = ("segment_ends", "segment_roles", "segment_parts", "segment_messages", "segment_weights")


def surprise_sample(rows: SliceRows) -> list[int]:
    """Numbers of rows to redo, which nobody can foresee: about 0.5% of the bytes, 8 rows at least if they are small."""
    order = list(range(len(rows.rows)))
    secrets.SystemRandom().shuffle(order)
    budget = min(SHARE * sum(map(len, rows.rows)), MOST_BYTES)
    chosen: list[int] = []
    spent = 0
    for row in order:
        if spent >= MOST_BYTES or (spent >= budget and len(chosen) >= LEAST_ROWS):
            break
        chosen.append(row)
        spent += len(rows.rows[row])
    return sorted(chosen)


def random_share(rows: SliceRows, share: float) -> list[int]:
    """Numbers of a share of all rows, at least one of them."""
    total = len(rows.rows)
    return sorted(secrets.SystemRandom().sample(range(total), max(1, round(share * total)))) if total else []


def contradictions(rows: SliceRows, columns: Columns, meta: ShardMeta) -> str | None:
    """What can be seen without an engine: a shard that is not of these rows, or does not add up."""
    try:
        rejected = [entry["row"] for entry in meta.rejected]
        ledger = (meta.ledger["rows"], meta.ledger["kept"], meta.ledger["examples"], meta.ledger["tokens"])
        kinds = meta.ledger["rejected"] == Counter(entry["kind"] for entry in meta.rejected)
    except (KeyError, TypeError) as error:
        return f"it is not a whole shard ({error})"
    kept = np.unique(columns.rows)
    if sorted([*kept.tolist(), *rejected]) != list(range(len(rows.rows))):
        return "it does not hold the slice's rows, each once"
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, rows.rows), np.uint64, len(rows.rows))
    if not np.array_equal(hashes[columns.rows], columns.row_hashes):
        return "its hashes are not those of the slice's rows"
    if not kinds or ledger != (len(rows.rows), len(kept), columns.examples, len(columns.ids)):
        return "its ledger does not add up"
    return None


def differing_rows(
    pipeline: Pipeline, rows: SliceRows, sample: Sequence[int], columns: Columns, rejected: Sequence[dict[str, Any]]
) -> list[int]:
    """Those of the chosen rows that the pipeline makes anything else of."""
    numbers = {row: k for k, row in enumerate(sample)}
    oversize = {numbers[row]: size for row, size in rows.oversize.items() if row in numbers}
    picked = SliceRows([rows.rows[row] for row in sample], [rows.lines[row] for row in sample], oversize)
    result = pipeline.run(picked)
    refused = {sample[entry["row"]]: {**entry, "row": sample[entry["row"]]} for entry in described(result, picked)}
    found = {entry["row"]: entry for entry in rejected}
    return [
        row
        for k, row in enumerate(sample)
        if found.get(row) != refused.get(row) or not _is_equal(columns, row, result.columns, k)
    ]


def _is_equal(stored: Columns, row: int, made: Columns, k: int) -> bool:
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
    """Weights may be missing in one and be none (NaN) in the other: whether a shard has them is the slice's matter."""
    if a is None or b is None:
        given = b if a is None else a
        return given is None or bool(np.isnan(given).all())
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
