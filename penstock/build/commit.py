"""Writes the manifest of a finished build: its shards in order and the sum of their ledgers. It is committed last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.prepare.chat.formats import Format
from penstock.prepare.faithful.prefixes import sizes
from penstock.prepare.recipe import Recipe
from penstock.store.cache import Cache
from penstock.store.manifest import COUNTS, Manifest, ShardTable


class SliceEntry(Protocol):
    """The properties of a slice that a manifest records."""

    @property
    def file(self) -> int: ...  # ordinal of the source

    @property
    def first_row(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def digest(self) -> str: ...


def commit_dataset(cache: Cache, key: str, recipe: Recipe, names: list[str], slices: Sequence[SliceEntry]) -> Manifest:
    """Builds the dataset's manifest and commits it."""
    manifest = manifest_of(cache, key, recipe, names, slices)
    manifest.commit(cache)
    return manifest


def manifest_of(cache: Cache, key: str, recipe: Recipe, names: list[str], slices: Sequence[SliceEntry]) -> Manifest:
    """Returns the manifest of shards that were prepared with a recipe."""
    preference = recipe.mapping.format is Format.PREFERENCE
    return make_manifest(cache, key, recipe.as_json(), names, slices, preference=preference)


def make_manifest(
    cache: Cache,
    key: str,
    recipe: Mapping[str, Any],
    names: list[str],
    slices: Sequence[SliceEntry],
    *,
    preference: bool,
) -> Manifest:
    """Returns the manifest of committed shards: their counts in order, and the sum of their ledgers."""
    cache.fetch(names)
    notes = [cache.shard_record(name) for name in names]
    ledgers: list[Any] = []
    checked = 0
    lengths: Counter[int] = Counter()
    first_noted: dict[str, list[int]] = {}
    for name, part in zip(names, slices, strict=True):
        columns, meta = cache.structure(name)
        ledgers.append(meta.ledger)
        for note, runs in meta.noted.items():
            first_noted.setdefault(note, [part.file, part.first_row + runs[0]])
        checked += len(meta.proof["rows"])
        distinct, counts = np.unique(sizes(columns), return_counts=True)
        lengths.update(dict(zip(distinct.tolist(), counts.tolist(), strict=True)))
    table = ShardTable(
        names=names,
        slices=[s.digest for s in slices],
        digests=[note["digest"] for note in notes],
        bytes=[note["bytes"] for note in notes],
        sources=[s.file for s in slices],
        first_rows=[s.first_row for s in slices],
        rows=[s.rows for s in slices],
        examples=[ledger["examples"] for ledger in ledgers],
        tokens=[ledger["tokens"] for ledger in ledgers],
    )
    ledger = _summed(ledgers) | {"lengths": _percentiles(lengths), "first_noted": first_noted}
    return Manifest(key, recipe, table, ledger, {"rows": checked}, preference)


def _summed(ledgers: list[Any]) -> dict[str, Any]:
    """Sums the ledgers of slices to the ledger of the dataset."""
    total: dict[str, Any] = {name: sum(ledger[name] for ledger in ledgers) for name in COUNTS}
    for name in ("rejected", "notes", "crossings"):
        total[name] = dict(sorted(sum((Counter(ledger[name]) for ledger in ledgers), Counter()).items()))
    total["warnings"] = sorted({warning for ledger in ledgers for warning in ledger["warnings"]})
    return total


def _percentiles(lengths: Counter[int]) -> dict[str, int]:
    """Computes percentiles of example lengths in tokens from the number of examples of each length."""
    if not lengths:
        return {}
    distinct = sorted(lengths)
    cumulative = np.cumsum([lengths[length] for length in distinct])
    ranks = np.ceil((cumulative[-1] - 1) * np.array((0.5, 0.9, 0.99, 1.0))).astype(np.int64)
    values = [distinct[number] for number in np.searchsorted(cumulative, ranks, side="right").tolist()]
    return dict(zip(("p50", "p90", "p99", "max"), values, strict=True))
