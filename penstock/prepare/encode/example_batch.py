"""Encoded examples as flat arrays: encodes rendered or plain texts, and concatenates and selects the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.native import native
from penstock.prepare.chat.conversation import BODY_PARTS, Conversation, Part, Role
from penstock.prepare.chat.formats import Format
from penstock.prepare.encode.columns import Columns
from penstock.prepare.encode.encoder import AlignmentTables, ByteLengths, Encoder
from penstock.prepare.modes import ReasoningInContent
from penstock.prepare.regions.parts import crossings_of, parts_of_text
from penstock.prepare.regions.segments import Crossing, Segments, gathered

# ---- align -----------------------------------------------------------------------------------------------------------
#
# Converts segment ends from bytes to tokens.
#
# Tokens are aligned with their text by the cumulative byte lengths of byte-level tokens, or by matching the pieces of
# SentencePiece-style tokens against the text (`spm_pieces`). This is exact if the tokens account for every byte of the
# text. Normalizers and tokens that absorb spaces break that; such rows use the reference encoder's offsets instead.
# A token that crosses the end of a segment belongs to the one that the segment's `Crossing` names.
# Without the compiled core, lengths are summed in numpy, and tokenizers with pieces use the reference's offsets.


_STEP: Final = 1 << 16


class Aligned(NamedTuple):
    """Segments in tokens."""

    ends: Int64  # for each segment, the number of the row's tokens up to its end
    crossed: npt.NDArray[np.uint8]  # 1 if a token crosses the segment's end, plus `ON_SPAN` at the border of a span
    inexact: int  # number of rows that needed the reference's offsets


def aligned(
    texts: list[bytes],
    ids: npt.NDArray[np.uint32],
    offsets: Int64,
    segments: Segments,
    tables: AlignmentTables,
    token_ends: Callable[[int], Int64],
    *,
    by_offsets: Sequence[int] = (),
) -> Aligned:
    """Aligns segments with the tokens of their rows. `by_offsets` are rows known in advance to need `token_ends`."""
    if native is None:
        counts, crossed, exact = _counted(texts, ids, offsets, segments, tables[0])
    else:
        counts, crossed = np.zeros(len(segments.ends), np.int64), np.zeros(len(segments.ends), np.uint8)
        cuts = segments.offsets, segments.ends, segments.crossing
        found = native.count_tokens(texts, ids, offsets, *tables, *cuts, counts, crossed)
        exact = np.frombuffer(found, np.bool_).copy()
    exact[list(by_offsets)] = False
    inexact = np.flatnonzero(~exact & (np.diff(offsets) > 0))
    for row in inexact.tolist():
        own = slice(int(segments.offsets[row]), int(segments.offsets[row + 1]))
        counts[own], crossed[own] = segment_counts(token_ends(row), segments.ends[own], segments.crossing[own])
    return Aligned(counts, crossed, len(inexact))


def segment_counts(
    token_ends: Int64, ends: Int64, crossing: npt.NDArray[np.uint8]
) -> tuple[Int64, npt.NDArray[np.uint8]]:
    """For each segment of one row, the number of tokens up to its end, and whether a token crosses it."""
    counts = np.searchsorted(token_ends, ends, side="right")
    edges = np.concatenate(([0], token_ends))
    edges = np.append(edges, edges[-1])
    counts, crossed = _crossed(counts, edges[counts], edges[counts + 1], ends, crossing)
    if len(counts):
        counts[-1], crossed[-1] = len(token_ends), 0
    return np.maximum.accumulate(counts), crossed


def _crossed(
    counts: Int64, starts: npt.NDArray[Any], after: npt.NDArray[Any], ends: Int64, crossing: npt.NDArray[np.uint8]
) -> tuple[Int64, npt.NDArray[np.uint8]]:
    """Adds the token that crosses a segment's end, if it belongs to the segment; it begins and ends at these places."""
    crosses, rule = (starts < ends) & (ends < after), crossing & ~np.uint8(Crossing.ON_SPAN)
    own = (rule == Crossing.OWN) | ((rule == Crossing.NEXT) & (after <= np.append(ends[1:], ends[-1:])))
    return counts + (crosses & own), crosses * (1 | crossing & np.uint8(Crossing.ON_SPAN))


def _counted(
    texts: list[bytes], ids: npt.NDArray[np.uint32], offsets: Int64, segments: Segments, byte_lengths: ByteLengths
) -> tuple[Int64, npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """The numpy version, by byte lengths only."""
    text_lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = _token_ends(ids, byte_lengths, int(text_lengths.sum()))
    base = ends[offsets[:-1]]
    exact = ends[offsets[1:]] - base == text_lengths
    row_of = np.repeat(np.arange(len(text_lengths)), np.diff(segments.offsets))
    targets = (base[row_of] + segments.ends).astype(ends.dtype)  # or searchsorted would convert all of `ends`
    counts = np.searchsorted(ends[1:], targets, side="right")
    after = ends[np.minimum(counts + 1, len(ends) - 1)]
    counts, crossed = _crossed(counts, ends[counts], after, targets, segments.crossing)
    result = np.minimum(counts, offsets[1:][row_of]) - offsets[:-1][row_of]
    lasts = _close_rows(result, segments.offsets, np.diff(offsets))
    crossed[lasts] = 0
    return result, crossed, exact


def _token_ends(ids: npt.NDArray[np.uint32], byte_lengths: ByteLengths, size: int) -> npt.NDArray[Any]:
    """Where tokens end in the joined texts, preceded by 0. Works in steps, because large temporary arrays are slow:
    every page of them is newly allocated."""
    lengths = np.empty(len(ids), byte_lengths.dtype)
    for start in range(0, len(ids), _STEP):
        np.take(byte_lengths, ids[start : start + _STEP], out=lengths[start : start + _STEP], mode="clip")
    ends = np.zeros(len(ids) + 1, np.int64 if size >> 30 else np.int32)
    np.cumsum(lengths, dtype=ends.dtype, out=ends[1:])
    return ends


def _close_rows(result: Int64, segment_offsets: Int64, lengths: Int64) -> Int64:
    """Makes the last segment of each row end with the row, and the ends non-decreasing; returns the last segments."""
    owned = np.flatnonzero(np.diff(segment_offsets))
    lasts = segment_offsets[1:][owned] - 1
    result[lasts] = lengths[owned]
    # A token that crosses the end of its segment may reach past the end of an empty or tiny one that follows.
    rows = np.repeat(np.arange(len(lengths)), np.diff(segment_offsets))
    span = int(lengths.max(initial=0)) + 1
    np.copyto(result, np.maximum.accumulate(result + rows * span) - rows * span)
    return lasts


# ---- batch -----------------------------------------------------------------------------------------------------------


_empty: Callable[[], Int64] = partial(np.fromiter, (), np.int64)


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
    crossed: npt.NDArray[np.uint8]  # see `Aligned`
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
            crossed=self.crossed[segments],
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

    def crossings(self) -> dict[str, int]:
        """How many tokens cross the borders between parts of answers, and of marked spans."""
        at = np.flatnonzero(self.crossed)
        spans = (self.crossed[at] & Crossing.ON_SPAN) > 0
        pairs = np.stack((self.parts[at], self.parts[at + 1]), axis=1)[~spans]
        inside = (self.roles[at] == Role.ASSISTANT) & (self.messages[at] == self.messages[at + 1])
        pairs = pairs[inside[~spans] & np.isin(pairs, BODY_PARTS).all(axis=1)]
        found = Counter({"span": int(spans.sum())} if spans.any() else {})
        for (before, after), count in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
            found[f"{Part(before).name}|{Part(after).name}".lower()] = int(count)
        return dict(sorted(found.items()))

    def straddled_rows(self) -> list[int]:
        """Rows in which a token crosses the border of a marked span."""
        at = np.flatnonzero(self.crossed & Crossing.ON_SPAN)
        found: list[int] = np.unique(self.rows[np.searchsorted(self.segment_offsets, at, side="right") - 1]).tolist()
        return found

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
        crossed=_concatenated([p.crossed for p in parts], np.uint8),
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
    found = aligned(
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
    slower = {"masks by offsets": found.inexact, "text composed to NFC": composed}
    return ExampleBatch(
        ids=encoded.ids,
        offsets=encoded.offsets,
        segment_offsets=segments.offsets,
        ends=found.ends,
        roles=segments.roles,
        parts=segments.parts,
        messages=segments.messages,
        crossed=found.crossed,
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


def plain_texts(
    conversations: Sequence[Conversation], ending: Ending, mode: ReasoningInContent = ReasoningInContent.AUTO
) -> tuple[list[bytes], Segments]:
    """Returns the texts of conversations that no template renders, and their segments."""
    plain = ["".join(text for _, text in c.texts or ()) for c in conversations]
    endings = [ending.after(text) for text in plain]
    texts = [(text + end).encode() for text, end in zip(plain, endings, strict=True)]
    return texts, _plain_segments(conversations, endings, mode)


def _plain_segments(
    conversations: Sequence[Conversation], endings: Sequence[str], mode: ReasoningInContent
) -> Segments:
    """Makes each text a body, which is divided if it is an assistant's, and the ending the stop of the last message."""
    cuts: list[tuple[int, Role, Part, int]] = []  # size in bytes, role, part, message
    counts: list[int] = []
    for conversation, ending in zip(conversations, endings, strict=True):
        texts = conversation.texts or ()
        own = []
        for number, (role, text) in enumerate(texts):
            divided = parts_of_text(text, mode) if role is Role.ASSISTANT else [(len(text.encode()), Part.BODY)]
            own += [(size, role, part, number) for size, part in divided]
        if ending:
            own.append((len(ending.encode()), texts[-1][0], Part.STOP, len(texts) - 1))
        cuts += own
        counts.append(len(own))
    columns = np.array(cuts, np.int64).reshape(-1, 4)
    sizes, roles, parts, messages = columns.T
    crossing = np.where(np.diff(messages, append=-1) == 0, crossings_of(parts), Crossing.LATER)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Segments(
        offsets=offsets,
        ends=ends[1:] - np.repeat(ends[offsets[:-1]], counts),
        roles=roles.astype(np.uint8),
        parts=parts.astype(np.uint8),
        messages=messages.astype(np.int32),
        crossing=crossing.astype(np.uint8),
        known=np.ones(len(conversations), np.bool_),
    )


def with_prefix_and_suffix(batch: ExampleBatch, prefix: list[int], suffix: list[int]) -> ExampleBatch:
    """Adds the tokenizer's own prefix (as glue) and suffix (as the last stop) to plain texts that lack them."""
    if not prefix and not suffix:
        return batch
    ids: list[npt.NDArray[Any]] = []
    ends: list[Int64] = []
    crossed: list[npt.NDArray[np.uint8]] = []
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
        crossed.append(_around(batch.crossed[cut], 0, bool(before), np.zeros(1, np.uint8), bool(after)))
    counts = [len(e) for e in ends]
    return ExampleBatch(
        ids=_concatenated(ids, np.uint32),
        offsets=np.concatenate([[0], np.cumsum([len(i) for i in ids])]).astype(np.int64),
        segment_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ends=_concatenated(ends, np.int64),
        roles=_concatenated(roles, np.uint8),
        parts=_concatenated(parts, np.uint8),
        messages=_concatenated(messages, np.int32),
        crossed=_concatenated(crossed, np.uint8),
        weights=None,
        fallbacks=batch.fallbacks,
    )


def _around(own: npt.NDArray[Any], first: int, before: bool, last: npt.NDArray[Any], after: bool) -> npt.NDArray[Any]:
    return np.concatenate([np.array([first] * before, own.dtype), own, last if after else last[:0]])
