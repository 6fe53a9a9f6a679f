"""Stores rows that don't come from a file (in memory, standard input) in the cache: `inputs/ab/b3-….jsonl`.

Workers, later hits and `Dataset.conversation` read them like any other file. The name is the digest of the bytes, and
it is verified before a file is reused, so neither a power failure nor another user can substitute other rows.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from blake3 import blake3

from penstock.digests import file_digest
from penstock.errors import SourceError, UsageError
from penstock.prepare.sources.discover import NamedFile
from penstock.store.cache import Cache
from penstock.store.files import explain_os_errors, fault, is_readable_file
from penstock.store.storage import temporary_name

# ---- memory ----------------------------------------------------------------------------------------------------------
#
# Rows that a program holds, or that come through a pipe, as the bytes of a file that workers can read for themselves.
#
# Tables (`datasets.Dataset`, pyarrow, pandas, polars: all that speak Arrow's C stream) become record batches from their
# buffers, about 1 GB/s; no row of them becomes a Python value here. Other rows become JSON lines, one `orjson` call
# each. The bytes depend on the content alone, so the same rows are a cache hit in any process.


BATCH_ROWS = 1000  # of a table that make a record batch, as `datasets` itself writes them
CHUNK_ROWS = 500  # of Python rows that are written at once
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
STDIN = "-"


class Held(NamedTuple):
    """Rows outside of files. `chunks` gives the bytes of the file they become; if `repeatable`, any number of times."""

    name: str  # for people
    suffix: str
    chunks: Callable[[], Iterator[Any]]
    repeatable: bool = False


def held(source: object) -> Held | None:
    """The rows behind a source; None for what names a file, a folder or a dataset."""
    if isinstance(source, str | os.PathLike):
        return Held("<stdin>", "data", _piped) if os.fspath(source) == STDIN else None
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(source, datasets.Dataset):
        return Held("<datasets.Dataset>", "arrow", lambda: _stream(_batches(source)), repeatable=True)
    kind = type(source).__name__
    if hasattr(source, "__arrow_c_stream__"):
        return Held(f"<{kind}>", "arrow", lambda: _stream(_sliced(source)), repeatable=True)
    if isinstance(source, Mapping):
        keys = ", ".join(map(repr, list(source)[:4]))
        raise UsageError(
            f"a {kind} with {keys} is no list of rows. Give one split of a DatasetDict (data['train']), or the rows as "
            "a list of dicts."
        )
    if isinstance(source, list | tuple) and not source:
        raise UsageError("there are no rows: the list is empty. Give rows as dicts, or names of files and datasets.")
    if isinstance(source, Iterable):
        return Held(f"<{kind}>", "jsonl", lambda: _lines(source, kind))
    raise UsageError(
        f"can't take rows from a {kind}. Give a path, a datasets.Dataset, a table, or an iterable of dicts."
    )


def flattened(sources: Iterable[object]) -> Iterator[object]:
    """The sources, with lists of paths in place of which their paths stand."""
    for source in sources:
        if isinstance(source, list | tuple) and source and all(isinstance(s, str | os.PathLike) for s in source):
            yield from source
        else:
            yield source


def _piped() -> Iterator[bytes]:
    if sys.stdin.isatty():
        raise SourceError("standard input is a terminal. Pipe rows into the command: cat x.jsonl | penstock …")
    while chunk := sys.stdin.buffer.read(1 << 20):
        yield chunk


# -- tables -------------------------------------------------------------------------------------------------------


def _batches(dataset: Any) -> Iterator[Any]:
    """The rows of a `datasets.Dataset` as Arrow tables, selections and shuffles applied."""
    yield dataset.data.table.slice(0, 0) if dataset._indices is None else dataset.with_format("arrow")[:0]
    yield from dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)


def _sliced(source: object) -> Iterator[Any]:
    import pyarrow as pa

    table = pa.table(source)
    yield table.slice(0, 0)
    for first in range(0, table.num_rows, BATCH_ROWS):
        yield table.slice(first, BATCH_ROWS)


def _stream(tables: Iterator[Any]) -> Iterator[Any]:
    """An Arrow stream: the schema of the first table, then one record batch of each other."""
    schema = next(tables).schema.remove_metadata()
    yield schema.serialize()
    for table in tables:
        for batch in table.replace_schema_metadata(None).combine_chunks().to_batches():
            yield batch.serialize()
    yield STREAM_END


# -- Python rows --------------------------------------------------------------------------------------------------


def _lines(rows: Iterable[object], kind: str) -> Iterator[bytes]:
    lines: list[bytes] = []
    for number, row in zip(count(1), rows, strict=False):
        lines.append(_line(row, number, kind))
        if len(lines) == CHUNK_ROWS:
            yield b"".join(lines)
            lines.clear()
    yield b"".join(lines)


def _line(row: object, number: int, kind: str) -> bytes:
    from penstock.prepare.sources.columnar import as_json

    if not isinstance(row, Mapping):
        shown = f"{row!r:.60}"
        hint = "[{'text': t} for t in texts]" if isinstance(row, str) else "a dict of columns"
        raise SourceError(f"<{kind}>:{number}: a row is a {type(row).__name__} ({shown}), not a dict. Give {hint}.")
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(row if type(row) is dict else dict(row), as_json, options)
    except TypeError as error:  # also orjson's own errors
        raise SourceError(
            f"<{kind}>:{number}: the row can't be written as JSON: {error}. Give strings, numbers, lists and "
            "dicts with strings as keys."
        ) from error


# ---- inputs ----------------------------------------------------------------------------------------------------------


_EMPTY = f"b3-{blake3().hexdigest()}"


def store_inputs(sources: Iterable[object], writable: Callable[[], Cache]) -> list[str | Path | NamedFile]:
    """Returns the sources, after writing rows that are in no file to files in a cache, asked for if there are any."""
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
            found.append(NamedFile(_stored(writable(), rows), rows.name))
    return found


def _stored(cache: Cache, rows: Held) -> Path:
    """Returns the file that holds these rows, written if it is missing."""
    if rows.repeatable:
        path = _path(cache, _digest(rows.chunks()), rows.suffix)
        if _is_sound(path):
            return path
    temporary = f"tmp/{temporary_name()}"
    with explain_os_errors(cache.root / temporary, "can't be written"):
        try:
            digest = _write(cache, temporary, rows.chunks())
            if digest == _EMPTY:
                raise SourceError(f"{rows.name}: there are no rows.")
            path = _path(cache, digest, rows.suffix)
            cache.files.move(temporary, cache.files.relative(path), keep_existing=_is_sound(path))
            fault("input.rename")
        except BaseException:
            with contextlib.suppress(OSError):
                cache.files.delete(temporary)
            raise
    return path


def _digest(chunks: Iterator[Any]) -> str:
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return f"b3-{hasher.hexdigest()}"


def _write(cache: Cache, path: str, chunks: Iterator[Any]) -> str:
    hasher = blake3()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    parent, _, name = path.rpartition("/")
    with (
        cache.files.folder(parent, create=True) as folder,
        os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb") as file,
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
