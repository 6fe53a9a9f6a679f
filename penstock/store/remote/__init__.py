"""A cache in an object store, with a local tier.

`cache` is the `Cache` that reads and writes it, `objects` what it has in the store, `claims` how builders share it,
`tier` the folder on this machine that shards are downloaded to and mapped from, `transfer` copies datasets between
caches, `gc` deletes what no dataset needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from penstock.addresses import scheme_of
from penstock.errors import UsageError
from penstock.store.cache import MARKER, Cache, default_cache
from penstock.store.files import read_regular
from penstock.store.trust import Trust

if TYPE_CHECKING:
    from penstock.store.remote.cache import RemoteCache
    from penstock.store.upkeep.gc import GcReport

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")


def open_cache(
    address: str | os.PathLike[str] | None = None,
    trust: Trust | str = Trust.CHECKED,
    local: str | os.PathLike[str] | None = None,
    local_bytes: int | None = None,
) -> Cache:
    """The cache at an address: a folder, the URL of one in an object store, or the local tier of one.

    `local` and `local_bytes` are the folder and the size of the local tier. The arguments are those of `CachePlace`.
    """
    given = os.fspath(address) if address is not None and os.fspath(address) else default_cache()
    scheme = scheme_of(given)
    if scheme in SCHEMES:
        return _remote(given, Trust(trust), local, local_bytes)
    if scheme:
        raise UsageError(
            f"{given}: {scheme} addresses are not supported for caches. Use a folder, or s3://, gs:// or az://."
        )
    folder = Path(given).expanduser().absolute()
    if (url := _remote_of(folder)) is not None:
        return _remote(url, Trust(trust), folder, local_bytes)
    if local is not None:
        raise UsageError(f"a local cache ({os.fspath(local)}) belongs to a cache in an object store, not to {given}.")
    return Cache(folder, trust=Trust(trust))


def collector(cache: Cache) -> Callable[..., GcReport]:
    """The garbage collector for a cache."""
    from penstock.store.remote.cache import RemoteCache
    from penstock.store.remote.gc import collect_remote
    from penstock.store.upkeep.gc import collect_garbage

    return partial(collect_remote, cache) if isinstance(cache, RemoteCache) else partial(collect_garbage, cache)


def _remote(url: str, trust: Trust, local: str | os.PathLike[str] | None, local_bytes: int | None) -> RemoteCache:
    from penstock.store.remote.cache import RemoteCache

    url = re.sub(r":/+", "://", url, count=1).rstrip("/")
    return RemoteCache(url, trust=trust, local=local, local_bytes=local_bytes)


def _remote_of(folder: Path) -> str | None:
    """The URL of the cache that a folder is the local tier of."""
    try:
        value = orjson.loads(read_regular(folder / MARKER))
    except (OSError, orjson.JSONDecodeError):
        return None
    url = value.get("remote") if isinstance(value, dict) else None
    return url if isinstance(url, str) and scheme_of(url) in SCHEMES else None
