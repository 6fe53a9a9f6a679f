"""The spot check: redoes rows of each slice with the reference engines and compares the results.

Two kinds of rows are checked: a seeded sample (a function of the slice's digest and row sizes alone; at least one row,
at most about 0.1% of the bytes, which costs about 3% of the time), and every row that took a branch of the template in
a direction that this process had not compared yet. A long text is rendered whole, but encoded only up to the first end
of a turn after `WINDOW` bytes: a special token, which no other token spans. For a row over a megabyte, both engines run
again on a copy with fewer messages and shorter texts. For a row that an engine rejected, the reasons are compared;
unreadable rows are rejected by code that both engines share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from penstock.arrays import Int64
from penstock.errors import EncoderPanic, RowError
from penstock.prepare.chat.conversation import Conversation, Part
from penstock.prepare.encode.columns import Columns
from penstock.prepare.encode.example_batch import ExampleBatch, encode_pieces, encode_texts
from penstock.prepare.encode.unicode_checks import is_composed
from penstock.prepare.pipeline import DROPPED, Pipeline, SliceResult
from penstock.prepare.regions.segments import Segments
from penstock.prepare.sources.slices import SliceRows

# ---- equality --------------------------------------------------------------------------------------------------------
#
# Compares the examples of a row in two sets of columns.


_EXAMPLE_COLUMNS = ("row_hashes", "sides", "prefixes", "desirable")
_SEGMENT_COLUMNS = ("segment_ends", "segment_roles", "segment_parts", "segment_messages", "segment_weights")


def same_examples(stored: Columns, row: int, expected: Columns, k: int) -> bool:
    """Whether the examples of row `row` of `stored` equal those of row `k` of `expected`."""
    ours, theirs = np.flatnonzero(stored.rows == row).tolist(), np.flatnonzero(expected.rows == k).tolist()
    return len(ours) == len(theirs) and all(
        _same(a, b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(_example(stored, one), _example(expected, other), strict=True)
    )


def _example(columns: Columns, number: int) -> list[npt.NDArray[Any] | None]:
    tokens = slice(int(columns.id_offsets[number]), int(columns.id_offsets[number + 1]))
    runs = slice(int(columns.segment_offsets[number]), int(columns.segment_offsets[number + 1]))
    parts: list[npt.NDArray[Any] | None] = [columns.ids[tokens]]
    for names, where in ((_EXAMPLE_COLUMNS, slice(number, number + 1)), (_SEGMENT_COLUMNS, runs)):
        for name in names:
            values = getattr(columns, name)
            parts.append(None if values is None else values[where])
    return parts


def _same(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    """Whether two columns are equal. A missing column equals one of NaN (weights) or of zeros (prefixes), because
    the other rows of a slice decide whether its shard has the column."""
    if a is None or b is None:
        given = b if a is None else a
        return given is None or bool(np.isnan(given).all() if given.dtype.kind == "f" else not given.any())
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


# ---- shortening ------------------------------------------------------------------------------------------------------
#
# Shortens long rows for the spot check, so that the references need not redo whole rows.


LONG_ROW = 1_000_000  # bytes
SHORT_BYTES, SHORT_STRING = 200_000, 20_000


def shortened(row: bytes) -> bytes:
    """Returns a row of the same form with fewer messages and shorter texts, or the row itself if it isn't JSON."""
    try:
        return orjson.dumps(_Shortener().cut(orjson.loads(row)))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return row


class _Shortener:
    """Cuts a value to about `SHORT_BYTES`."""

    def __init__(self) -> None:
        self._budget = SHORT_BYTES

    def cut(self, value: Any) -> Any:
        """Keeps the beginning of strings and the first elements of lists."""
        self._budget -= 8
        if isinstance(value, str):
            kept = value[: max(0, min(self._budget, SHORT_STRING))]
            self._budget -= len(kept)
            return kept
        if isinstance(value, dict):
            return {key: self.cut(own) for key, own in value.items()}
        if isinstance(value, list):
            return [self.cut(own) for own in value if self._budget > 0]
        return value


# ---- spot check ------------------------------------------------------------------------------------------------------


SHARE = 0.001
WINDOW = 8_000
_BY_ENGINES = ("template", DROPPED, "special_tokens_in_text")  # kinds of rejections that engines decide


class _Sampled(NamedTuple):
    """One conversation of the sample."""

    row: int
    side: int
    conversation: Conversation


def sampled_rows(slice_digest: str, sizes: Sequence[int]) -> list[int]:
    """Returns the sorted numbers of the rows to check."""
    if not sizes:
        return []
    order = np.random.Generator(np.random.PCG64(int(slice_digest.removeprefix("b3-")[:16], 16))).permutation(len(sizes))
    budget = sum(sizes) * SHARE
    chosen = [int(order[0])]
    spent = sizes[chosen[0]]
    for row in order[1:64].tolist():
        if spent + sizes[row] > budget:
            break
        chosen.append(row)
        spent += sizes[row]
    return sorted(chosen)


def chain_mismatches(
    pipeline: Pipeline, reference: Pipeline, rows: Sequence[bytes], sample: Sequence[int], result: SliceResult
) -> list[int]:
    """Like `mismatches`, for `--turns faithful`: rows may have several examples, and are redone whole by a pipeline
    that uses the references only."""
    rejected = {entry["row"]: (entry["kind"], entry["reason"]) for entry in result.rejected}
    wrong: list[int] = []
    for row in sample:
        data = shortened(rows[row]) if len(rows[row]) > LONG_ROW else rows[row]
        expected = reference.run(SliceRows([data], [1]))
        refused = next(((entry["kind"], entry["reason"]) for entry in expected.rejected), None)
        if data is not rows[row]:
            found, number = pipeline.run(SliceRows([data], [1])), 0
            own = next(((entry["kind"], entry["reason"]) for entry in found.rejected), None)
        else:
            found, number, own = result, row, rejected.get(row)
        if (
            refused != own and (own is None or own[0] in _BY_ENGINES or refused is None or refused[0] in _BY_ENGINES)
        ) or not _same_row(found.columns, number, expected.columns):
            wrong.append(row)
    return wrong


def _same_row(found: Columns, row: int, expected: Columns) -> bool:
    """Whether a row's examples are the expected ones. Ignores the row hash, which differs if the row was shortened."""
    return same_examples(
        found._replace(row_hashes=found.row_hashes * 0), row, expected._replace(row_hashes=expected.row_hashes * 0), 0
    )


def mismatches(pipeline: Pipeline, rows: Sequence[bytes], sample: Sequence[int], result: SliceResult) -> list[int]:
    """Returns the sampled rows for which the references' result differs."""
    long = [row for row in sample if len(rows[row]) > LONG_ROW]
    wrong = {row for row in long if _differs_when_short(pipeline, rows[row])}
    return sorted({*wrong, *_mismatches(pipeline, rows, [row for row in sample if row not in long], result)})


def _differs_when_short(pipeline: Pipeline, row: bytes) -> bool:
    short = [shortened(row)]
    return bool(_mismatches(pipeline, short, [0], pipeline.run(SliceRows(short, [1]))))


def _mismatches(pipeline: Pipeline, rows: Sequence[bytes], sample: Sequence[int], result: SliceResult) -> list[int]:
    wrong: set[int] = set()
    groups: dict[str, list[_Sampled]] = {}
    rejected = {entry["row"]: entry for entry in result.rejected}
    for row in sample:
        if row in rejected:
            if rejected[row]["kind"] in _BY_ENGINES and not _is_rejected(pipeline, rows[row], rejected[row]["reason"]):
                wrong.add(row)
        else:
            try:
                found = pipeline.reader.conversations(rows[row])
                for side, conversation in enumerate(found):
                    name = pipeline.template_name(conversation)
                    adapted = pipeline.renderings[name].renderer.adapter.adapt(conversation) if name else conversation
                    groups.setdefault(name, []).append(_Sampled(row, side, adapted))
            except RowError:
                wrong.add(row)
                continue
            if len(found) != np.count_nonzero(result.columns.rows == row):
                wrong.add(row)
    for name, members in groups.items():
        try:
            expected, shortened = _redone(pipeline, name, [member.conversation for member in members])
        except EncoderPanic:  # the reference rejects such a row
            wrong.update(member.row for member in members)
            continue
        for k, member in enumerate(members):
            if member.row not in wrong and _differs(expected, k, result.columns, member, shortened[k]):
                wrong.add(member.row)
    return sorted(wrong)


def _is_rejected(pipeline: Pipeline, row: bytes, reason: str) -> bool:
    """Whether the references reject a row for this reason."""
    try:
        found = [
            (pipeline.template_name(conversation), conversation) for conversation in pipeline.reader.conversations(row)
        ]
        for rendering, conversation in ((pipeline.renderings[name], c) for name, c in found if name):
            rendered = rendering.renderer.render_reference([rendering.renderer.adapter.adapt(conversation)])
            dropped = rendering.splitter.split(rendered)[1]
            if reason in (error.reason for error in pipeline.refusals(rendered, dropped).values()):
                return True
    except RowError:
        return False
    return not all(name for name, _ in found)  # no engine renders plain text


def _redone(pipeline: Pipeline, name: str, conversations: list[Conversation]) -> tuple[ExampleBatch, list[bool]]:
    """Prepares conversations with the reference engines only; also returns which of the texts were cut."""
    stages = (pipeline.encoder, pipeline.normaliser, pipeline.vocabulary)
    if name == "":
        return encode_pieces(conversations, pipeline.ending, *stages, reference=True), [False] * len(conversations)
    rendering = pipeline.renderings[name]
    rendered = rendering.renderer.render_reference(conversations)
    segments, _ = rendering.splitter.split(rendered)
    whole = rendered.texts
    texts, segments = _beginnings(whole, segments)
    batch = encode_texts(texts, segments, *stages, reference=True)
    # The tokenizer's ids of the text as rendered are authoritative, not those of the text normalised beforehand.
    if not all(is_composed(text.decode()) for text in texts):
        expected = pipeline.encoder.reference(texts)
        batch.ids, batch.offsets = expected.ids, expected.offsets
    return batch, [len(text) < len(full) for text, full in zip(texts, whole, strict=True)]


def _beginnings(texts: list[bytes], segments: Segments) -> tuple[list[bytes], Segments]:
    """Cuts texts at the first end of a turn beyond the window, and returns them with their segments."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if not (lengths > WINDOW).any():
        return texts, segments
    rows = np.repeat(np.arange(len(texts)), np.diff(segments.offsets))
    closing = np.flatnonzero((segments.parts == Part.STOP) & (segments.ends >= WINDOW))
    np.minimum.at(lengths, rows[closing], segments.ends[closing])
    keep = np.flatnonzero(segments.ends <= lengths[rows])
    offsets: Int64 = np.concatenate(([0], np.cumsum(np.bincount(rows[keep], minlength=len(texts)))))
    cut = [text[:length] for text, length in zip(texts, lengths.tolist(), strict=True)]
    return cut, segments.picked(keep, offsets)


def _differs(expected: ExampleBatch, k: int, columns: Columns, member: _Sampled, shortened: bool) -> bool:
    """Whether a stored example differs from the k-th expected one, or from its beginning if that was cut."""
    stored = int(np.searchsorted(columns.rows, member.row)) + member.side
    tokens = slice(int(columns.id_offsets[stored]), int(columns.id_offsets[stored + 1]))
    runs = slice(int(columns.segment_offsets[stored]), int(columns.segment_offsets[stored + 1]))
    own_tokens = slice(int(expected.offsets[k]), int(expected.offsets[k + 1]))
    own_runs = slice(int(expected.segment_offsets[k]), int(expected.segment_offsets[k + 1]))
    pairs = (
        (columns.ids[tokens], expected.ids[own_tokens]),
        (columns.segment_ends[runs], expected.ends[own_runs]),
        (columns.segment_roles[runs], expected.roles[own_runs]),
        (columns.segment_parts[runs], expected.parts[own_runs]),
        (columns.segment_messages[runs], expected.messages[own_runs]),
        (
            _weights(columns.segment_weights, columns.segment_ends)[runs],
            _weights(expected.weights, expected.ends)[own_runs],
        ),
    )
    return not all(_is_equal(found[: len(wanted)] if shortened else found, wanted) for found, wanted in pairs)


def _weights(given: npt.NDArray[np.float32] | None, ends: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.full(len(ends), np.nan, np.float32) if given is None else given


def _is_equal(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    return np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f")
