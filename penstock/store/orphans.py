"""What dead processes have left in a cache: temporary files, claims, leases, and shards that a killed gc had put aside.

Cheap enough for the start of every run: a few listings, nearly always empty. On a cache that can't be written it does
nothing. Only processes of this host can be known to be dead; what other hosts left is removed by `gc` when it is old.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.store.cache import Cache
from penstock.store.claims import clean_claims
from penstock.store.files import writer_is_dead
from penstock.store.leases import clean_leases
from penstock.store.tree import ASIDE


def temporary_files(cache: Cache) -> list[Path]:
    """All files that are being written, or were when their writer died."""
    return [*cache.tree.files(cache.root), *cache.tree.files(cache.tree.tmp)]


def clean_orphans(cache: Cache) -> int:
    """Remove what dead processes of this host have left; returns how many temporary files that were."""
    removed = 0
    for path in temporary_files(cache):
        if writer_is_dead(path.name):
            with contextlib.suppress(OSError):  # another process cleans up too, or it is not ours to remove
                removed += remove_orphan(cache, path)
    clean_claims(cache.tree)
    clean_leases(cache.tree)
    return removed


def remove_orphan(cache: Cache, path: Path) -> bool:
    """Remove a temporary file of a dead writer. What gc put aside goes back: a dataset may have come to need it."""
    aside = ASIDE.fullmatch(path.name)
    if aside and aside["suffix"] != ".bad":
        place = cache.shard_path(aside["name"]).with_suffix(aside["suffix"])
        return not cache.tree.move(path, place, keep=True)
    return cache.tree.remove(path)
