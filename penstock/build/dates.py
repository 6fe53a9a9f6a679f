"""Remembers the date that a dated template printed when the same data was first prepared.

Without `--date`, that date is used again. A small file in the cache holds it; its name is a digest of the recipe
without its date and of the first slice. The file is written before the first shard, so a build that is killed before
midnight resumes with the same date, appending rows on another day only prepares the new slices, and a copy of
the data is a hit. The date is used as long as the first shard with that date exists, or the build may still be running.
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
from penstock.store.files import digest
from penstock.store.manifest import shard_name

MAX_AGE = datetime.timedelta(days=1)  # of a build that has not committed its first shard


def earlier_date(cache: Cache, recipe: Recipe, first: Slice) -> datetime.date | None:
    """Returns the date that data starting with this slice was prepared with before, if it differs from the recipe's."""
    if recipe.date is None:
        return None
    try:
        found = datetime.date.fromisoformat(cache.read_file(_path(cache, recipe, first)).decode())
    except (OSError, ValueError):
        return None
    if found == recipe.date:
        return None
    has_shard = cache.has_shard(shard_name(replace(recipe, date=found).digest, first.digest))
    return found if has_shard or abs(recipe.date - found) <= MAX_AGE else None


def remember_date(cache: Cache, recipe: Recipe, first: Slice, *, overwrite: bool) -> None:
    """Records the date of a build that starts. An earlier date that is still valid is kept, unless `overwrite`."""
    if recipe.date is None or not (overwrite or earlier_date(cache, recipe, first) is None):
        return
    path = _path(cache, recipe, first)
    with contextlib.suppress(StoreError, OSError):  # the build works without it
        given = recipe.date.isoformat().encode()
        if _known(cache, path) != given:
            cache.write_file(path, given, "date", durable=False)


def _known(cache: Cache, path: Path) -> bytes | None:
    try:
        return cache.read_file(path)
    except FileNotFoundError:
        return None


def _path(cache: Cache, recipe: Recipe, first: Slice) -> Path:
    name = digest(b"date", replace(recipe, date=None).digest.encode(), first.digest.encode())
    return cache.root / "memo" / "dates" / name
