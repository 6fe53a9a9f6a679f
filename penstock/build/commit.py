"""The manifest of a finished build: shards in order, the sum of their ledgers, committed last of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.build.recipe import Recipe
from penstock.chat.formats import Format
from penstock.sources import Slice
from penstock.store.cache import Cache
from penstock.store.manifest import Manifest, ShardTable
from penstock.store.shard import ShardMeta, read_shard


def commit_dataset(cache: Cache, key: str, recipe: Recipe, names: list[str], slices: Sequence[Slice]) -> Manifest:
    """The dataset's manifest, put in place."""
    manifest = _manifest(cache, key, recipe, names, slices)
    manifest.commit(cache)
    return manifest


def _manifest(cache: Cache, key: str, recipe: Recipe, names: list[str], slices: Sequence[Slice]) -> Manifest:
    notes = [cache.shard_note(name) for name in names]
    metas: list[ShardMeta] = []
    lengths: list[npt.NDArray[np.int32]] = []
    for name in names:
        columns, meta = read_shard(cache.shard_path(name))
        metas.append(meta)
        lengths.append(np.diff(columns.id_offsets).astype(np.int32))
    table = ShardTable(
        names=names,
        digests=[note["digest"] for note in notes],
        bytes=[note["bytes"] for note in notes],
        sources=[s.file for s in slices],
        first_rows=[s.first_row for s in slices],
        rows=[s.rows for s in slices],
        examples=[meta.ledger["examples"] for meta in metas],
        tokens=[meta.ledger["tokens"] for meta in metas],
    )
    ledger = _summed([meta.ledger for meta in metas]) | {"lengths": _percentiles(lengths)}
    proof = {"rows": sum(len(meta.proof["rows"]) for meta in metas)}
    return Manifest(key, recipe.as_json(), table, ledger, proof, recipe.mapping.format is Format.PREFERENCE)


def _summed(ledgers: list[Any]) -> dict[str, Any]:
    """The ledger of a dataset: the sum of its slices'."""
    counts = ("rows", "kept", "examples", "tokens", "regions_unknown")
    total: dict[str, Any] = {name: sum(ledger[name] for ledger in ledgers) for name in counts}
    for name in ("rejected", "notes"):
        total[name] = dict(sorted(sum((Counter(ledger[name]) for ledger in ledgers), Counter()).items()))
    total["warnings"] = sorted({warning for ledger in ledgers for warning in ledger["warnings"]})
    return total


def _percentiles(lengths: list[npt.NDArray[np.int32]]) -> dict[str, int]:
    """How long examples are, in tokens."""
    joined = np.concatenate(lengths)
    if not len(joined):
        return {}
    shares = np.percentile(joined, (50, 90, 99, 100), method="higher")
    return dict(zip(("p50", "p90", "p99", "max"), map(int, shares), strict=True))
