"""Which date a dated template prints: the one the same data was first prepared with, unless another is asked for.

A small file in the cache, named by the recipe without its date and by the first slice, holds the date. It is written
before the first shard, so a build that is killed before midnight goes on with its date after it, rows that are
appended on another day cost their own slices only, and a copy of the data hits. It is honoured as long as the first
shard with that date is there, or the build may still be under way.
"""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import replace
from pathlib import Path

from penstock.build.recipe import Recipe
from penstock.errors import StoreError
from penstock.sources import Slice
from penstock.store.cache import Cache
from penstock.store.files import digest, read_regular
from penstock.store.manifest import shard_name

UNDER_WAY = datetime.timedelta(days=1)  # a build without its first shard yet is this young


def earlier_date(cache: Cache, recipe: Recipe, first: Slice) -> datetime.date | None:
    """The date that data beginning with this slice was prepared with before, if it is another one."""
    if recipe.date is None:
        return None
    try:
        found = datetime.date.fromisoformat(read_regular(_path(cache, recipe, first)).decode())
    except (OSError, ValueError):
        return None
    if found == recipe.date:
        return None
    begun = cache.has_shard(shard_name(replace(recipe, date=found).digest, first.digest))
    return found if begun or abs(recipe.date - found) <= UNDER_WAY else None


def remember_date(cache: Cache, recipe: Recipe, first: Slice, *, overwrite: bool) -> None:
    """Note the date of a build that begins; an earlier date that still serves stays noted, unless `overwrite`."""
    if recipe.date is None or not (overwrite or earlier_date(cache, recipe, first) is None):
        return
    path = _path(cache, recipe, first)
    with contextlib.suppress(StoreError, OSError):  # a convenience
        given = recipe.date.isoformat().encode()
        if not path.exists() or read_regular(path) != given:
            cache.tree.write(path, given, "date", durable=False)


def _path(cache: Cache, recipe: Recipe, first: Slice) -> Path:
    name = digest(b"date", replace(recipe, date=None).digest.encode(), first.digest.encode())
    return cache.root / "memo" / "dates" / name
