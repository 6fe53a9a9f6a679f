"""Reads tokenized documents from raw files: OLMo-core's numpy parts and Megatron's indexed datasets."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from penstock.adoption.checks import check_bounds, checked_weights
from penstock.adoption.chunk import Chunk, RowPlaces
from penstock.arrays import Int64
from penstock.errors import SourceError, UsageError
from penstock.sources.text.chunks import Compression, chunks
from penstock.sources.text.json_lines import line_runs
from penstock.sources.text.rows import RowRun

TOKENS: Final = 1 << 20  # per shard, unless a single document has more
INDEX_TYPES: Final = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
ID_TYPES: Final = ("uint8", "uint16", "uint32", "uint64")
BOUNDS: Final = re.compile(rb"(-?\d{1,18}),(-?\d{1,18})(,.*)?")
LINE_BYTES: Final = 1 << 16


class _Sequences(NamedTuple):
    """Sequences in a file of values, by their bounds."""

    starts: Int64
    ends: Int64
    values: npt.NDArray[Any]

    @property
    def lengths(self) -> Int64:
        return self.ends - self.starts

    @property
    def unused(self) -> int:
        """How many values belong to no sequence."""
        return len(self.values) - int(self.lengths.sum())

    def joined(self, first: int, last: int) -> npt.NDArray[Any]:
        bounds = zip(self.starts[first:last].tolist(), self.ends[first:last].tolist(), strict=True)
        return np.concatenate([self.values[start:end] for start, end in bounds])


def olmo_chunks(folder: Path, dtype: str | None, vocabulary: int, warnings: list[str]) -> Iterator[Chunk]:
    """Yields the documents of all parts in a folder."""
    chosen = _olmo_type(folder, dtype, vocabulary)
    before = 0
    for path in sorted(folder.glob("token_ids_part_*.npy")):
        bounds_path = path.with_suffix(".csv.gz")
        mask_path = path.with_name(path.name.replace("token_ids", "labels_mask"))
        if not bounds_path.exists():
            raise SourceError(f"{bounds_path} is missing; it has the bounds of the documents.")
        ids = _mapped(path, chosen, "Try --dtype.")
        trained = _mapped(mask_path, np.dtype(np.uint8)) if mask_path.exists() else None
        if trained is not None:
            if len(trained) != len(ids):
                raise SourceError(
                    f"{mask_path} has {len(trained):,} entries for {len(ids):,} tokens of type {chosen.name}. "
                    "If the ids have a different type, pass it with --dtype."
                )
            if (wrong := np.flatnonzero(trained > 1)).size:
                raise SourceError(
                    f"{mask_path}: byte {wrong[0]:,} is {trained[wrong[0]]}, and a mask holds 0 and 1. Write it again."
                )
        starts, ends = _olmo_bounds(bounds_path, len(ids))
        tokens, places = _Sequences(starts, ends, ids), RowPlaces(str(path))
        mask = None if trained is None else _Sequences(starts, ends, trained)
        _warn_of_unused(places, tokens, warnings)
        yield from _documents(places, before, tokens, mask)
        before += len(starts)


def _olmo_type(folder: Path, dtype: str | None, vocabulary: int) -> np.dtype[Any]:
    """The dtype of the ids: `dtype`, else that of our own manifest, else the smallest that holds the vocabulary."""
    if dtype is not None and dtype not in ID_TYPES:
        raise UsageError(f"--dtype {dtype}: expected uint8, uint16, uint32 or uint64.")
    manifest = folder / "penstock.json"
    if dtype is None and manifest.exists():
        try:
            dtype = orjson.loads(manifest.read_bytes())["facts"]["dtype"]
        except (OSError, orjson.JSONDecodeError, LookupError, TypeError):
            dtype = ""
        if dtype not in ID_TYPES:
            raise SourceError(f"{manifest} does not give the type of the ids; it is damaged. Pass it with --dtype.")
    return np.dtype(np.min_scalar_type(vocabulary - 1) if dtype is None else dtype)


def _olmo_bounds(path: Path, tokens: int) -> tuple[Int64, Int64]:
    """The starts and ends of the documents of a part, one per line."""
    bounds = list[tuple[int, int]]()
    for run in line_runs(chunks(path, str(path), Compression.GZIP), LINE_BYTES, LINE_BYTES):
        for line in run.rows if isinstance(run, RowRun) else [run.data or b""]:
            found = BOUNDS.fullmatch(line)
            if found is None:
                raise SourceError(
                    f"{path}:{len(bounds) + 1}: {line[:40]!r} is not the start and end of a document. Write it again."
                )
            bounds.append((int(found[1]), int(found[2])))
        if len(bounds) > tokens + 1:
            raise SourceError(f"{path} has more documents than its part has tokens ({tokens:,}). Write it again.")
    if tokens and not bounds:
        raise SourceError(f"{path} has no bounds of documents for {tokens:,} tokens. Write it again.")
    both = np.array(bounds, np.int64).reshape(-1, 2)
    check_bounds(RowPlaces(str(path)), both[:, 0], both[:, 1], tokens)
    return both[:, 0], both[:, 1]


def megatron_chunks(prefix: Path, warnings: list[str]) -> Iterator[Chunk]:
    """Yields the sequences of an indexed dataset, with the mask of the `loss_mask` dataset next to it, if any."""
    tokens = _indexed(prefix)
    mask_prefix, mask = prefix.with_name("loss_mask"), None
    if prefix.name == "tokens" and _with(mask_prefix, ".idx").exists():
        mask = _indexed(mask_prefix)
        if not np.array_equal(mask.lengths, tokens.lengths):
            raise SourceError(f"the sequences of {mask_prefix}.idx differ from those of {prefix}.idx.")
    places = RowPlaces(f"{prefix}.idx")
    _warn_of_unused(places, tokens, warnings)
    yield from _documents(places, 0, tokens, mask)


def _indexed(prefix: Path) -> _Sequences:
    """The sequences of an indexed dataset, checked against the size of its file."""
    index = _with(prefix, ".idx")
    try:
        data = index.read_bytes()
    except OSError as error:
        raise SourceError(f"{index}: can't be read: {error.strerror}.") from error
    if data[:9] != b"MMIDIDX\x00\x00" or len(data) < 34:
        raise SourceError(f"{index} is not the index of a Megatron dataset.")
    version, code, count, documents = struct.unpack_from("<QBQQ", data, 9)
    if version != 1 or code not in INDEX_TYPES or len(data) < 34 + 12 * count + 8 * documents:
        raise SourceError(
            f"{index}: version {version}, type {code}, {count:,} sequences and {documents:,} document bounds in "
            f"{len(data):,} bytes can't be read. It may be truncated; write it again."
        )
    dtype = np.dtype(INDEX_TYPES[code])
    lengths = np.frombuffer(data, "<i4", count, 34).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", count, 34 + 4 * count).astype(np.int64)
    values, places = _mapped(_with(prefix, ".bin"), dtype, "The file may be truncated."), RowPlaces(str(index))
    if (wrong := np.flatnonzero(offsets % dtype.itemsize)).size:
        raise SourceError(
            f"{places.of(wrong[0])}: byte {offsets[wrong[0]]:,} is not the start of an id of type {dtype.name}. "
            "The index is damaged; write it again."
        )
    starts = offsets // dtype.itemsize
    check_bounds(places, starts, starts + lengths, len(values))
    return _Sequences(starts, starts + lengths, values)


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _mapped(path: Path, dtype: np.dtype[Any], remedy: str = "") -> npt.NDArray[Any]:
    try:
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise SourceError(
                f"{path} has {size:,} bytes, which is not a multiple of the size of {dtype.name}. {remedy}"
            )
        return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror}.") from error


def _warn_of_unused(places: RowPlaces, tokens: _Sequences, warnings: list[str]) -> None:
    if tokens.unused:
        warnings.append(f"{places.file}: {tokens.unused:,} of {len(tokens.values):,} tokens belong to no document")


def _documents(places: RowPlaces, before: int, tokens: _Sequences, mask: _Sequences | None) -> Iterator[Chunk]:
    """Groups documents into chunks. `before` is the number of documents in earlier files of the source."""
    lengths = tokens.lengths
    groups = (np.cumsum(lengths) - lengths) // TOKENS
    cuts = [*np.flatnonzero(np.diff(groups, prepend=-1)).tolist(), len(lengths)]
    for first, last in pairwise(cuts):
        own, here = lengths[first:last], places._replace(first=first)
        weights = None if mask is None else checked_weights(here, "loss_mask", mask.joined(first, last), own)
        ids = tokens.joined(first, last).astype(np.int64)
        yield Chunk(here, before + first, len(own), ids, own, np.arange(len(own)), weights, None)
