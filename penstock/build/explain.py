"""Explains a cache miss: finds the dataset nearest to what `prepare` would build, and lists the differences.

Reads sources that were not read before; encodes nothing. Slices are compared under the other dataset's recipe:
a shard's name is a digest of recipe and slice, so equal rows are recognised even if the recipes differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from penstock.build.options import PrepareOptions
from penstock.build.run import Builder
from penstock.errors import CorruptError, StoreError
from penstock.prepare.sources.slices import Slice
from penstock.store.cache import Cache
from penstock.store.manifest import Manifest, dataset_key, read_manifest, recipe_digest, shard_name
from penstock.store.upkeep.listing import dataset_folders, last_use

# ---- recipe diff -----------------------------------------------------------------------------------------------------
#
# Describes the differences between two recipes, one line each: the old value, then the new one.


Tokenizers = Callable[[str], bytes | None]  # None if it is unknown

_SHORT = 60


def differing_parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parts that differ."""
    return sorted(part for part in {*old, *new} if old.get(part) != new.get(part))


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any], tokenizer_json: Tokenizers) -> list[str]:
    """Describes every part that differs. `tokenizer_json` returns the tokenizer with a digest."""
    found: list[str] = []
    for part in differing_parts(old, new):
        before, after = old.get(part), new.get(part)
        match part:
            case "templates":
                found += _templates(before or {}, after or {})
            case "template_vars":
                found += _entries("template variable ", before, after)
            case "special_tokens":
                found += _entries("special token ", before, after)
            case "mapping":
                found += _mapping(before or {}, after or {})
            case "references":
                found += _entries("version of ", before, after)
            case "tokenizer":
                found += _tokenizers(tokenizer_json(str(before)), tokenizer_json(str(after)))
            case "date":
                found.append(f"date: {before} → {after}")
            case "stages" | "format":
                found.append(f"Penstock's own version of {part}: {before} → {after}")
            case _:
                found.append(f"option {part}: {_shown(before)} → {_shown(after)}")
    return found


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def _entries(what: str, before: Any, after: Any) -> list[str]:
    old: Mapping[str, Any] = before if isinstance(before, Mapping) else {}
    new: Mapping[str, Any] = after if isinstance(after, Mapping) else {}
    found: list[str] = []
    for name in sorted({*old, *new}):
        if name not in old:
            found.append(f"{what}{name}: added ({_shown(new[name])})")
        elif name not in new:
            found.append(f"{what}{name}: gone (was {_shown(old[name])})")
        elif old[name] != new[name]:
            found.append(f"{what}{name}: {_shown(old[name])} → {_shown(new[name])}")
    return found


def _templates(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        title = "template" if name == "default" else f"template {name!r}"
        if name not in old:
            found.append(f"{title}: added")
        elif name not in new:
            found.append(f"{title}: gone")
        elif old[name] != new[name]:
            found.append(f"{title}: {_lines(old[name].split(chr(10)), new[name].split(chr(10)))}")
    return found


def _lines(old: list[str], new: list[str]) -> str:
    """Says which lines of the new text differ, counted from 1."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    steps = [step for step in matcher.get_opcodes() if step[0] != "equal"]
    changed = sum(max(step[2] - step[1], step[4] - step[3]) for step in steps)
    what, first_old, _, first, _ = steps[0]
    if changed == 1:
        verb = {"replace": "changed", "insert": "added", "delete": "removed"}[what]
        return f"line {(first if what != 'delete' else first_old) + 1} {verb}"
    return f"{changed} lines changed, the first is line {first + 1}"


def _mapping(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for part in sorted({*old, *new}):
        before, after = old.get(part), new.get(part)
        if part in ("columns", "roles"):
            found += _entries(f"format mapping: {part.removesuffix('s')} ", before, after)
        elif before != after:
            found.append(f"format mapping: {part.replace('_', ' ')}: {_shown(before)} → {_shown(after)}")
    return found


def _tokenizers(old: bytes | None, new: bytes | None) -> list[str]:
    if old is None or new is None:
        return ["tokenizer.json: other bytes"]
    before, after = orjson.loads(old), orjson.loads(new)
    found = [*_added(before, after), *_model(before.get("model") or {}, after.get("model") or {})]
    parts = sorted({*before, *after} - {"added_tokens", "model"})
    found += [f"tokenizer.json: {part} changed" for part in parts if before.get(part) != after.get(part)]
    return found or ["tokenizer.json: other bytes, the same content"]


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old = {str(token.get("content")): token for token in before.get("added_tokens") or []}
    new = {str(token.get("content")): token for token in after.get("added_tokens") or []}
    found: list[str] = []
    for what, names in (
        ("", sorted(new.keys() - old.keys())),
        (" gone", sorted(old.keys() - new.keys())),
        (" changed", sorted(name for name in old.keys() & new.keys() if old[name] != new[name])),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            found.append(f"tokenizer.json: {len(names)} added token{'s' if len(names) > 1 else ''}{what} ({shown})")
    return found


def _model(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for part in sorted({*old, *new}):
        before, after = old.get(part), new.get(part)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            count = sum(after.get(token) != before.get(token) for token in {*before, *after})
            found.append(f"tokenizer.json: {count} of the {part}'s {len(after)} entries differ")
        elif isinstance(before, list) and isinstance(after, list):
            found.append(f"tokenizer.json: {part} changed ({len(before)} → {len(after)} entries)")
        else:
            found.append(f"tokenizer.json: model {part}: {_shown(before)} → {_shown(after)}")
    return found


# ---- explain ---------------------------------------------------------------------------------------------------------


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
    builder = Builder(sources, options, None)
    slices = builder.find_slices()
    recipe = builder.recipe
    key = dataset_key(recipe.digest, [(s.file, s.first_row, s.digest) for s in slices])
    names = [shard_name(recipe.digest, s.digest) for s in slices]
    builder.cache.refresh(names)
    found = sum(map(builder.cache.has_shard, names))
    notices = tuple(builder.notices)
    candidates = [
        _candidate(manifest, recipe.as_json(), slices, used)
        for manifest, used in _manifests(builder.cache)
        if manifest.key != key
    ]
    has_manifest = _has_manifest(builder.cache, key)
    if has_manifest and found == len(slices):
        return Explanation(True, key, len(slices), found, notices=notices)
    if has_manifest:
        what = f"cache: {len(slices) - found} of {len(slices)} shards of this dataset are missing or damaged"
        return Explanation(False, key, len(slices), found, key, (what,), notices)
    if not candidates:
        return Explanation(False, key, len(slices), found, notices=notices)
    nearest = min(candidates, key=_Candidate.distance)
    in_recipe = recipe_differences(nearest.manifest.recipe, recipe.as_json(), partial(_tokenizer, builder))
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


def _tokenizer(builder: Builder, name: str) -> bytes | None:
    if name == builder.recipe.tokenizer:
        return builder.model.tokenizer_json
    try:
        return builder.cache.tokenizer_json(name)
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
