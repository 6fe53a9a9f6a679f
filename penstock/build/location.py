"""Chooses the cache folder of a build, and this process's share of the work."""

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
from penstock.store.remote import open_cache


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """A cache folder. `obstacle` says why it can't be written, if so; it still serves hits."""

    cache: Cache
    notices: tuple[str, ...] = ()
    obstacle: StoreError | None = None


def choose_cache(options: PrepareOptions) -> CacheLocation:
    """Returns the cache folder in which to find the dataset, and to build it if the folder can be written."""
    if options.no_cache:
        cache = Cache(tempfile.mkdtemp(prefix="penstock-"), trust=options.trust)
        cache.prepare_root()
        return CacheLocation(cache, (f"--no-cache: the dataset is built in {cache.root}; delete it when you are done",))
    cache = open_cache(options.cache, options.trust, options.local_cache, options.local_cache_bytes)
    cache.check_marker()  # refuses a folder of other files, whatever --on-unwritable says
    try:
        cache.prepare_root()
    except StoreError as obstacle:
        return CacheLocation(cache, obstacle=obstacle)
    return CacheLocation(cache)


def temporary_cache(location: CacheLocation) -> CacheLocation:
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
    return CacheLocation(temporary, (f"{location.obstacle} Building in {temporary.root} instead.",))


def position(options: PrepareOptions) -> tuple[int, int]:
    """Returns rank and world size: from the options, or from the launcher."""
    rank, size = options.rank, options.world_size
    if rank is None and size is None and (found := launched()) is not None:
        return found.rank, found.world_size
    rank, size = rank or 0, size or 1
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} --world-size {size}: the rank must be from 0 to world size - 1")
    return rank, size
