"""Chooses the cache folder of a build, and this process's share of the work."""

from __future__ import annotations

import contextlib
import datetime
import os
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.build.options import PrepareOptions
from penstock.digests import digest
from penstock.errors import StoreError, UsageError
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.slices import Slice
from penstock.ranks import launched
from penstock.store.cache import Cache, open_cache
from penstock.store.files import explain_os_errors
from penstock.store.manifest import shard_name


@dataclass(frozen=True, slots=True)
class ChosenCache:
    """A cache folder. `obstacle` says why it can't be written, if so; it still serves hits."""

    cache: Cache
    notices: tuple[str, ...] = ()
    obstacle: StoreError | None = None


def choose_cache(options: PrepareOptions) -> ChosenCache:
    """Returns the cache folder in which to find the dataset, and to build it if the folder can be written."""
    if options.no_cache:
        cache = Cache(tempfile.mkdtemp(prefix="penstock-"), trust=options.trust)
        cache.prepare_root()
        return ChosenCache(cache, (f"--no-cache: the dataset is built in {cache.root}; delete it when you are done",))
    cache = open_cache(options.cache, options.trust, options.local_cache, options.local_cache_bytes)
    cache.check_marker()  # refuses a folder of other files, whatever --on-unwritable says
    try:
        cache.prepare_root()
    except StoreError as obstacle:
        return ChosenCache(cache, obstacle=obstacle)
    return ChosenCache(cache)


def temporary_cache(location: ChosenCache) -> ChosenCache:
    """Returns the folder to build in if the cache can't be written: one per host, user and cache, so that all
    processes with the same obstacle share it."""
    name = f"penstock-{os.getuid()}-{digest(str(location.cache.root).encode())[3:15]}"
    folder = Path(tempfile.gettempdir()) / name
    with explain_os_errors(folder, "can't be created"), contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(
            f"{folder} belongs to another user, so nothing is built there. Choose another folder with --cache."
        )
    temporary = Cache(folder, trust=location.cache.trust)
    temporary.prepare_root()
    return ChosenCache(temporary, (f"{location.obstacle} Building in {temporary.root} instead.",))


def position(options: PrepareOptions) -> tuple[int, int]:
    """Returns rank and world size: from the options, or from the launcher."""
    rank, size = options.rank, options.world_size
    if rank is None and size is None and (found := launched()) is not None:
        return found.rank, found.world_size
    rank, size = rank or 0, size or 1
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} --world-size {size}: the rank must be from 0 to world size - 1")
    return rank, size


# ---- dates -----------------------------------------------------------------------------------------------------------
# Remembers the date that a dated template printed when the same data was first prepared.
#
# Without `--date`, that date is used again. A small file in the cache holds it; its name is a digest of the recipe
# without its date and of the first slice. The file is written before the first shard, so a build that is killed before
# midnight resumes with the same date, appending rows on another day only prepares the new slices, and a copy of the
# data is a hit. The date is used as long as the first shard with that date exists, or the build may still be running.


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
