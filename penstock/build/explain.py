"""Explains a cache miss: finds the dataset nearest to what `prepare` would build, and lists the differences.

Reads sources that were not read before; encodes nothing. Slices are compared under the other dataset's recipe:
a shard's name is a digest of recipe and slice, so equal rows are recognised even if the recipes differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.build.find import Search
from penstock.build.options import PrepareOptions
from penstock.errors import CorruptError, StoreError
from penstock.prepare.recipe import differing_parts, recipe_differences
from penstock.prepare.sources.slices import Slice
from penstock.store.cache import Cache
from penstock.store.listing import dataset_folders, last_use
from penstock.store.manifest import Manifest, dataset_key, read_manifest, recipe_digest, shard_name


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether the dataset `key` is in the cache; if not, the most similar one (`nearest`) and how it differs."""

    hit: bool
    key: str
    slices: int
    found: int  # slices that need not be encoded
    nearest: str | None = None
    differences: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    manifest: Manifest
    parts: int  # parts of the recipe that differ
    shared: int  # our slices that it also has, under any recipe
    to_encode: int
    used: float

    def distance(self) -> tuple[int, bool, int, int, float]:
        """Sorts by the slices left to encode; then equal rows with another recipe come before other rows."""
        return self.to_encode, self.shared == 0, self.parts, -self.shared, -self.used


def explain(sources: Sequence[str | Path], options: PrepareOptions) -> Explanation:
    """Reports whether `prepare` would be a hit, and if not, why."""
    search = Search(sources, options)
    slices = search.slices = search.find_slices()
    recipe, key, names = search.recipe, search.key, search.names
    search.cache.refresh(names)
    found = sum(map(search.cache.has_shard, names))
    notices = tuple(search.notices)
    candidates = [
        _candidate(manifest, recipe.as_json(), slices, used)
        for manifest, used in _manifests(search.cache)
        if manifest.key != key
    ]
    has_manifest = _has_manifest(search.cache, key)
    if has_manifest and found == len(slices):
        return Explanation(True, key, len(slices), found, notices=notices)
    if has_manifest:
        what = f"cache: {len(slices) - found} of {len(slices)} shards of this dataset are missing or damaged"
        return Explanation(False, key, len(slices), found, key, (what,), notices)
    if not candidates:
        return Explanation(False, key, len(slices), found, notices=notices)
    nearest = min(candidates, key=_Candidate.distance)
    in_recipe = recipe_differences(nearest.manifest.recipe, recipe.as_json(), partial(_tokenizer, search))
    differences = _with_slices(in_recipe, nearest, slices)
    return Explanation(False, key, len(slices), found, nearest.manifest.key, tuple(differences), notices)


def _has_manifest(cache: Cache, key: str) -> bool:
    try:
        return read_manifest(cache.find_dataset(key)).key == key
    except StoreError:
        return False


def _manifests(cache: Cache) -> list[tuple[Manifest, float]]:
    found: list[tuple[Manifest, float]] = []
    cache.find_datasets()
    for folder in dataset_folders(cache):
        try:
            found.append((read_manifest(folder / "manifest.json"), last_use(folder)))
        except StoreError:
            continue  # `cache ls` and `cache verify` report it
    return found


def _candidate(manifest: Manifest, recipe: Mapping[str, Any], slices: Sequence[Slice], used: float) -> _Candidate:
    parts = len(differing_parts(manifest.recipe, recipe))
    shared = _shared(manifest, slices)
    return _Candidate(manifest, parts, shared, len(slices) if parts else len(slices) - shared, used)


def _shared(manifest: Manifest, slices: Sequence[Slice]) -> int:
    theirs = recipe_digest(manifest.recipe)
    names = set(manifest.shards.names)
    return sum(shard_name(theirs, part.digest) in names for part in slices)


def _tokenizer(search: Search, name: str) -> bytes | None:
    if name == search.recipe.tokenizer:
        return search.model.tokenizer_json
    try:
        return search.cache.tokenizer_json(name)
    except (OSError, CorruptError):
        return None


def _with_slices(recipe: list[str], nearest: _Candidate, slices: Sequence[Slice]) -> list[str]:
    """Adds the differences between the slices; a date that differs alone is reported as "date only"."""
    total, before = len(slices), len(nearest.manifest.shards.names)
    differences = list(recipe)
    if nearest.shared < total:
        differences.append(f"source: {total - nearest.shared} of {total} slices new")
    elif total < before:
        differences.append(f"source: {before - total} of {before} slices gone")
    elif total > before:
        differences.append(f"source: {total - before} of {total} slices repeated")
    elif not _same_order(nearest.manifest, slices):
        differences.append("source: the same slices in another order, or in other files")
    if len(differences) == 1 and differences[0].startswith("date: "):
        return [f"date only: {differences[0].removeprefix('date: ')}"]
    return differences


def _same_order(manifest: Manifest, slices: Sequence[Slice]) -> bool:
    theirs = recipe_digest(manifest.recipe)
    return dataset_key(theirs, [(part.file, part.first_row, part.digest) for part in slices]) == manifest.key
