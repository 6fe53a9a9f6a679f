"""A chunk of tokenized rows, and the shard columns it becomes.

Only the loss mask is known, not who wrote what: trained runs are stored as the body of an assistant message, everything
else with no role. Views of adopted data offer this mask as `customized` and refuse policies that depend on roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64
from penstock.chat.conversation import Part, Role
from penstock.store.columns import Columns
from penstock.store.files import digest
from penstock.view.runs import Float32


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
