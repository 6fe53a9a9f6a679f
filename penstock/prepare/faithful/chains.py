"""Chains: the examples of a row in which every assistant turn stands in the context that inference shows.

The root of a row holds all turns that the template does not rewrite later on. Of the others, those whose renders extend
each other share a chain; a chain begins like the root, and only what follows is kept. A turn belongs to one example and
is context in all others. `arrange` makes the chains of a row; here they become one batch of texts to split.
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
from penstock.prepare.regions.segments import Pieces, Segments, gathered
from penstock.prepare.regions.splitter import Splitter, pieces_of
from penstock.prepare.template.printed import MessageFlag
from penstock.prepare.template.rendered import Rendered

Places = npt.NDArray[np.int32]


class Own(NamedTuple):
    """A turn that an example trains: where its prompt and its answer end in the example's whole text."""

    message: int
    prompt_end: int
    answer_end: int
    flags: int  # what became of its message; -1: as in the text of the whole row


@dataclass(slots=True)
class Chain:
    """One example of a row. Its text begins with the first `skipped` bytes of the root, which are not repeated."""

    row: int
    text: bytes
    pieces: Places  # message, start, end in `text`
    spans: Places  # start, end in `text`
    known: bool
    turns: list[Own]
    skipped: int = 0
    seam: int = 0  # where in `text` it must be encoded in two parts; 0: nowhere
    is_spliced: bool = False  # the server's prompt stands in it instead of what the template prints for the turn
    is_root: bool = False
    others: range = range(0)  # messages between its turns, which belong to it as well

    def moved(self, by: int) -> tuple[Places, Places]:
        """Its pieces and spans, counted from another start."""
        pieces = self.pieces.copy()
        pieces[:, 1:] += by
        return pieces, self.spans + np.int32(by)

    def before(self, end: int) -> tuple[Places, Places]:
        """Its pieces and spans that begin before a place, cut off there."""
        pieces, spans = self.pieces[self.pieces[:, 1] < end].copy(), self.spans[self.spans[:, 0] < end]
        pieces[:, 2] = np.minimum(pieces[:, 2], end)
        return pieces, np.minimum(spans, end)


@dataclass(slots=True)
class Chains:
    """All examples of a batch: a batch of texts to split, and what belongs to each."""

    rendered: Rendered  # of chains, the texts behind what they have in common with their roots
    rows: Int64  # per example: the conversation that it comes from
    skipped: Int64  # per example: bytes of the root that stand before its text
    seams: Int64  # per example: where its text is encoded in two parts; 0: nowhere
    own: Bool  # per message of each example
    prompt_ends: Int64  # per message of each example: -1 where it trains no turn of it
    answer_ends: Int64
    notes: NotedRows = field(default_factory=dict)


def joined_chains(rendered: Rendered, made: Sequence[Chain], simple: Int64, notes: NotedRows) -> Chains:
    """All examples of a batch, rows in order: the simple rows, which are their own roots, and the chains of others."""
    rows = np.concatenate((simple, np.array([chain.row for chain in made], np.int64)))
    order = np.argsort(rows, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    simple_places, places = place[: len(simple)], place[len(simple) :]
    batch = _batch(rendered, made, rows[order], order, simple, simple_places, places)
    offsets = batch.message_offsets
    own, ends = np.ones(int(offsets[-1]), np.bool_), np.full((2, int(offsets[-1])), -1, np.int64)
    to = np.full(len(rendered.text_ends), -1, np.int64)
    to[simple] = simple_places
    assert rendered.turns is not None
    table = rendered.turns.table[to[rendered.turns.table[:, 0]] >= 0].astype(np.int64)
    ends[:, offsets[to[table[:, 0]]] + table[:, 1]] = table[:, 3:5].T
    flags = batch.message_flags.copy()
    for chain, example in zip(made, places.tolist(), strict=True):
        _mark(chain, slice(int(offsets[example]), int(offsets[example + 1])), own, ends, flags)
    _mark_roots(made, places.tolist(), offsets, own, batch.message_roles)
    own &= (batch.message_roles != Role.ASSISTANT) | (ends[0] >= 0)
    flags[~own & (batch.message_roles != Role.SYSTEM)] = MessageFlag.CONTENT_PRINTED
    skipped, seams = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    skipped[places] = [chain.skipped for chain in made]
    seams[places] = [chain.seam if chain.known else 0 for chain in made]
    batch = replace(batch, message_flags=flags)
    return Chains(batch, rows[order], skipped, seams, own, ends[0], ends[1], notes)


def _batch(
    rendered: Rendered,
    made: Sequence[Chain],
    rows: Int64,
    order: Int64,
    simple: Int64,
    simple_places: Int64,
    places: Int64,
) -> Rendered:
    """The texts of all examples, with pieces, spans and messages."""
    data, text_ends = rendered.data, rendered.text_ends
    if made:
        whole = rendered.texts
        texts = [whole[row] for row in simple.tolist()] + [chain.text for chain in made]
        texts = [texts[k] for k in order.tolist()]
        data, text_ends = b"".join(texts), np.cumsum([len(text) for text in texts])
    starts = np.concatenate(([0], text_ends))[:-1]
    shift = np.full(len(rendered.text_ends), -1, np.int64)
    shift[simple] = simple_places
    move = _Move(shift, np.concatenate(([0], rendered.text_ends))[:-1], starts)
    pieces = move(rendered.piece_rows, rendered.piece_messages, rendered.piece_starts, rendered.piece_ends)
    spans = move(rendered.span_rows, rendered.span_rows, rendered.span_starts, rendered.span_ends)
    if made:
        own = [chain.pieces if chain.known else chain.pieces[:0] for chain in made]
        blocks = [chain.spans if chain.known else chain.spans[:0] for chain in made]
        pieces = _with(pieces, own, places, starts)
        spans = _with(spans, blocks, places, starts)
    known = np.empty(len(rows), np.bool_)
    known[simple_places] = rendered.known[simple]
    known[places] = [chain.known for chain in made]
    messages, offsets = gathered(rendered.message_offsets, rows)
    weights = rendered.message_weights
    return replace(
        rendered,
        data=data,
        text_ends=text_ends,
        known=known,
        piece_rows=pieces[0].astype(np.int32),
        piece_messages=pieces[1].astype(np.int32),
        piece_starts=pieces[2],
        piece_ends=pieces[3],
        span_rows=spans[0].astype(np.int32),
        span_starts=spans[2],
        span_ends=spans[3],
        message_offsets=offsets,
        message_roles=rendered.message_roles[messages],
        message_flags=rendered.message_flags[messages],
        message_weights=None if weights is None else weights[messages],
        conversation=lambda example: rendered.conversation(int(rows[example])),
        special={},
        notes={},
        errors={},
        turns=None,
    )


def _mark(chain: Chain, place: slice, own: Bool, ends: Int64, flags: UInt8) -> None:
    """What belongs to one chain: its turns, and the messages between them."""
    first = int(place.start)
    if not chain.is_root:
        own[place] = False
        flags[place] = MessageFlag.CONTENT_PRINTED
    own[first + chain.others.start : first + chain.others.stop] = True
    for turn in chain.turns:
        own[first + turn.message] = True
        ends[0, first + turn.message] = turn.prompt_end - chain.skipped
        ends[1, first + turn.message] = turn.answer_end - chain.skipped
        if turn.flags >= 0:
            flags[first + turn.message] = turn.flags


def _mark_roots(made: Sequence[Chain], places: list[int], offsets: Int64, own: Bool, roles: UInt8) -> None:
    """What belongs to another chain of the row does not belong to its root, which is the last one."""
    taken: list[int] = []
    for chain, example in zip(made, places, strict=True):
        taken += chain.others
        if chain.is_root:
            first = int(offsets[example])
            own[[first + message for message in taken if roles[first + message] != Role.ASSISTANT]] = False
            taken = []


_Moved = tuple[Int64, Int64, Int64, Int64]


class _Move(NamedTuple):
    """Moves the pieces of texts that stand elsewhere now; -1: nowhere."""

    to: Int64
    old: Int64
    new: Int64

    def __call__(self, rows: npt.NDArray[Any], messages: npt.NDArray[Any], starts: Int64, ends: Int64) -> _Moved:
        keep = self.to[rows] >= 0
        rows, places = rows[keep], self.to[rows[keep]]
        shift = self.new[places] - self.old[rows]
        return places, messages[keep].astype(np.int64), starts[keep] + shift, ends[keep] + shift


def _with(found: _Moved, more: Sequence[npt.NDArray[Any]], places: Int64, text_starts: Int64) -> _Moved:
    """The pieces or spans of chains added, all in order."""
    rows = np.repeat(places, [len(pieces) for pieces in more])
    added = np.concatenate(more).astype(np.int64)
    messages = added[:, 0] if added.shape[1] == 3 else np.zeros_like(rows)  # spans have none
    columns = (rows, messages, added[:, -2] + text_starts[rows], added[:, -1] + text_starts[rows])
    joined = [np.concatenate(pair) for pair in zip(found, columns, strict=True)]
    order = np.lexsort((joined[3], joined[2], joined[0]))
    rows, messages, starts, ends = (column[order] for column in joined)
    return rows, messages, starts, ends


# ---- chain labels ----------------------------------------------------------------------------------------------------
#
# Labels of chains: a turn that an example trains lies between its prompt's end and its own; what is not its own is
# context.


def chain_segments(splitter: Splitter, chains: Chains) -> tuple[Segments, dict[int, RowError]]:
    """Cut examples whose prompts and answers are known into segments; errors are keyed by conversation."""
    rendered = chains.rendered if splitter.has_regions else chains.rendered.without_regions()
    pieces = with_answers(pieces_of(rendered), chains)
    segments = splitter.cut(rendered, pieces, PromptEnds(chains, splitter.finder), chains.prompt_ends < 0)
    errors, dropped = find_dropped(rendered)
    of_rows = {note: np.unique(chains.rows[rows]) for note, rows in joined_notes(segments.notes, dropped).items()}
    segments = replace(labelled(segments, chains), notes=joined_notes(of_rows, chains.notes))
    return segments, {int(chains.rows[example]): error for example, error in errors.items()}


class Repeats(Protocol):
    """Finds headers that a message prints once more."""

    def find_repeated(self, data: bytes, later: Pieces) -> Int64: ...


class PromptEnds:
    """Headers that end where the prompt does."""

    def __init__(self, chains: Chains, repeats: Repeats) -> None:
        starts = np.concatenate(([0], chains.rendered.text_ends))[:-1]
        counts = np.diff(chains.rendered.message_offsets)
        self._ends = np.where(chains.prompt_ends >= 0, chains.prompt_ends + np.repeat(starts, counts), -1)
        self._repeats = repeats

    def find(self, regions: Rendered, opening: Pieces, previous: UInt8) -> tuple[Int64, set[int]]:
        """For the first pieces of assistant messages: where headers end."""
        return np.clip(self._ends[opening.numbers], opening.starts, opening.ends), set()

    def find_repeated(self, data: bytes, later: Pieces) -> Int64:
        """For further pieces of messages: behind the prompt, where a header ends that is printed once more."""
        found = self._repeats.find_repeated(data, later)
        return np.clip(np.maximum(found, self._ends[later.numbers]), later.starts, later.ends)


def with_answers(pieces: Pieces, chains: Chains) -> Pieces:
    """Let turns have all that the template prints for them: an end token behind all messages, or a marker that the next
    message prints as soon as there is one. White space is nobody's."""
    rendered = chains.rendered
    text_starts = np.concatenate(([0], rendered.text_ends))[:-1]
    answers = chains.answer_ends[pieces.numbers]
    answers = np.where(answers >= 0, answers + text_starts[pieces.rows], -1)
    last = np.zeros(len(chains.own), np.int64)
    last[pieces.numbers] = np.arange(len(pieces.rows))
    short = (answers > pieces.ends) & (last[pieces.numbers] == np.arange(len(pieces.rows)))
    short &= pieces.roles == Role.ASSISTANT
    if not short.any():
        return pieces
    starts, ends = pieces.starts.copy(), pieces.ends.copy()
    for index in np.flatnonzero(short).tolist():
        end = int(answers[index])
        more = rendered.data[int(ends[index]) : end].strip()
        start, number = int(text_starts[pieces.rows[index]]), int(pieces.numbers[index])
        prompt = rendered.data[start : start + int(chains.prompt_ends[number])]
        if not more or prompt.rstrip().endswith(more):  # some templates end every text like a prompt (Hunyuan)
            continue
        ends[index] = end
        behind = index + 1
        while behind < len(starts) and pieces.rows[behind] == pieces.rows[index] and starts[behind] < end:
            starts[behind], ends[behind] = end, max(int(ends[behind]), end)
            behind += 1
    return pieces._replace(starts=starts, ends=ends)


def labelled(segments: Segments, chains: Chains) -> Segments:
    """Mark what is context; nothing is trained before the prompt's end, nor behind the answer."""
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
    """Of each segment: the number of its message in the batch (-1: none), its example, where it starts."""
    counts = np.diff(segments.offsets)
    examples = np.repeat(np.arange(len(counts)), counts)
    numbers = np.where(segments.messages >= 0, chains.rendered.message_offsets[examples] + segments.messages, -1)
    starts = np.concatenate(([0], segments.ends))[:-1] if len(segments.ends) else segments.ends
    starts = starts.copy()
    starts[segments.offsets[:-1][counts > 0]] = 0
    return numbers, examples, starts


def _split(segments: Segments, chains: Chains, bounds: Int64) -> Segments:
    """Cut assistants' words where a bound of their message lies inside."""
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
        inclusive=inserted(segments.inclusive, np.zeros(len(inside), np.bool_)),
        weights=None if segments.weights is None else inserted(segments.weights, segments.weights[inside]),
    )
