"""Where a build happens: which cache folder, and which share of the work among several processes."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.build.options import PrepareOptions
from penstock.build.workers.ranks import launched
from penstock.errors import StoreError, UsageError
from penstock.store.cache import Cache
from penstock.store.files import digest, explain_os_errors


@dataclass(frozen=True, slots=True)
class Place:
    """A cache folder. `obstacle`: it can only be read, and why; it still serves hits."""

    cache: Cache
    notices: tuple[str, ...] = ()
    obstacle: StoreError | None = None


def chosen_place(options: PrepareOptions) -> Place:
    """Where to look for the dataset, and to build it if the folder can be written."""
    if options.no_cache:
        cache = Cache(tempfile.mkdtemp(prefix="penstock-"), trust=options.trust)
        cache.prepare_root()
        return Place(cache, (f"--no-cache: the dataset is built in {cache.root}; delete it when you are done",))
    cache = Cache(options.cache, trust=options.trust)
    cache.check_marker()  # a folder of other files is refused, even where building elsewhere is wanted
    try:
        cache.prepare_root()
    except StoreError as obstacle:
        return Place(cache, obstacle=obstacle)
    return Place(cache)


def spare_place(place: Place) -> Place:
    """Where to build instead: a folder per host, user and cache, which all processes that meet the obstacle share."""
    name = f"penstock-{os.getuid()}-{digest(str(place.cache.root).encode())[3:15]}"
    folder = Path(tempfile.gettempdir()) / name
    with explain_os_errors(folder, "can't be created"), contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(
            f"{folder} belongs to another user, so nothing is built there. Choose another folder with --cache."
        )
    spare = Cache(folder, trust=place.cache.trust)
    spare.prepare_root()
    return Place(spare, (f"{place.obstacle} Building in {spare.root} instead.",))


def position(options: PrepareOptions) -> tuple[int, int]:
    """Rank and world size: as given, or as the launcher says."""
    rank, size = options.rank, options.world_size
    if rank is None and size is None and (found := launched()) is not None:
        return found.rank, found.world_size
    rank, size = rank or 0, size or 1
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} --world-size {size}: the rank must be from 0 to world size - 1")
    return rank, size
