"""Converts segment ends from bytes to tokens.

Tokens are aligned with their text by the cumulative byte lengths of byte-level tokens, or by matching the pieces of
SentencePiece-style tokens against the text (`spm_pieces`). This is exact if the tokens account for every byte of the
text. Normalizers and tokens that absorb spaces break that; such rows use the reference encoder's offsets instead.
A token that crosses a boundary belongs to the segment in which it ends, unless the segment before it is `inclusive`.
Without the compiled core, lengths are summed in numpy, and tokenizers with pieces use the reference's offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.encode.vocabulary import Vocabulary
from penstock.native import native
from penstock.regions.segments import Segments

_STEP: Final = 1 << 16


def segment_token_ends(
    texts: list[bytes],
    ids: npt.NDArray[np.uint32],
    offsets: Int64,
    segments: Segments,
    vocabulary: Vocabulary,
    token_ends: Callable[[int], Int64],
    *,
    by_offsets: Sequence[int] = (),
) -> tuple[Int64, int]:
    """For each segment, the number of the row's tokens up to its end; and the number of rows that needed `token_ends`.

    `by_offsets` are rows known in advance to need it.
    """
    counts, exact = (_counted if native is None else _counted_natively)(texts, ids, offsets, segments, vocabulary)
    exact[list(by_offsets)] = False
    inexact = np.flatnonzero(~exact & (np.diff(offsets) > 0))
    for row in inexact.tolist():
        own = slice(int(segments.offsets[row]), int(segments.offsets[row + 1]))
        counts[own] = segment_counts(token_ends(row), segments.ends[own], segments.inclusive[own])
    return counts, len(inexact)


def segment_counts(token_ends: Int64, ends: Int64, inclusive: npt.NDArray[np.bool_]) -> Int64:
    """For each segment of one row, the number of tokens up to its end."""
    counts = np.searchsorted(token_ends, ends, side="right")
    before = np.concatenate(([0], token_ends))[counts]
    counts += inclusive & (before < ends) & (counts < len(token_ends))
    if len(counts):
        counts[-1] = len(token_ends)
    return np.maximum.accumulate(counts)


def _counted_natively(
    texts: list[bytes], ids: npt.NDArray[np.uint32], offsets: Int64, segments: Segments, vocabulary: Vocabulary
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    assert native is not None
    counts = np.zeros(len(segments.ends), np.int64)
    exact = native.count_tokens(
        texts,
        ids,
        offsets,
        vocabulary.byte_lengths,
        vocabulary.pieces,
        segments.offsets,
        segments.ends,
        segments.inclusive,
        counts,
    )
    return counts, np.frombuffer(exact, np.bool_).copy()


def _counted(
    texts: list[bytes], ids: npt.NDArray[np.uint32], offsets: Int64, segments: Segments, vocabulary: Vocabulary
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """The numpy version, by byte lengths only."""
    text_lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = _token_ends(ids, vocabulary.byte_lengths, int(text_lengths.sum()))
    base = ends[offsets[:-1]]
    exact = ends[offsets[1:]] - base == text_lengths
    row_of = np.repeat(np.arange(len(text_lengths)), np.diff(segments.offsets))
    targets = (base[row_of] + segments.ends).astype(ends.dtype)  # or searchsorted would convert all of `ends`
    counts = np.searchsorted(ends[1:], targets, side="right")
    crossing = np.flatnonzero(segments.inclusive)
    counts[crossing] += ends[counts[crossing]] < targets[crossing]
    result = np.minimum(counts, offsets[1:][row_of]) - offsets[:-1][row_of]
    _close_rows(result, segments.offsets, np.diff(offsets))
    return result, exact


def _token_ends(
    ids: npt.NDArray[np.uint32], byte_lengths: npt.NDArray[np.unsignedinteger], size: int
) -> npt.NDArray[Any]:
    """Where tokens end in the joined texts, preceded by 0. Works in steps, because large temporary arrays are slow:
    every page of them is newly allocated."""
    lengths = np.empty(len(ids), byte_lengths.dtype)
    for start in range(0, len(ids), _STEP):
        np.take(byte_lengths, ids[start : start + _STEP], out=lengths[start : start + _STEP], mode="clip")
    ends = np.zeros(len(ids) + 1, np.int64 if size >> 30 else np.int32)
    np.cumsum(lengths, dtype=ends.dtype, out=ends[1:])
    return ends


def _close_rows(result: Int64, segment_offsets: Int64, lengths: Int64) -> None:
    """Make the last segment of each row end with the row, and the ends non-decreasing."""
    owned = np.flatnonzero(np.diff(segment_offsets))
    result[segment_offsets[1:][owned] - 1] = lengths[owned]
    # An inclusive end may reach past the end of an empty or tiny segment that follows it.
    rows = np.repeat(np.arange(len(lengths)), np.diff(segment_offsets))
    span = int(lengths.max(initial=0)) + 1
    np.copyto(result, np.maximum.accumulate(result + rows * span) - rows * span)
