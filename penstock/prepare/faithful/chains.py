"""Chains: the examples of a row, in which every assistant turn follows the prompt that inference shows.

The root of a row holds all turns that the template does not rewrite later. Other turns share a chain if their renders
extend each other. A chain begins like the root, and only the rest is stored. A turn belongs to one example and is
context in all others. `arrange` makes the chains of a row; this module turns them into a batch of texts to split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64, UInt8
from penstock.errors import RowError
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.chat.notes import NotedRows, joined_notes
from penstock.prepare.regions.dropped import find_dropped
from penstock.prepare.regions.segments import Segments, Spans, gathered
from penstock.prepare.regions.splitter import Splitter, spans_of
from penstock.prepare.template.printed import MessageFlag
from penstock.prepare.template.rendered import FieldRuns, Rendered
from penstock.prepare.template.turns import FieldColumn, SpanColumn, TagColumn, TurnColumn, TurnState

Places = npt.NDArray[np.int32]
# Plain integers, because numpy takes longer to index by an enum.
_MESSAGE, _START, _END = SpanColumn.MESSAGE.value, SpanColumn.START.value, SpanColumn.END.value
_LABEL = FieldColumn.LABEL.value  # START and END are the same columns as of spans
_OF_ROOT = TurnState.IN_ROOT.value | TurnState.IS_ROOT.value
_TAG_START, _TAG_END = TagColumn.START.value, TagColumn.END.value


class OwnTurn(NamedTuple):
    """A turn that an example trains, with the ends of its prompt and answer in the example's whole text."""

    message: int
    prompt_end: int
    answer_end: int
    flags: int  # `MessageFlag`; -1: as in the text of the whole row


@dataclass(slots=True)
class Chain:
    """One example of a row. The first `skipped` bytes of the root precede its `text`."""

    row: int
    text: bytes
    spans: Places  # `SpanColumn`; places are those in `text`
    tags: Places  # `TagColumn`
    fields: Places  # `FieldColumn`
    known: bool
    turns: list[OwnTurn]
    skipped: int = 0
    seam: int = 0  # where `text` is split for encoding; 0: nowhere
    is_spliced: bool = False  # it has the server's prompt instead of the template's render of the turn
    is_root: bool = False
    others: range = range(0)  # messages between its turns, which also belong to it

    def moved(self, by: int) -> tuple[Places, Places, Places]:
        """Copies of its spans, tags and fields, shifted."""
        spans, tags, fields = self.spans.copy(), self.tags.copy(), self.fields.copy()
        spans[:, _START:] += by
        tags[:, _TAG_START:] += by
        fields[:, _START:] += by
        return spans, tags, fields

    def before(self, end: int) -> tuple[Places, Places, Places]:
        """Copies of its spans, tags and fields that begin before `end`, truncated there."""
        spans, tags = self.spans[self.spans[:, _START] < end], self.tags[self.tags[:, _TAG_START] < end]
        fields = self.fields[self.fields[:, _START] < end]
        spans[:, _END] = np.minimum(spans[:, _END], end)
        tags[:, _TAG_END] = np.minimum(tags[:, _TAG_END], end)
        fields[:, _END] = np.minimum(fields[:, _END], end)
        return spans, tags, fields


class ChainRuns(NamedTuple):
    """Spans, tags or fields of examples, with places in their texts."""

    examples: Int64
    numbers: Int64  # messages of spans, labels of fields; those of tags mean nothing
    starts: Int64
    ends: Int64

    def followed_by(self, more: ChainRuns, examples: int) -> ChainRuns:
        """Appends the runs of other examples, which follow the first `examples` ones."""
        more = more._replace(examples=more.examples + examples)
        return ChainRuns(*(np.concatenate(pair) for pair in zip(self, more, strict=True)))

    def as_fields(self) -> FieldRuns:
        """These runs, which are fields."""
        return FieldRuns(self.examples.astype(np.int32), self.numbers.astype(np.int32), self.starts, self.ends)


@dataclass(slots=True)
class ChainTable:
    """Chains as columns. Examples are numbered in the table; places in `turns` are those in the whole text."""

    rows: Int64
    texts: list[bytes]
    known: Bool
    is_root: Bool
    skipped: Int64
    seams: Int64
    spans: ChainRuns  # of known chains
    tags: ChainRuns
    fields: ChainRuns
    turns: Int64  # a line per turn: example, message, end of its prompt, end of its answer, flags
    others: Int64  # a line per example: example, first message between its turns, end of these messages

    @classmethod
    def of(cls, made: Sequence[Chain]) -> ChainTable:
        """The columns of chains."""
        spans = [chain.spans if chain.known else chain.spans[:0] for chain in made]
        tags = [chain.tags if chain.known else chain.tags[:0] for chain in made]
        fields = [chain.fields if chain.known else chain.fields[:0] for chain in made]
        turns = [(number, *turn) for number, chain in enumerate(made) for turn in chain.turns]
        others = [(number, chain.others.start, chain.others.stop) for number, chain in enumerate(made) if chain.others]
        return cls(
            rows=np.array([chain.row for chain in made], np.int64),
            texts=[chain.text for chain in made],
            known=np.array([chain.known for chain in made], np.bool_),
            is_root=np.array([chain.is_root for chain in made], np.bool_),
            skipped=np.array([chain.skipped for chain in made], np.int64),
            seams=np.array([chain.seam for chain in made], np.int64),
            spans=_runs(spans, (_MESSAGE, _START, _END)),
            tags=_runs(tags, (_TAG_START, _TAG_START, _TAG_END)),
            fields=_runs(fields, (_LABEL, _START, _END)),
            turns=np.array(turns, np.int64).reshape(-1, 5),
            others=np.array(others, np.int64).reshape(-1, 3),
        )

    def followed_by(self, more: ChainTable) -> ChainTable:
        """Appends other chains."""
        count = len(self.rows)
        return ChainTable(
            rows=np.concatenate((self.rows, more.rows)),
            texts=self.texts + more.texts,
            known=np.concatenate((self.known, more.known)),
            is_root=np.concatenate((self.is_root, more.is_root)),
            skipped=np.concatenate((self.skipped, more.skipped)),
            seams=np.concatenate((self.seams, more.seams)),
            spans=self.spans.followed_by(more.spans, count),
            tags=self.tags.followed_by(more.tags, count),
            fields=self.fields.followed_by(more.fields, count),
            turns=np.concatenate((self.turns, more.turns + np.array([count, 0, 0, 0, 0]))),
            others=np.concatenate((self.others, more.others + np.array([count, 0, 0]))),
        )


def _runs(tables: Sequence[Places], columns: tuple[int, int, int]) -> ChainRuns:
    if not tables:
        return ChainRuns(*np.zeros((4, 0), np.int64))
    table = np.concatenate(tables).astype(np.int64)
    return ChainRuns(np.repeat(np.arange(len(tables)), list(map(len, tables))), *table[:, columns].T)


@dataclass(slots=True)
class Chains:
    """All examples of a batch: texts to split, and the messages that belong to each."""

    rendered: Rendered  # texts of examples, without the prefixes that they share with their roots
    rows: Int64  # per example: its conversation
    skipped: Int64  # per example: bytes of the root that precede its text
    seams: Int64  # per example: where its text is split for encoding; 0: nowhere
    own: Bool  # per message of each example: whether it belongs to the example
    prompt_ends: Int64  # per message of each example: -1 unless the example trains it
    answer_ends: Int64
    notes: NotedRows = field(default_factory=dict)


def joined_chains(rendered: Rendered, table: ChainTable, simple: Int64, notes: NotedRows) -> Chains:
    """All examples of a batch in row order: the chains of a table, and `simple` rows, whose root is their text."""
    rows = np.concatenate((table.rows, simple))
    order = np.argsort(rows, kind="stable")  # side chains before their root
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    places, simple_places = place[: len(table.rows)], place[len(table.rows) :]
    batch = _batch(rendered, table, rows[order], order, simple, simple_places, places)
    offsets = batch.message_offsets
    own, ends = np.ones(int(offsets[-1]), np.bool_), np.full((2, int(offsets[-1])), -1, np.int64)
    flags = batch.message_flags.copy()
    is_side = np.zeros(len(rows), np.bool_)
    is_side[places] = ~table.is_root
    of_side = np.repeat(is_side, np.diff(offsets))
    own[of_side], flags[of_side] = False, MessageFlag.CONTENT_PRINTED
    _mark_simple(rendered, table, _placed(simple, simple_places, len(rendered.text_ends)), offsets, ends, flags)
    examples, messages, prompt_ends, answer_ends, turn_flags = table.turns.T
    numbers, skipped = offsets[places[examples]] + messages, table.skipped[examples]
    own[numbers], ends[:, numbers] = True, (prompt_ends - skipped, answer_ends - skipped)
    flags[numbers[turn_flags >= 0]] = turn_flags[turn_flags >= 0]
    examples, firsts, stops = table.others.T
    counts = stops - firsts
    examples = np.repeat(places[examples], counts)
    messages = np.arange(len(examples)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
    own[offsets[examples] + messages] = True
    taken = offsets[np.searchsorted(rows[order], rows[order][examples], side="right") - 1] + messages  # from the root
    own[taken[batch.message_roles[taken] != Role.ASSISTANT]] = False
    own &= (batch.message_roles != Role.ASSISTANT) | (ends[0] >= 0)
    flags[~own & (batch.message_roles != Role.SYSTEM)] = MessageFlag.CONTENT_PRINTED
    skipped, seams = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    skipped[places], seams[places] = table.skipped, np.where(table.known, table.seams, 0)
    batch = replace(batch, message_flags=flags)
    return Chains(batch, rows[order], skipped, seams, own, ends[0], ends[1], notes)


def _mark_simple(rendered: Rendered, table: ChainTable, to: Int64, offsets: Int64, ends: Int64, flags: UInt8) -> None:
    """Marks the turns of simple rows that are in their root. If that is not all there is of a row, turns have
    flags of their own."""
    assert rendered.turns is not None
    turns = rendered.turns.table
    turns = turns[(to[turns[:, TurnColumn.ROW]] >= 0) & ((turns[:, TurnColumn.STATE] & _OF_ROOT) > 0)]
    turns = turns.astype(np.int64)
    numbers = offsets[to[turns[:, TurnColumn.ROW]]] + turns[:, TurnColumn.MESSAGE]
    ends[:, numbers] = turns[:, TurnColumn.PROMPT_SIZE], turns[:, TurnColumn.SIZE]
    states, is_whole = turns[:, TurnColumn.STATE] & _OF_ROOT, np.ones(len(to), np.bool_)
    is_whole[table.rows] = is_whole[turns[states == TurnState.IS_ROOT, TurnColumn.ROW]] = False
    alone = ~is_whole[turns[:, TurnColumn.ROW]] & (states != _OF_ROOT)
    flags[numbers[alone]] = turns[alone, TurnColumn.FLAGS]


def _placed(rows: Int64, places: Int64, count: int) -> Int64:
    """The place of each row of a batch, -1 for those without one."""
    found = np.full(count, -1, np.int64)
    found[rows] = places
    return found


def _batch(
    rendered: Rendered,
    table: ChainTable,
    rows: Int64,
    order: Int64,
    simple: Int64,
    simple_places: Int64,
    places: Int64,
) -> Rendered:
    """The texts of all examples, with spans, tags and messages."""
    data, text_ends = rendered.data, rendered.text_ends
    if len(table.rows):
        whole = rendered.texts
        texts = table.texts + [whole[row] for row in simple.tolist()]
        texts = [texts[k] for k in order.tolist()]
        data, text_ends = b"".join(texts), np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    starts = np.concatenate(([0], text_ends))[:-1]
    shift = _placed(simple, simple_places, len(rendered.text_ends))
    move = Move(shift, np.concatenate(([0], rendered.text_ends))[:-1], starts)
    spans = move(rendered.span_rows, rendered.span_messages, rendered.span_starts, rendered.span_ends)
    tags = move(rendered.tag_rows, rendered.tag_rows, rendered.tag_starts, rendered.tag_ends)
    fields = move(*rendered.fields)
    if len(table.rows):
        spans, tags = merged_runs(spans, table.spans, places, starts), merged_runs(tags, table.tags, places, starts)
        fields = merged_runs(fields, table.fields, places, starts)
    known = np.empty(len(rows), np.bool_)
    known[simple_places] = rendered.known[simple]
    known[places] = table.known
    messages, offsets = gathered(rendered.message_offsets, rows)
    weights = rendered.message_weights
    return replace(
        rendered,
        data=data,
        text_ends=text_ends,
        known=known,
        span_rows=spans.examples.astype(np.int32),
        span_messages=spans.numbers.astype(np.int32),
        span_starts=spans.starts,
        span_ends=spans.ends,
        tag_rows=tags.examples.astype(np.int32),
        tag_starts=tags.starts,
        tag_ends=tags.ends,
        message_offsets=offsets,
        message_roles=rendered.message_roles[messages],
        message_flags=rendered.message_flags[messages],
        message_weights=None if weights is None else weights[messages],
        conversation=lambda example: rendered.conversation(int(rows[example])),
        special={},
        notes={},
        errors={},
        turns=None,
        fields=fields.as_fields(),
    )


class Move(NamedTuple):
    """Moves runs to the new places of their texts; those of texts without one (-1) are dropped."""

    to: Int64
    old: Int64
    new: Int64

    def __call__(self, rows: npt.NDArray[Any], numbers: npt.NDArray[Any], starts: Int64, ends: Int64) -> ChainRuns:
        keep = self.to[rows] >= 0
        rows, places = rows[keep], self.to[rows[keep]]
        shift = self.new[places] - self.old[rows]
        return ChainRuns(places, numbers[keep].astype(np.int64), starts[keep] + shift, ends[keep] + shift)


def merged_runs(one: ChainRuns, other: ChainRuns, places: Int64, text_starts: Int64) -> ChainRuns:
    """All runs in order; `other` are those of a table whose examples have these places."""
    examples = places[other.examples]
    shift = text_starts[examples]
    other = ChainRuns(examples, other.numbers, other.starts + shift, other.ends + shift)
    joined = ChainRuns(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))
    order = np.lexsort((joined.ends, joined.starts, joined.examples))
    return ChainRuns(*(column[order] for column in joined))


# ---- segments


def chain_segments(splitter: Splitter, chains: Chains) -> tuple[Segments, dict[int, RowError]]:
    """Cuts examples into segments; errors are keyed by conversation.

    A trained turn lies between the ends of its prompt and its answer; messages of other examples are context.
    """
    rendered = chains.rendered if splitter.has_regions else chains.rendered.without_regions()
    spans = with_answers(spans_of(rendered), chains)
    segments = splitter.cut(rendered, spans, PromptEnds(chains, splitter.finder), chains.prompt_ends < 0)
    errors, dropped = find_dropped(rendered)
    of_rows = {note: np.unique(chains.rows[rows]) for note, rows in joined_notes(segments.notes, dropped).items()}
    segments = splitter.divide(labelled(segments, chains), rendered)
    segments = replace(segments, notes=joined_notes(of_rows, chains.notes))
    return segments, {int(chains.rows[example]): error for example, error in errors.items()}


class Repeats(Protocol):
    """Finds headers that a message repeats."""

    def find_repeated(self, data: bytes, later: Spans) -> Int64: ...


class PromptEnds:
    """Finds the ends of headers: the ends of prompts."""

    def __init__(self, chains: Chains, repeats: Repeats) -> None:
        starts = np.concatenate(([0], chains.rendered.text_ends))[:-1]
        counts = np.diff(chains.rendered.message_offsets)
        self._ends = np.where(chains.prompt_ends >= 0, chains.prompt_ends + np.repeat(starts, counts), -1)
        self._repeats = repeats

    def find(self, regions: Rendered, opening: Spans, previous: UInt8) -> tuple[Int64, set[int]]:
        """Where headers end, given the first spans of assistant messages."""
        return np.clip(self._ends[opening.numbers], opening.starts, opening.ends), set()

    def find_repeated(self, data: bytes, later: Spans) -> Int64:
        """Where repeated headers end, given later spans of messages; never before the end of the prompt."""
        found = self._repeats.find_repeated(data, later)
        return np.clip(np.maximum(found, self._ends[later.numbers]), later.starts, later.ends)


def with_answers(spans: Spans, chains: Chains) -> Spans:
    """Extends turns to everything the template prints for them: an end token after all messages, or a marker that the
    next message prints. White space stays without an owner."""
    rendered = chains.rendered
    text_starts = np.concatenate(([0], rendered.text_ends))[:-1]
    answers = chains.answer_ends[spans.numbers]
    answers = np.where(answers >= 0, answers + text_starts[spans.rows], -1)
    last = np.zeros(len(chains.own), np.int64)
    last[spans.numbers] = np.arange(len(spans.rows))
    short = (answers > spans.ends) & (last[spans.numbers] == np.arange(len(spans.rows)))
    short &= spans.roles == Role.ASSISTANT
    if not short.any():
        return spans
    starts, ends = spans.starts.copy(), spans.ends.copy()
    for index in np.flatnonzero(short).tolist():
        end = int(answers[index])
        more = rendered.data[int(ends[index]) : end].strip()
        start, number = int(text_starts[spans.rows[index]]), int(spans.numbers[index])
        prompt = rendered.data[start : start + int(chains.prompt_ends[number])]
        if not more or prompt.rstrip().endswith(more):  # some templates end every text like a prompt (Hunyuan)
            continue
        ends[index] = end
        after = index + 1
        while after < len(starts) and spans.rows[after] == spans.rows[index] and starts[after] < end:
            starts[after], ends[after] = end, max(int(ends[after]), end)
            after += 1
    return spans._replace(starts=starts, ends=ends)


def labelled(segments: Segments, chains: Chains) -> Segments:
    """Labels context, and text before the end of the prompt or after the answer, none of which is trained."""
    for ends in (chains.prompt_ends, chains.answer_ends):
        segments = _split(segments, chains, ends)
    numbers, _, starts = _places(segments, chains)
    has_message = numbers >= 0
    at = np.maximum(numbers, 0)
    own = has_message & chains.own[at]
    trained = own & (segments.roles == Role.ASSISTANT) & np.isin(segments.parts, (Part.BODY, Part.STOP))
    parts = segments.parts.copy()
    parts[trained & (starts < chains.prompt_ends[at])] = Part.HEADER
    parts[trained & (starts >= chains.answer_ends[at]) & (starts >= chains.prompt_ends[at])] = Part.TAIL
    parts[has_message & ~own] = Part.CONTEXT
    return replace(segments, parts=parts)


def _places(segments: Segments, chains: Chains) -> tuple[Int64, Int64, Int64]:
    """For each segment: the number of its message in the batch (-1: none), its example, and its start."""
    counts = np.diff(segments.offsets)
    examples = np.repeat(np.arange(len(counts)), counts)
    numbers = np.where(segments.messages >= 0, chains.rendered.message_offsets[examples] + segments.messages, -1)
    starts = np.concatenate(([0], segments.ends))[:-1] if len(segments.ends) else segments.ends
    starts = starts.copy()
    starts[segments.offsets[:-1][counts > 0]] = 0
    return numbers, examples, starts


def _split(segments: Segments, chains: Chains, bounds: Int64) -> Segments:
    """Cuts assistants' bodies and stops at the bound of their message."""
    numbers, examples, starts = _places(segments, chains)
    bound = np.where(numbers >= 0, bounds[np.maximum(numbers, 0)], -1)
    words: Bool = (segments.roles == Role.ASSISTANT) & np.isin(segments.parts, (Part.BODY, Part.STOP))
    inside = np.flatnonzero(words & (starts < bound) & (bound < segments.ends))
    if not len(inside):
        return segments

    def inserted(values: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.insert(values, inside, new)

    more = np.concatenate(([0], np.cumsum(np.bincount(examples[inside], minlength=len(segments.offsets) - 1))))
    return replace(
        segments,
        offsets=segments.offsets + more,
        ends=inserted(segments.ends, bound[inside]),
        roles=inserted(segments.roles, segments.roles[inside]),
        parts=inserted(segments.parts, segments.parts[inside]),
        messages=inserted(segments.messages, segments.messages[inside]),
        crossing=inserted(segments.crossing, np.zeros(len(inside), np.uint8)),
        weights=None if segments.weights is None else inserted(segments.weights, segments.weights[inside]),
    )
