"""What dead processes have left in a cache: temporary files, claims, and shards that a killed gc had put aside.

Cheap enough for the start of every run: two listings, nearly always empty. On a cache that can't be written it does
nothing. Only processes of this host can be known to be dead; what other hosts left is removed by `gc` when it is old.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from penstock.store.cache import Cache
from penstock.store.claims import clean_claims
from penstock.store.files import listed, writer_is_dead

ASIDE = re.compile(r"\.aside\.(b3-[0-9a-f]{64}\.(?:arrow|json))$")  # how gc names what it is about to delete


def clean_orphans(cache: Cache) -> int:
    """Remove what dead processes of this host have left; returns how many temporary files that were."""
    removed = 0
    for path in listed(cache.tmp):
        if writer_is_dead(path.name):
            with contextlib.suppress(OSError):  # another process cleans up too, or it is not ours to remove
                removed += remove_orphan(cache, path)
    clean_claims(cache.root / "claims")
    return removed


def remove_orphan(cache: Cache, path: Path) -> bool:
    """Remove a temporary file of a dead writer. What gc put aside goes back: a dataset may have come to need it."""
    aside = ASIDE.search(path.name)
    if aside:
        name, _, suffix = aside[1].partition(".")
        place = cache.shard_path(name).with_suffix(f".{suffix}")
        if not place.exists():
            path.replace(place)
            return False
    path.unlink(missing_ok=True)
    return True
