"""Reads tokenized documents from raw files: OLMo-core's numpy parts and Megatron's indexed datasets."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from penstock.adoption.chunk import Chunk
from penstock.arrays import Int64
from penstock.errors import SourceError, UsageError

TOKENS: Final = 1 << 20  # per shard, unless a single document has more
INDEX_TYPES: Final = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def olmo_chunks(where: str, folder: Path, dtype: str | None, vocabulary: int) -> Iterator[Chunk]:
    """Yields the documents of all parts in a folder."""
    chosen = _olmo_type(folder, dtype, vocabulary)
    before = 0
    for path in sorted(folder.glob("token_ids_part_*.npy")):
        bounds_path, mask_path = (
            path.with_suffix(".csv.gz"),
            path.with_name(path.name.replace("token_ids", "labels_mask")),
        )
        if not bounds_path.exists():
            raise SourceError(f"{bounds_path} is missing; it has the bounds of the documents.")
        ids = _mapped(path, chosen)
        mask = _mapped(mask_path, np.dtype(np.bool_)) if mask_path.exists() else None
        if mask is not None and len(mask) != len(ids):
            raise SourceError(
                f"{mask_path} has {len(mask):,} entries for {len(ids):,} tokens of type {chosen.name}. "
                "If the ids have a different type, pass it with --dtype."
            )
        with gzip.open(bounds_path, "rt") as lines:
            bounds = np.array([line.split(",")[:2] for line in lines], np.int64).reshape(-1, 2)
        if len(bounds) and int(bounds[:, 1].max()) > len(ids):
            raise SourceError(
                f"{bounds_path}: documents end at {bounds[:, 1].max():,}, but there are {len(ids):,} tokens."
            )
        yield from _documents(where, before, bounds, ids, mask)
        before += len(bounds)


def _olmo_type(folder: Path, dtype: str | None, vocabulary: int) -> np.dtype[Any]:
    """The dtype of the ids: `dtype`, else that of our own manifest, else the smallest that holds the vocabulary."""
    if dtype is None and (folder / "penstock.json").exists():
        dtype = orjson.loads((folder / "penstock.json").read_bytes())["facts"]["dtype"]
    if dtype is None:
        return np.dtype(np.min_scalar_type(vocabulary - 1))
    if dtype not in ("uint8", "uint16", "uint32", "uint64"):
        raise UsageError(f"--dtype {dtype}: expected uint8, uint16, uint32 or uint64.")
    return np.dtype(dtype)


def megatron_chunks(where: str, prefix: Path) -> Iterator[Chunk]:
    """Yields the sequences of an indexed dataset, with the mask of the `loss_mask` dataset next to it, if any."""
    lengths, offsets, dtype = _index(prefix)
    ids = _mapped(_with(prefix, ".bin"), dtype)
    mask_prefix, mask = prefix.with_name("loss_mask"), None
    if prefix.name == "tokens" and _with(mask_prefix, ".idx").exists():
        mask_lengths, _, mask_type = _index(mask_prefix)
        if not np.array_equal(mask_lengths, lengths):
            raise SourceError(f"the sequences of {mask_prefix}.idx differ from those of {prefix}.idx.")
        mask = _mapped(_with(mask_prefix, ".bin"), mask_type)
    starts = offsets // dtype.itemsize
    yield from _documents(where, 0, np.stack((starts, starts + lengths), axis=1), ids, mask)


def _index(prefix: Path) -> tuple[Int64, Int64, np.dtype[Any]]:
    data = _with(prefix, ".idx").read_bytes()
    if data[:9] != b"MMIDIDX\x00\x00" or len(data) < 34:
        raise SourceError(f"{prefix}.idx is not the index of a Megatron dataset.")
    version, code, count, _ = struct.unpack_from("<QBQQ", data, 9)
    if version != 1 or code not in INDEX_TYPES or len(data) < 34 + 12 * count:
        raise SourceError(f"{prefix}.idx: version {version}, type {code} and {count:,} sequences can't be read.")
    lengths = np.frombuffer(data, "<i4", count, 34).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", count, 34 + 4 * count)
    return lengths, offsets, np.dtype(INDEX_TYPES[code])


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise SourceError(
            f"{path} has {size:,} bytes, which is not a multiple of the size of {dtype.name}. Try --dtype."
        )
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def _documents(
    where: str, before: int, bounds: Int64, ids: npt.NDArray[Any], mask: npt.NDArray[Any] | None
) -> Iterator[Chunk]:
    """Groups documents, given by their bounds, into chunks."""
    lengths = bounds[:, 1] - bounds[:, 0]
    groups = (np.cumsum(lengths) - lengths) // TOKENS
    firsts = np.flatnonzero(np.diff(groups, prepend=-1)).tolist()
    for first, last in zip(firsts, [*firsts[1:], len(bounds)], strict=True):
        own = bounds[first:last].tolist()
        weights = None if mask is None else np.concatenate([mask[a:b] for a, b in own]).astype(np.float32)
        tokens = np.concatenate([ids[a:b] for a, b in own]).astype(np.int64)
        rows = last - first
        yield Chunk(where, before + first, rows, tokens, lengths[first:last], np.arange(rows), weights, None)
