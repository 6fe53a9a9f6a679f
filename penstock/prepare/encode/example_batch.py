"""Encoded examples as flat arrays: encodes rendered or plain texts, and concatenates and selects the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.native import native
from penstock.prepare.chat.conversation import Conversation, Part, Role
from penstock.prepare.chat.formats import Format
from penstock.prepare.encode.columns import Columns
from penstock.prepare.encode.encoder import AlignmentTables, ByteLengths, Encoder
from penstock.prepare.regions.segments import Segments, gathered

# ---- align -----------------------------------------------------------------------------------------------------------
#
# Converts segment ends from bytes to tokens.
#
# Tokens are aligned with their text by the cumulative byte lengths of byte-level tokens, or by matching the pieces of
# SentencePiece-style tokens against the text (`spm_pieces`). This is exact if the tokens account for every byte of the
# text. Normalizers and tokens that absorb spaces break that; such rows use the reference encoder's offsets instead.
# A token that crosses a boundary belongs to the segment in which it ends, unless the segment before it is `inclusive`.
# Without the compiled core, lengths are summed in numpy, and tokenizers with pieces use the reference's offsets.


_STEP: Final = 1 << 16


def segment_token_ends(
    texts: list[bytes],
    ids: npt.NDArray[np.uint32],
    offsets: Int64,
    segments: Segments,
    tables: AlignmentTables,
    token_ends: Callable[[int], Int64],
    *,
    by_offsets: Sequence[int] = (),
) -> tuple[Int64, int]:
    """For each segment, the number of the row's tokens up to its end; and the number of rows that needed `token_ends`.

    `by_offsets` are rows known in advance to need it.
    """
    if native is None:
        counts, exact = _counted(texts, ids, offsets, segments, tables[0])
    else:
        counts = np.zeros(len(segments.ends), np.int64)
        cuts = segments.offsets, segments.ends, segments.inclusive
        found = native.count_tokens(texts, ids, offsets, *tables, *cuts, counts)
        exact = np.frombuffer(found, np.bool_).copy()
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


def _counted(
    texts: list[bytes], ids: npt.NDArray[np.uint32], offsets: Int64, segments: Segments, byte_lengths: ByteLengths
) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """The numpy version, by byte lengths only."""
    text_lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = _token_ends(ids, byte_lengths, int(text_lengths.sum()))
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


def _token_ends(ids: npt.NDArray[np.uint32], byte_lengths: ByteLengths, size: int) -> npt.NDArray[Any]:
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


# ---- batch -----------------------------------------------------------------------------------------------------------


def _empty() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class ExampleBatch:
    """Examples in order, with the row and the side that each comes from. Segments are laid out as in `Columns`."""

    ids: npt.NDArray[Any]
    offsets: Int64
    segment_offsets: Int64
    ends: Int64  # of segments, in tokens from the example's start
    roles: npt.NDArray[np.uint8]
    parts: npt.NDArray[np.uint8]
    messages: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None = None
    rows: Int64 = field(default_factory=_empty)
    sides: Int64 = field(default_factory=_empty)
    heads: Int64 = field(default_factory=_empty)  # number of leading segments shared with the row's last example
    fallbacks: Counter[str] = field(default_factory=Counter)  # texts that the reference encoded, by reason

    def taken(self, order: Int64) -> ExampleBatch:
        """Returns the examples with these numbers, in this order."""
        tokens, offsets = gathered(self.offsets, order)
        segments, segment_offsets = gathered(self.segment_offsets, order)
        return ExampleBatch(
            ids=self.ids[tokens],
            offsets=offsets,
            segment_offsets=segment_offsets,
            ends=self.ends[segments],
            roles=self.roles[segments],
            parts=self.parts[segments],
            messages=self.messages[segments],
            weights=None if self.weights is None else self.weights[segments],
            rows=self.rows[order] if len(self.rows) else self.rows,
            sides=self.sides[order] if len(self.sides) else self.sides,
            heads=self.heads[order] if len(self.heads) else self.heads,
            fallbacks=self.fallbacks,
        )

    def without(self, rows: Collection[int]) -> ExampleBatch:
        """Returns the examples of all other rows."""
        keep = ~np.isin(self.rows, np.fromiter(rows, np.int64, len(rows)))
        return self if keep.all() else self.taken(np.flatnonzero(keep))

    def equal_pairs(self) -> list[int]:
        """Returns the rows whose two sides have the same tokens. A row's sides are adjacent."""
        sizes = np.diff(self.offsets)
        same = np.flatnonzero((self.rows[1:] == self.rows[:-1]) & (sizes[1:] == sizes[:-1]))
        starts = self.offsets.tolist()
        return [
            int(self.rows[k])
            for k in same.tolist()
            if np.array_equal(self.ids[starts[k] : starts[k + 1]], self.ids[starts[k + 1] : starts[k + 2]])
        ]

    def columns(self, row_hashes: npt.NDArray[np.uint64], *, format: Format) -> Columns:
        """Returns the shard's columns. In KTO data, side 1 marks an undesirable answer."""
        preference = format is Format.PREFERENCE
        ends, prefixes = (self.ends, None) if preference else self._with_prefixes()
        return Columns(
            ids=self.ids,
            id_offsets=self.offsets,
            segment_offsets=self.segment_offsets,
            segment_ends=ends.astype(np.uint32),
            segment_roles=self.roles,
            segment_parts=self.parts,
            segment_messages=self.messages,
            segment_weights=self.weights,
            rows=self.rows.astype(np.uint32),
            row_hashes=row_hashes[self.rows],
            sides=self.sides.astype(np.uint8) if preference else None,
            prefixes=prefixes,
            desirable=(1 - self.sides).astype(np.uint8) if format is Format.KTO else None,
        )

    def _with_prefixes(self) -> tuple[Int64, npt.NDArray[np.uint32] | None]:
        """Returns the ends of segments counted from the start of the whole example, and the lengths of shared
        prefixes if rows have several examples."""
        if not self.heads.any() and len(np.unique(self.rows)) == len(self.rows):
            return self.ends, None
        roots = np.searchsorted(self.rows, self.rows, side="right") - 1
        shared = self.heads > 0
        prefixes = np.zeros(len(self.rows), np.int64)
        prefixes[shared] = self.ends[self.segment_offsets[roots[shared]] + self.heads[shared] - 1]
        return self.ends + np.repeat(prefixes, np.diff(self.segment_offsets)), prefixes.astype(np.uint32)


def concatenate_batches(parts: Sequence[ExampleBatch], dtype: type[Any] = np.uint32) -> ExampleBatch:
    """Concatenates batches. Clears the ids of the parts, so that a slice's ids are never in memory twice."""
    if len(parts) == 1:
        return replace(parts[0], ids=parts[0].ids.astype(dtype, copy=False))
    weighted = any(p.weights is not None for p in parts)
    return ExampleBatch(
        ids=_moved_ids(parts, dtype),
        offsets=_chained([p.offsets for p in parts]),
        segment_offsets=_chained([p.segment_offsets for p in parts]),
        ends=_concatenated([p.ends for p in parts], np.int64),
        roles=_concatenated([p.roles for p in parts], np.uint8),
        parts=_concatenated([p.parts for p in parts], np.uint8),
        messages=_concatenated([p.messages for p in parts], np.int32),
        weights=_concatenated([_weights_of(p) for p in parts], np.float32) if weighted else None,
        rows=_concatenated([p.rows for p in parts], np.int64),
        sides=_concatenated([p.sides for p in parts], np.int64),
        heads=_concatenated([p.heads for p in parts], np.int64),
        fallbacks=sum((p.fallbacks for p in parts), Counter()),
    )


def _moved_ids(parts: Sequence[ExampleBatch], dtype: type[Any]) -> npt.NDArray[Any]:
    ids = np.empty(sum(len(p.ids) for p in parts), dtype)
    start = 0
    for part in parts:
        ids[start : start + len(part.ids)] = part.ids
        start += len(part.ids)
        part.ids = ids[:0]
    return ids


def _concatenated(arrays: list[npt.NDArray[Any]], dtype: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype)


def _chained(offsets: list[Int64]) -> Int64:
    lengths = [np.diff(o) for o in offsets]
    return np.concatenate([[0], np.cumsum(np.concatenate(lengths))]) if lengths else np.zeros(1, np.int64)


def _weights_of(batch: ExampleBatch) -> npt.NDArray[np.float32]:
    return batch.weights if batch.weights is not None else np.full(len(batch.ends), np.nan, np.float32)


# -- encoding -----------------------------------------------------------------------------------------------------


def encode_texts(texts: list[bytes], segments: Segments, encoder: Encoder, *, reference: bool = False) -> ExampleBatch:
    """Encodes texts with their segments. With `reference`, engines and shortcuts that are to be checked aren't used."""
    vocabulary, given = encoder.vocabulary, texts
    texts, segments, findings, composed = encoder.compose(texts, segments)
    # Some rows are aligned by offsets, because token lengths may add up by chance (ḿ is as long as its parts).
    by_offsets: Sequence[int] = range(len(texts)) if reference and encoder.has_offsets else ()
    if vocabulary.byte_level:
        by_offsets = findings.decomposed
    encoded = encoder.reference(texts) if reference else encoder.encode(texts, findings)
    ends, inexact = segment_token_ends(
        texts,
        encoded.ids,
        encoded.offsets,
        segments,
        encoder.tables if encoded.ends is None else (encoded.ends, encoder.tables[1]._replace(rule=0)),
        lambda row: encoder.token_ends(texts[row], encoded.ids[encoded.offsets[row] : encoded.offsets[row + 1]]),
        by_offsets=by_offsets,
    )
    if reference and composed:
        encoded = encoder.reference(given)  # the ids of the text as rendered are authoritative
    slower = {"masks by offsets": inexact, "text composed to NFC": composed}
    return ExampleBatch(
        ids=encoded.ids,
        offsets=encoded.offsets,
        segment_offsets=segments.offsets,
        ends=ends,
        roles=segments.roles,
        parts=segments.parts,
        messages=segments.messages,
        weights=segments.weights,
        fallbacks=encoded.fallbacks + Counter(slower),  # which leaves out zeros
    )


class Ending(NamedTuple):
    """The end-of-sequence token to append to plain texts; '' for none."""

    token: str = ""
    always: bool = False  # even if the text ends with it

    def after(self, text: str) -> str:
        """Returns what to append to a text."""
        return self.token if self.always or not text.endswith(self.token) else ""


def plain_texts(conversations: Sequence[Conversation], ending: Ending) -> tuple[list[bytes], Segments]:
    """Returns the texts of conversations that no template renders, and their segments."""
    plain = ["".join(text for _, text in c.texts or ()) for c in conversations]
    endings = [ending.after(text) for text in plain]
    texts = [(text + end).encode() for text, end in zip(plain, endings, strict=True)]
    return texts, _plain_segments(conversations, endings)


def _plain_segments(conversations: Sequence[Conversation], endings: Sequence[str]) -> Segments:
    """Makes each text a body segment, and the ending the stop of the last message."""
    cuts: list[tuple[int, Role, Part, int]] = []  # size in bytes, role, part, message
    counts: list[int] = []
    for conversation, ending in zip(conversations, endings, strict=True):
        texts = conversation.texts or ()
        own = [(len(text.encode()), role, Part.BODY, number) for number, (role, text) in enumerate(texts)]
        if ending:
            own.append((len(ending.encode()), texts[-1][0], Part.STOP, len(texts) - 1))
        cuts += own
        counts.append(len(own))
    sizes, roles, parts, messages = zip(*cuts, strict=True) if cuts else ((), (), (), ())
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Segments(
        offsets=offsets,
        ends=ends[1:] - np.repeat(ends[offsets[:-1]], counts),
        roles=np.array(roles, np.uint8),
        parts=np.array(parts, np.uint8),
        messages=np.array(messages, np.int32),
        inclusive=np.zeros(len(cuts), np.bool_),
        known=np.ones(len(conversations), np.bool_),
    )


def with_prefix_and_suffix(batch: ExampleBatch, prefix: list[int], suffix: list[int]) -> ExampleBatch:
    """Adds the tokenizer's own prefix (as glue) and suffix (as the last stop) to plain texts that lack them."""
    if not prefix and not suffix:
        return batch
    ids: list[npt.NDArray[Any]] = []
    ends: list[Int64] = []
    roles: list[npt.NDArray[np.uint8]] = []
    parts: list[npt.NDArray[np.uint8]] = []
    messages: list[npt.NDArray[np.int32]] = []
    for k in range(len(batch.offsets) - 1):
        own = batch.ids[batch.offsets[k] : batch.offsets[k + 1]]
        cut = slice(int(batch.segment_offsets[k]), int(batch.segment_offsets[k + 1]))
        before = [] if own[: len(prefix)].tolist() == prefix else prefix
        after = [] if suffix and own[len(own) - len(suffix) :].tolist() == suffix else suffix
        last = batch.messages[cut][-1:]
        ids.append(np.concatenate([before, own, after]))
        body = batch.ends[cut] + len(before)
        size = len(before) + len(own) + len(after)
        ends.append(np.concatenate([[len(before)] * bool(before), body, [size] * bool(after)]).astype(np.int64))
        roles.append(_around(batch.roles[cut], Role.NONE, bool(before), batch.roles[cut][-1:], bool(after)))
        parts.append(_around(batch.parts[cut], Part.GLUE, bool(before), np.array([Part.STOP], np.uint8), bool(after)))
        messages.append(_around(batch.messages[cut], -1, bool(before), last, bool(after)))
    counts = [len(e) for e in ends]
    return ExampleBatch(
        ids=_concatenated(ids, np.uint32),
        offsets=np.concatenate([[0], np.cumsum([len(i) for i in ids])]).astype(np.int64),
        segment_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ends=_concatenated(ends, np.int64),
        roles=_concatenated(roles, np.uint8),
        parts=_concatenated(parts, np.uint8),
        messages=_concatenated(messages, np.int32),
        weights=None,
        fallbacks=batch.fallbacks,
    )


def _around(own: npt.NDArray[Any], first: int, before: bool, last: npt.NDArray[Any], after: bool) -> npt.NDArray[Any]:
    return np.concatenate([np.array([first] * before, own.dtype), own, last if after else last[:0]])
