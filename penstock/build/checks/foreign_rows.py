"""Compares rows of a shard that another user wrote with the result of the reference engines.

Nothing in the shard is trusted: first its structure and counts are checked against all rows of the slice, then the
sampled rows are prepared again and compared.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from penstock.build.checks.equality import same_examples
from penstock.build.slices.job import rejected_entries
from penstock.build.slices.pipeline import Pipeline
from penstock.chat.notes import Note
from penstock.sources import SliceRows
from penstock.store.columns import Columns
from penstock.store.shard import ShardMeta

SHARE = 0.005  # of a shard's bytes
LEAST_ROWS, MOST_BYTES = 8, 1 << 16  # at least this many rows, unless they are large


def unpredictable_sample(rows: SliceRows) -> list[int]:
    """Returns the row numbers of an unpredictable sample: about 0.5% of the bytes, and at least 8 rows if small."""
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
    """Returns the row numbers of a random share of the rows, at least one."""
    total = len(rows.rows)
    return sorted(secrets.SystemRandom().sample(range(total), max(1, round(share * total)))) if total else []


def inconsistency(rows: SliceRows, columns: Columns, meta: ShardMeta) -> str | None:
    """Returns what is wrong with a shard that doesn't belong to these rows or doesn't add up. Runs no engine."""
    try:
        rejected = [entry["row"] for entry in meta.rejected]
        ledger = (meta.ledger["rows"], meta.ledger["kept"], meta.ledger["examples"], meta.ledger["tokens"])
        notes = {note: _counted(runs, len(rows.rows)) for note, runs in meta.noted.items()}
        noted = notes == {note: count for note, count in meta.ledger["notes"].items() if note != Note.ARROW_NULLS}
        kinds = meta.ledger["rejected"] == Counter(entry["kind"] for entry in meta.rejected)
    except (KeyError, TypeError, IndexError) as error:
        return f"it is not a whole shard ({error})"
    kept = np.unique(columns.rows)
    if sorted([*kept.tolist(), *rejected]) != list(range(len(rows.rows))):
        return "it does not hold the slice's rows, each once"
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, rows.rows), np.uint64, len(rows.rows))
    if not np.array_equal(hashes[columns.rows], columns.row_hashes):
        return "its hashes are not those of the slice's rows"
    if not kinds or not noted or ledger != (len(rows.rows), len(kept), columns.examples, columns.tokens):
        return "its ledger does not add up"
    return None


def _counted(runs: list[int], rows: int) -> int:
    """Counts the rows in runs; -1 if the runs are not valid for a slice with this many rows."""
    in_order = all(a < b for a, b in pairwise(runs)) and len(runs) % 2 == 0
    return sum(runs[1::2]) - sum(runs[::2]) if in_order and runs[0] >= 0 and runs[-1] <= rows else -1


def differing_rows(
    pipeline: Pipeline, rows: SliceRows, sample: Sequence[int], columns: Columns, rejected: Sequence[dict[str, Any]]
) -> list[int]:
    """Returns the sampled rows for which the pipeline's result differs from the stored one."""
    numbers = {row: k for k, row in enumerate(sample)}
    oversize = {numbers[row]: size for row, size in rows.oversize.items() if row in numbers}
    picked = SliceRows([rows.rows[row] for row in sample], [rows.lines[row] for row in sample], oversize)
    result = pipeline.run(picked)
    refused = {
        sample[entry["row"]]: {**entry, "row": sample[entry["row"]]} for entry in rejected_entries(result, picked)
    }
    found = {entry["row"]: entry for entry in rejected}
    return [
        row
        for k, row in enumerate(sample)
        if found.get(row) != refused.get(row) or not same_examples(columns, row, result.columns, k)
    ]
