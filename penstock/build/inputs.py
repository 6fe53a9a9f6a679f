"""Stores rows that don't come from a file (in memory, standard input) in the cache: `inputs/ab/b3-….jsonl`.

Workers, later hits and `Dataset.conversation` read them like any other file. The name is the digest of the bytes, and
it is verified before a file is reused, so neither a power failure nor another user can substitute other rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.build.location import CacheLocation, temporary_cache
from penstock.errors import SourceError, UsageError
from penstock.sources.discover import NamedFile
from penstock.sources.memory import STDIN, Held, flattened, held
from penstock.store.cache import Cache
from penstock.store.files import explain_os_errors, fault, file_digest, is_readable_file
from penstock.store.tree import temporary_name

_EMPTY = f"b3-{blake3().hexdigest()}"


def store_inputs(sources: Iterable[object], location: CacheLocation) -> list[str | Path | NamedFile]:
    """Returns the sources, after writing rows that are in no file to files in the cache."""
    found: list[str | Path | NamedFile] = []
    given = list(flattened(sources))
    if sum(isinstance(source, str) and source == STDIN for source in given) > 1:
        raise UsageError("standard input (-) is given twice, and can be read only once.")
    for source in given:
        rows = held(source)
        if rows is None:
            assert isinstance(source, str | os.PathLike)
            found.append(source if isinstance(source, str) else Path(source))
        else:
            # A read-only cache still serves hits; the rows are then stored where a build would be redirected to.
            cache = location.cache if location.obstacle is None else temporary_cache(location).cache
            found.append(NamedFile(_stored(cache, rows), rows.name))
    return found


def _stored(cache: Cache, rows: Held) -> Path:
    """Returns the file that holds these rows, written if it is missing."""
    if rows.repeatable:
        path = _path(cache, _digest(rows.chunks()), rows.suffix)
        if _is_sound(path):
            return path
    temporary = cache.tree.tmp / temporary_name()
    with explain_os_errors(temporary, "can't be written"):
        try:
            digest = _write(cache, temporary, rows.chunks())
            if digest == _EMPTY:
                raise SourceError(f"{rows.name}: there are no rows.")
            path = _path(cache, digest, rows.suffix)
            cache.tree.move(temporary, path, keep_existing=_is_sound(path))
            fault("input.rename")
        except BaseException:
            with contextlib.suppress(OSError):
                cache.tree.remove(temporary)
            raise
    return path


def _digest(chunks: Iterator[Any]) -> str:
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return f"b3-{hasher.hexdigest()}"


def _write(cache: Cache, path: Path, chunks: Iterator[Any]) -> str:
    hasher = blake3()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with (
        cache.tree.folder(path.parent, create=True) as folder,
        os.fdopen(os.open(path.name, flags, 0o666, dir_fd=folder), "wb") as file,
    ):
        for chunk in chunks:
            hasher.update(chunk)
            file.write(chunk)
        fault("input.write")
        file.flush()
        os.fsync(file.fileno())
    return f"b3-{hasher.hexdigest()}"


def _path(cache: Cache, digest: str, suffix: str) -> Path:
    return cache.root / "inputs" / digest[3:5] / f"{digest}.{suffix}"


def _is_sound(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return is_readable_file(path) and file_digest(path) == path.stem
    return False
