"""Reads tokenized documents from raw files: OLMo-core's numpy parts and Megatron's indexed datasets."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from penstock.arrays import Bool, Float32, Int64
from penstock.digests import digest
from penstock.errors import SourceError, UsageError
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.prepare.sources.chunks import Compression, chunks
from penstock.prepare.sources.text_rows import RowRun, line_runs

# ---- chunk -----------------------------------------------------------------------------------------------------------
# A chunk of tokenized rows, and the shard columns it becomes.
#
# Only the loss mask is known, not who wrote what: trained runs are stored as the body of an assistant message,
# everything else with no role. Views of adopted data offer this mask as `customized` and refuse policies that depend on
# roles.


class RowPlaces(NamedTuple):
    """Where the rows of a chunk are, for messages."""

    file: str
    first: int = 0  # row of the file, from 0
    lines: Sequence[int] | None = None  # line numbers, in files with lines

    def of(self, row: int | np.integer[Any]) -> str:
        """The file and line (or row, from 1) of a row of the chunk."""
        if self.lines is not None:
            return f"{self.file}:{self.lines[int(row)]}"
        return f"{self.file}, row {self.first + int(row) + 1}"


class Chunk(NamedTuple):
    """Concatenated sequences; for pairs, the chosen and rejected sides alternate."""

    places: RowPlaces
    first_row: int  # of the source
    rows: int
    ids: Int64
    lengths: Int64  # per sequence
    owners: Int64  # per sequence: its row, from 0
    weights: Float32 | None  # per token; None if there is no mask
    prompts: Int64 | None  # for pairs, per sequence: tokens before its answer

    @property
    def digest(self) -> str:
        """A digest of the content, independent of the file and the position in it."""
        arrays = (self.ids, self.lengths, self.owners, self.weights, self.prompts)
        return digest(b"adopted", *(b"" if array is None else array.tobytes() for array in arrays))


def columns_of(chunk: Chunk, dtype: Any) -> Columns:
    """Converts a chunk to the columns of a shard."""
    starts = np.cumsum(chunk.lengths) - chunk.lengths
    runs = _Runs.of(chunk, starts)
    counts = np.bincount(runs.owners, minlength=len(chunk.lengths))
    fractions = (runs.weights != 0) & (runs.weights != 1)
    offsets = np.concatenate(([0], np.cumsum(chunk.lengths)))
    return Columns(
        ids=chunk.ids.astype(dtype),
        id_offsets=offsets,
        segment_offsets=np.concatenate(([0], np.cumsum(counts))),
        segment_ends=(runs.ends - starts[runs.owners]).astype(np.uint32),
        segment_roles=np.where(runs.answer, Role.ASSISTANT.value, Role.NONE.value).astype(np.uint8),
        segment_parts=_parts(runs),
        segment_messages=np.where(runs.answer, 1, -1).astype(np.int32),
        segment_weights=np.where(runs.trained, runs.weights, np.nan).astype(np.float32) if fractions.any() else None,
        rows=chunk.owners.astype(np.uint32),
        row_hashes=_row_hashes(chunk, offsets),
        sides=None if chunk.prompts is None else np.tile(np.array([0, 1], np.uint8), len(chunk.lengths) // 2),
    )


class _Runs(NamedTuple):
    """Runs of tokens with equal weight within a sequence."""

    owners: Int64
    ends: Int64
    weights: Float32
    trained: Bool
    answer: Bool  # part of an answer: trained, or after the prompt of a pair

    @classmethod
    def of(cls, chunk: Chunk, starts: Int64) -> _Runs:
        total = len(chunk.ids)
        if chunk.weights is None:  # no mask: one run per sequence, with no role
            owners = np.arange(len(chunk.lengths))
            none = np.zeros(len(owners), np.bool_)
            return cls(owners, starts + chunk.lengths, np.zeros(len(owners), np.float32), none, none)
        breaks = np.zeros(total, np.bool_)
        breaks[starts[chunk.lengths > 0]] = True
        breaks[1:] |= chunk.weights[1:] != chunk.weights[:-1]
        answers = starts + chunk.lengths if chunk.prompts is None else starts + chunk.prompts
        breaks[answers[answers < total]] = True
        firsts = np.flatnonzero(breaks)
        ends = np.append(firsts[1:], total)
        owners = np.searchsorted(starts + chunk.lengths, firsts, side="right")
        weights = chunk.weights[firsts]
        after_prompt = np.zeros(len(firsts), np.bool_) if chunk.prompts is None else firsts >= answers[owners]
        found = cls(owners, ends, weights, weights > 0, (weights > 0) | after_prompt)
        return found._with_empty_answers(chunk, starts)

    def _with_empty_answers(self, chunk: Chunk, starts: Int64) -> _Runs:
        """Adds an empty answer to sequences without one: their mask is known, it just trains nothing."""
        some = np.bincount(self.owners, weights=self.answer, minlength=len(starts))
        bare = np.flatnonzero(some == 0)
        if not len(bare):
            return self
        owners = np.concatenate((self.owners, bare))
        order = np.argsort(owners, kind="stable")
        yes = np.ones(len(bare), np.bool_)
        return _Runs(
            owners[order],
            np.concatenate((self.ends, (starts + chunk.lengths)[bare]))[order],
            np.concatenate((self.weights, np.ones(len(bare), np.float32)))[order],
            np.concatenate((self.trained, yes))[order],
            np.concatenate((self.answer, yes))[order],
        )


def _parts(runs: _Runs) -> npt.NDArray[np.uint8]:
    untrained = np.where(runs.answer, Part.TAIL.value, Part.GLUE.value)
    return np.where(runs.trained, Part.BODY.value, untrained).astype(np.uint8)


def _row_hashes(chunk: Chunk, offsets: Int64) -> npt.NDArray[np.uint64]:
    """Hashes the ids and weights of each row, so that equal rows land on the same side of a hold-out."""
    import xxhash

    weights = chunk.weights if chunk.weights is not None else np.zeros(0, np.float32)
    bounds = np.flatnonzero(np.diff(chunk.owners, prepend=-1, append=-1))
    hashes = np.empty(len(chunk.lengths), np.uint64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = slice(int(offsets[first]), int(offsets[last]))
        hasher = xxhash.xxh3_64(chunk.lengths[first:last].tobytes())
        hasher.update(chunk.ids[own].tobytes())
        hasher.update(weights[own].tobytes())
        hashes[first:last] = hasher.intdigest()
    return hashes


# ---- checks ----------------------------------------------------------------------------------------------------------
# Checks of values that rows bring with them: integer ids, finite weights, bounds inside their file.
#
# An unchecked value would not fail, but be served: a fraction is truncated, a negative bound counts from the file's
# end.


LARGEST_WEIGHT = float(np.finfo(np.float32).max)  # weights are stored as 32-bit floats


def row_at(lengths: Int64, position: int | np.integer[Any]) -> int:
    """The row of a position in concatenated rows."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def checked_weights(places: RowPlaces, name: str, values: Any, lengths: Int64) -> Float32:
    """Loss weights as 32-bit floats; each must be a finite number from 0 up."""
    weights = np.asarray(values, np.float64)
    wrong = np.flatnonzero(~((weights >= 0) & (weights <= LARGEST_WEIGHT)))  # NaN compares false
    if len(wrong):
        raise SourceError(
            f"{places.of(row_at(lengths, wrong[0]))}: {name!r} has the value {weights[wrong[0]]:g}. "
            "A weight must be a finite number from 0 up; use 0 for tokens that are not trained."
        )
    return weights.astype(np.float32)


def check_bounds(places: RowPlaces, starts: Int64, ends: Int64, tokens: int) -> None:
    """Raises an error unless every sequence lies inside the file and no two overlap."""
    wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > tokens))
    if len(wrong):
        row = int(wrong[0])
        raise SourceError(
            f"{places.of(row)}: tokens {starts[row]:,} to {ends[row]:,} are not within the {tokens:,} tokens of the "
            "file. The index is damaged, or belongs to another file; write it again."
        )
    filled = np.flatnonzero(ends > starts)
    order = filled[np.argsort(starts[filled], kind="stable")]
    shared = np.flatnonzero(starts[order][1:] < ends[order][:-1])
    if len(shared):
        one, other = sorted((int(order[shared[0]]), int(order[shared[0] + 1])))
        raise SourceError(
            f"{places.of(other)}: tokens {starts[other]:,} to {ends[other]:,} overlap those of row "
            f"{places.first + one + 1}, {starts[one]:,} to {ends[one]:,}. The index is damaged; write it again."
        )


# ---- raw -------------------------------------------------------------------------------------------------------------


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
