"""Chains: the examples of a row in which every assistant turn stands in the context that inference shows.

The root of a row holds all turns that the template does not rewrite later on. Of the others, those whose renders extend
each other share a chain; a chain begins like the root, and only what follows is kept: from the start of a message on at
which the tokenizer looks at the text by itself. A turn belongs to one example and is context in all others. A turn
whose answer can't be established belongs to none, and is noted.

Where a turn does not begin with its prompt, the server's prompt rules: the answer follows it, if all that the prompt
has more is a block that it closes itself, such as an empty `<think>` block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bool, Int64
from penstock.chat.conversation import Role
from penstock.chat.notes import Note
from penstock.regions.headers import Boundaries
from penstock.regions.segments import gathered
from penstock.template.rendered import MessageFlag, Rendered
from penstock.template.turns import REFUSED, Turns, TurnState

Straddles = Callable[[bytes, bytes], bool]


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
    pieces: npt.NDArray[np.int32]  # message, start, end in `text`
    spans: npt.NDArray[np.int32]  # start, end in `text`
    known: bool
    turns: list[Own]
    skipped: int = 0
    seam: int = 0  # where in `text` it must be encoded in two parts; 0: nowhere
    is_root: bool = False
    others: range = range(0)  # messages of others that belong to it


class _Turn(NamedTuple):
    number: int
    message: int
    state: int
    prompt_size: int
    size: int
    flags: int
    common: int
    cut: int
    shared: int
    text: bytes  # from `cut` on
    prompt: bytes  # from `shared` on


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
    notes: Counter[str] = field(default_factory=Counter)


class Arranger:
    """Arranges rendered turns into examples."""

    def __init__(
        self, boundaries: Boundaries, safe_tokens: Sequence[str], straddles: Straddles, *, may_tear: bool
    ) -> None:
        """`safe_tokens` are those at which a text can be cut without changing any token; `straddles` says whether an
        answer's first token would take in its prompt's end, and `may_tear` whether both can be encoded apart."""
        self._boundaries, self._straddles, self._may_tear = boundaries, straddles, may_tear
        self._safe = tuple(token.encode() for token in safe_tokens)
        self._apart: frozenset[int] = frozenset()

    def arrange(self, rendered: Rendered, apart: frozenset[int] = frozenset()) -> Chains:
        """The examples of a batch, rows in order; the root is the last one of its row. Those `apart` share nothing."""
        self._apart = apart
        turns = rendered.turns
        assert turns is not None
        states = turns.table[:, 2]
        usual = (TurnState.CONTINUES | TurnState.IN_ROOT).value
        odd = np.union1d(turns.table[(states & usual) != usual, 0], self._straddling_rows(rendered, turns))
        notes: Counter[str] = Counter()
        made = self._rows(rendered, turns, odd.tolist(), notes)
        simple = np.ones(len(rendered.text_ends), np.bool_)
        simple[odd] = False
        rows = np.concatenate((np.flatnonzero(simple), np.array([chain.row for chain in made], np.int64)))
        order = np.argsort(rows, kind="stable")
        return self._batch(rendered, turns, made, rows[order], order, np.flatnonzero(simple), notes)

    def _straddling_rows(self, rendered: Rendered, turns: Turns) -> Int64:
        """Rows with a turn in their text as it stands whose first token would take in the prompt's end."""
        usual = (TurnState.CONTINUES | TurnState.IN_ROOT).value
        table = turns.table[(turns.table[:, 2] & usual) == usual].astype(np.int64)
        if not len(table):
            return np.empty(0, np.int64)
        starts = np.concatenate(([0], rendered.text_ends))[:-1]
        low, seams, ends = starts[table[:, 0]], starts[table[:, 0]] + table[:, 3], starts[table[:, 0]] + table[:, 4]
        inside = (table[:, 3] > 0) & (table[:, 3] < table[:, 4]) & (seams < rendered.text_ends[table[:, 0]])
        text = np.frombuffer(rendered.data, np.uint8)
        at = np.where(inside, seams, 1)
        doubtful = inside & _may_merge(text[at - 1], text[at]) if len(text) > 1 else inside
        return table[
            [
                k
                for k in np.flatnonzero(doubtful).tolist()
                if self._straddles(
                    rendered.data[max(low[k], seams[k] - 4096) : seams[k]], rendered.data[seams[k] : ends[k]]
                )
            ],
            0,
        ]

    # ---- one row

    def _rows(self, rendered: Rendered, turns: Turns, odd: list[int], notes: Counter[str]) -> list[Chain]:
        """The chains of rows that are not their own root as they stand."""
        if not odd:
            return []
        found: dict[int, list[_Turn]] = {row: [] for row in odd}
        kept, kept_prompt = (sizes.tolist() for sizes in turns.kept)
        at = 0
        for number, fields in enumerate(turns.table.tolist()):
            row, message, state, prompt_size, size, flags, common, cut, shared = fields
            if row in found:
                middle, end = at + kept[number], at + kept[number] + kept_prompt[number]
                texts = turns.data[at:middle], turns.data[middle:end]
                found[row].append(_Turn(number, message, state, prompt_size, size, flags, common, cut, shared, *texts))
            at += kept[number] + kept_prompt[number]
        piece_ends = np.searchsorted(turns.pieces[:, 0], np.arange(len(turns.table) + 1))
        span_ends = np.searchsorted(turns.spans[:, 0], np.arange(len(turns.table) + 1))
        row_pieces = np.searchsorted(rendered.piece_rows, np.arange(len(rendered.text_ends) + 1))
        row_spans = np.searchsorted(rendered.span_rows, np.arange(len(rendered.text_ends) + 1))
        made: list[Chain] = []
        for row, own in found.items():
            start = int(rendered.text_ends[row - 1]) if row else 0
            pieces, spans = slice(*row_pieces[row : row + 2].tolist()), slice(*row_spans[row : row + 2].tolist())
            whole = Chain(
                row,
                rendered.data[start : int(rendered.text_ends[row])],
                _stacked(rendered.piece_messages[pieces], rendered.piece_starts[pieces] - start, rendered.piece_ends[pieces] - start),
                _stacked(rendered.span_starts[spans] - start, rendered.span_ends[spans] - start),
                bool(rendered.known[row]),
                [],
                is_root=True,
            )  # fmt: skip
            details = {
                turn.number: (
                    turns.pieces[piece_ends[turn.number] : piece_ends[turn.number + 1], 1:],
                    turns.spans[span_ends[turn.number] : span_ends[turn.number + 1], 1:],
                )
                for turn in own
            }
            made += self._row(whole, sorted(own, key=lambda turn: turn.message), details, notes)
        return made

    def _row(self, whole: Chain, turns: list[_Turn], details: dict[int, Any], notes: Counter[str]) -> list[Chain]:
        base = next((turn for turn in turns if turn.state & TurnState.IS_ROOT), None)
        if base is not None and not base.state & TurnState.IN_ROOT:
            pieces, spans = details[base.number]
            known = whole.known and bool(base.state & TurnState.KNOWN)
            root = replace(whole, text=base.text, pieces=pieces, spans=spans, known=known)
            notes[Note.TRAILING_MESSAGES.value] += 1
        else:
            root = whole
        spliced: set[int] = set()
        if base is not None and not base.state & TurnState.CONTINUES:
            joined = self._spliced(root.text[: base.size], base, root)
            if joined is None:
                notes[Note.TURN_UNSETTLED.value] += 1
            else:
                root = joined
            spliced.add(base.number)
        sides: list[Chain] = []
        for turn in turns:
            if turn.state & REFUSED:
                notes[Note.TURN_REFUSED.value] += 1
            elif turn.number in spliced:
                continue
            elif turn.state & TurnState.CONTINUES and self._is_torn(turn, root):
                self._add_torn(turn, root, sides, details, notes)
            elif turn.state & TurnState.IN_ROOT and turn.state & TurnState.CONTINUES:
                root.turns.append(_own(turn))
            else:
                self._add_side(turn, turns, root, sides, details, notes)
        return [*sides, root]

    def _add_side(
        self, turn: _Turn, turns: list[_Turn], root: Chain, sides: list[Chain], details: dict[int, Any], notes: Counter[str]
    ) -> None:  # fmt: skip
        own = _own(turn)
        in_root = bool(turn.state & TurnState.IN_ROOT)
        pieces, spans = (root.pieces, root.spans) if in_root else details[turn.number]
        known = root.known and (in_root or bool(turn.state & TurnState.KNOWN))
        cut = 0 if in_root else turn.cut
        text = root.text[: turn.size] if in_root else turn.text
        if not turn.state & TurnState.CONTINUES:
            whole = text if in_root else root.text[:cut] + text
            before = root.pieces[root.pieces[:, 1] < cut]
            side = Chain(root.row, whole, np.concatenate((before, pieces)), spans, known, [])
            joined = self._spliced(whole, turn, side)
            if joined is None:
                notes[Note.TURN_UNSETTLED.value] += 1
            else:
                joined.others = range(turn.message, turn.message)
                sides.append(self._shortened(joined, root, min(cut, turn.common)))
            return
        side = Chain(root.row, text, pieces - [0, cut, cut], spans - cut, known, [own], skipped=cut)
        before = [other.message for other in turns if other.message < turn.message]
        last = sides[-1] if sides else None
        if turn.state & TurnState.EXTENDS and last is not None and before and last.turns[-1].message == before[-1]:
            side.turns = [*last.turns, own]
            sides.pop()
        side.others = range(side.turns[0].message + 1, turn.message)
        sides.append(self._cut_back(side, root))

    def _is_torn(self, turn: _Turn, root: Chain) -> bool:
        """Whether the turn's first token would take in the end of its prompt."""
        text = root.text[: turn.size] if turn.state & TurnState.IN_ROOT else root.text[: turn.cut] + turn.text
        seam = turn.prompt_size
        if not 0 < seam < len(text) or not _may_merge(np.uint8(text[seam - 1]), np.uint8(text[seam])):
            return False
        return self._straddles(text[max(0, seam - 4096) : seam], text[seam:])

    def _add_torn(
        self, turn: _Turn, root: Chain, sides: list[Chain], details: dict[int, Any], notes: Counter[str]
    ) -> None:
        """A chain of its own for a turn that is encoded apart from its prompt."""
        if not self._may_tear:
            notes[Note.TURN_STRADDLES.value] += 1
            return
        if turn.state & TurnState.IN_ROOT:
            text, known, spans = root.text[: turn.size], root.known, root.spans[root.spans[:, 0] < turn.size]
            pieces = root.pieces[root.pieces[:, 1] < turn.size].copy()
            pieces[:, 2] = np.minimum(pieces[:, 2], turn.size)
        else:
            own, spans = details[turn.number]
            text, known = root.text[: turn.cut] + turn.text, root.known and bool(turn.state & TurnState.KNOWN)
            pieces = np.concatenate((root.pieces[root.pieces[:, 1] < turn.cut], own))
        chain = Chain(root.row, text, pieces, np.minimum(spans, turn.size), known, [_own(turn)])
        chain = self._shortened(chain, root, min(turn.common, turn.prompt_size))
        sides.append(replace(chain, seam=turn.prompt_size - chain.skipped))

    def _spliced(self, turn_text: bytes, turn: _Turn, chain: Chain) -> Chain | None:
        """The server's prompt, then the answer of a turn that does not begin with it; None: it can't be told."""
        own = chain.pieces[chain.pieces[:, 0] == turn.message]
        if not chain.known or not len(own):
            return None
        start = int(own[0, 1])
        prompt = turn_text[: turn.shared] + turn.prompt
        if start > turn.shared:
            return None
        shared = self._boundaries.shared(prompt[start:], turn_text[start:])
        if shared is None:
            return None
        header = start + len(shared)
        if header > turn.shared or not _is_closed(prompt[header:]):
            return None
        more = len(prompt) - header
        pieces = chain.pieces[chain.pieces[:, 1] < turn.size].copy()
        pieces[:, 2] = np.minimum(pieces[:, 2], turn.size)
        pieces[:, 1] += np.where(pieces[:, 1] > header, more, 0)
        pieces[:, 2] += np.where(pieces[:, 2] >= header, more, 0)
        pieces[(pieces[:, 0] != turn.message) & (pieces[:, 2] == header + more), 2] = header
        spans = chain.spans[chain.spans[:, 0] < turn.size] + np.where(
            chain.spans[chain.spans[:, 0] < turn.size] >= header, more, 0
        )
        text = prompt + turn_text[header:]
        return replace(chain, text=text, pieces=pieces, spans=spans, turns=[*chain.turns, _own(turn)._replace(prompt_end=len(prompt), answer_end=len(text))])  # fmt: skip

    def _shortened(self, chain: Chain, root: Chain, common: int) -> Chain:
        """A chain that is whole, from where it can be cut on."""
        starts = chain.pieces[:, 1]
        if chain.row in self._apart or not root.known or not self._safe:
            return chain
        for cut in reversed([int(s) for s in starts[starts <= common].tolist()]):
            if cut and chain.text.startswith(self._safe, cut) and chain.text[:cut] == root.text[:cut]:
                keep = chain.pieces[starts >= cut] - [0, cut, cut]
                spans = chain.spans[chain.spans[:, 1] > cut] - cut
                return replace(chain, text=chain.text[cut:], pieces=keep, spans=spans, skipped=cut)
        return chain

    def _cut_back(self, side: Chain, root: Chain) -> Chain:
        """Move the beginning of a chain back to where the tokenizer can begin, or to the very start."""
        cut, limit = side.skipped, side.turns[0].prompt_end
        may_share = side.known and root.known and bool(self._safe) and side.row not in self._apart
        if not cut or (may_share and cut <= limit and side.text.startswith(self._safe)):
            return side
        starts = root.pieces[:, 1]
        earlier = [int(s) for s in starts[starts < cut].tolist() if s <= limit] if may_share else []
        at = next((s for s in reversed(earlier) if s and root.text.startswith(self._safe, s)), 0)
        between = root.pieces[(starts >= at) & (starts < cut)] - [0, at, at]
        pieces = np.concatenate((between, side.pieces + [0, cut - at, cut - at])).astype(np.int32)
        earlier_spans = root.spans[(root.spans[:, 1] > at) & (root.spans[:, 1] <= cut)] - at
        spans = np.concatenate((earlier_spans, side.spans + (cut - at))).astype(np.int32)
        return replace(side, text=root.text[at:cut] + side.text, pieces=pieces, spans=spans, skipped=at)

    # ---- the batch

    def _batch(
        self, rendered: Rendered, turns: Turns, made: list[Chain], rows: Int64, order: Int64, simple: Int64, notes: Counter[str]
    ) -> Chains:  # fmt: skip
        """All examples as one batch: those of simple rows are their texts as they stand."""
        count = len(simple)
        starts = np.concatenate(([0], rendered.text_ends))[:-1]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))  # of the simple rows, then of the chains made
        if made:
            whole = rendered.texts
            texts = [whole[row] for row in simple.tolist()] + [chain.text for chain in made]
            texts = [texts[k] for k in order.tolist()]
            data, text_ends = b"".join(texts), np.cumsum([len(text) for text in texts])
        else:
            data, text_ends = rendered.data, rendered.text_ends
        text_starts = np.concatenate(([0], text_ends))[:-1]
        to = np.full(len(rendered.text_ends), -1, np.int64)
        to[simple] = place[:count]
        pieces = _moved(
            to,
            starts,
            text_starts,
            rendered.piece_rows,
            rendered.piece_messages,
            rendered.piece_starts,
            rendered.piece_ends,
        )
        spans = _moved(
            to, starts, text_starts, rendered.span_rows, rendered.span_rows, rendered.span_starts, rendered.span_ends
        )
        if made:
            pieces = _with(pieces, [(c.known, c.pieces) for c in made], place[count:], text_starts)
            spans = _with(
                spans, [(c.known, np.pad(c.spans, ((0, 0), (1, 0)))) for c in made], place[count:], text_starts
            )
        known = np.empty(len(rows), np.bool_)
        known[place[:count]] = rendered.known[simple]
        known[place[count:]] = [chain.known for chain in made]
        messages, offsets = gathered(rendered.message_offsets, rows)
        batch = replace(
            rendered, data=data, text_ends=text_ends, known=known,
            piece_rows=pieces[0].astype(np.int32), piece_messages=pieces[1].astype(np.int32),
            piece_starts=pieces[2], piece_ends=pieces[3],
            span_rows=spans[0].astype(np.int32), span_starts=spans[2], span_ends=spans[3],
            message_offsets=offsets, message_roles=rendered.message_roles[messages],
            message_flags=rendered.message_flags[messages],
            message_weights=None if rendered.message_weights is None else rendered.message_weights[messages],
            special={}, notes={}, errors={}, turns=None,
        )  # fmt: skip
        skipped = np.zeros(len(rows), np.int64)
        skipped[place[count:]] = [chain.skipped for chain in made]
        seams = np.zeros(len(rows), np.int64)
        seams[place[count:]] = [chain.seam if chain.known else 0 for chain in made]
        own = np.ones(len(messages), np.bool_)
        ends = np.full((2, len(messages)), -1, np.int64)
        table = turns.table[to[turns.table[:, 0]] >= 0].astype(np.int64)
        at = offsets[to[table[:, 0]]] + table[:, 1]
        ends[0, at], ends[1, at] = table[:, 3], table[:, 4]
        flags = batch.message_flags.copy()
        for chain, example in zip(made, place[count:].tolist(), strict=True):
            _mark(chain, slice(int(offsets[example]), int(offsets[example + 1])), own, ends, flags)
        _mark_roots(made, place[count:].tolist(), offsets, own, batch.message_roles)
        own &= (batch.message_roles != Role.ASSISTANT) | (ends[0] >= 0)
        flags[~own & (batch.message_roles != Role.SYSTEM)] = MessageFlag.CONTENT_PRINTED
        batch = replace(batch, message_flags=flags)
        return Chains(batch, rows, skipped, seams, own, ends[0], ends[1], notes)


def _own(turn: _Turn) -> Own:
    as_whole = turn.state & TurnState.IS_ROOT and turn.state & TurnState.IN_ROOT
    return Own(turn.message, turn.prompt_size, turn.size, -1 if as_whole else turn.flags)


def _mark(chain: Chain, place: slice, own: Bool, ends: Int64, flags: npt.NDArray[np.uint8]) -> None:
    """What belongs to one chain: its turns, and the messages between them."""
    first = place.start
    if not chain.is_root:
        own[place] = False
        flags[place] = MessageFlag.CONTENT_PRINTED
    own[[first + message for message in chain.others]] = True
    for turn in chain.turns:
        own[first + turn.message] = True
        ends[:, first + turn.message] = turn.prompt_end - chain.skipped, turn.answer_end - chain.skipped
        if turn.flags >= 0:
            flags[first + turn.message] = turn.flags


def _mark_roots(made: list[Chain], places: list[int], offsets: Int64, own: Bool, roles: npt.NDArray[np.uint8]) -> None:
    """What belongs to another chain of the row does not belong to its root."""
    taken: dict[int, list[range]] = {}
    for number, (chain, example) in enumerate(zip(made, places, strict=True)):
        is_root = number + 1 == len(made) or made[number + 1].row != chain.row
        if not is_root:
            taken.setdefault(chain.row, []).append(chain.others)
            continue
        first = int(offsets[example])
        for others in taken.pop(chain.row, []):
            own[[first + m for m in others if roles[first + m] != Role.ASSISTANT]] = False


def _stacked(*columns: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.stack(columns, axis=1).astype(np.int32)


_Moved = tuple[Int64, Int64, Int64, Int64]


def _moved(
    to: Int64, old: Int64, new: Int64, rows: npt.NDArray[Any], messages: npt.NDArray[Any], starts: Int64, ends: Int64
) -> _Moved:
    """The pieces of texts that are elsewhere now, and of no others."""
    keep = to[rows] >= 0
    rows, places = rows[keep], to[rows[keep]]
    shift = new[places] - old[rows]
    return places, messages[keep].astype(np.int64), starts[keep] + shift, ends[keep] + shift


def _with(found: _Moved, more: list[tuple[bool, npt.NDArray[Any]]], places: Int64, text_starts: Int64) -> _Moved:
    """The pieces of chains added, all in order."""
    counts = [len(pieces) if known else 0 for known, pieces in more]
    rows = np.repeat(places, counts)
    added = np.concatenate([np.zeros((0, 3), np.int64), *(pieces for known, pieces in more if known)]).astype(np.int64)
    columns = (rows, added[:, 0], added[:, 1] + text_starts[rows], added[:, 2] + text_starts[rows])
    joined = [np.concatenate(pair) for pair in zip(found, columns, strict=True)]
    order = np.lexsort((joined[3], joined[2], joined[0]))
    rows, messages, starts, ends = (column[order] for column in joined)
    return rows, messages, starts, ends


def _may_merge(last: Any, first: Any) -> Any:
    """Whether a tokenizer may see two neighbouring bytes as one: all but a line's end or a marker before a visible
    character."""
    blank = (first == 32) | ((first >= 9) & (first <= 13))
    ends_line, ends_marker = (last >= 10) & (last <= 13), last == 62
    return np.where(ends_marker | ends_line, blank & ~ends_marker, True) & (first != 60)


def _is_closed(prompt: bytes) -> bool:
    """Whether all that a prompt opens it closes: `<think></think>` does, `<think>` does not."""
    if not prompt.strip():
        return True
    depth: Counter[bytes] = Counter()
    for marker in _markers(prompt):
        name = re.sub(rb"[^A-Za-z_]", b"", marker)
        closes = marker.startswith((b"</", b"[/")) or (marker.endswith(b"|>") and not marker.startswith(b"<|"))
        depth[name] += -1 if closes else 1
        if depth[name] < 0:
            return False
    return not any(depth.values()) and bool(depth)


def _markers(prompt: bytes) -> Iterator[bytes]:
    return (found.group() for found in re.finditer(rb"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]", prompt))
