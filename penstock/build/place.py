"""Where a build happens: which cache folder, and which share of the work among several processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from penstock.build.options import OnUnwritable, PrepareOptions
from penstock.errors import StoreError, UsageError
from penstock.store.cache import Cache
from penstock.store.files import digest

POSITIONS = (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE"))


def chosen_cache(options: PrepareOptions) -> tuple[Cache, tuple[str, ...]]:
    """The cache to build in, ready to be written, and what should be said about the choice."""
    if options.no_cache:
        cache = Cache(tempfile.mkdtemp(prefix="penstock-"))
        return cache, (f"--no-cache: the dataset is built in {cache.root}; delete it when you are done",)
    cache = Cache(options.cache)
    try:
        cache.prepare_root()
        return cache, ()
    except StoreError as error:
        if options.on_unwritable is OnUnwritable.ERROR or _is_readable_hit(cache):
            if _is_readable_hit(cache):
                return cache, ()
            raise
        # One folder per host, user and cache: all processes of a host that meet the same obstacle share it.
        name = f"penstock-{os.getuid()}-{digest(str(cache.root).encode())[3:15]}"
        spare = Cache(Path(tempfile.gettempdir()) / name)
        spare.prepare_root()
        return spare, (f"{error} Building in {spare.root} instead.",)


def _is_readable_hit(cache: Cache) -> bool:
    """A cache that others wrote and we can only read still serves hits; a miss will fail on its first write."""
    return os.access(cache.root / "datasets", os.R_OK | os.X_OK)


def position(options: PrepareOptions) -> tuple[int, int]:
    """Rank and world size: as given, or as Slurm or torchrun say."""
    rank, size = options.rank, options.world_size
    if rank is None and size is None:
        for rank_name, size_name in POSITIONS:
            if os.environ.get(rank_name, "").isdigit() and os.environ.get(size_name, "").isdigit():
                rank, size = int(os.environ[rank_name]), int(os.environ[size_name])
                break
    rank, size = rank or 0, size or 1
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank} --world-size {size}: the rank must be from 0 to world size - 1")
    return rank, size
