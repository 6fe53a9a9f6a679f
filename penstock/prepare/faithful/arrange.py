"""Arranges the rendered turns of rows into chains.

A chain is kept from the start of a message on at which the tokenizer looks at the text by itself. A turn whose answer
can't be established belongs to no chain, and is noted. Where a turn does not begin with its prompt, the server's prompt
rules: the answer follows it, if all that the prompt has more is a block that it closes itself, such as an empty
`<think>` block. Rows whose turns all stand in their text as it is cost a few numpy passes, others some ten microseconds
a turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.errors import RowError
from penstock.prepare.chat.notes import Note
from penstock.prepare.faithful.chains import Chain, Chains, Own, Places, chain_segments, joined_chains
from penstock.prepare.regions.headers import Boundaries
from penstock.prepare.regions.segments import Segments
from penstock.prepare.regions.splitter import Splitter
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.turns import REFUSED as REFUSED_FLAGS
from penstock.prepare.template.turns import Turns, TurnState

Found = dict[Note, list[int]]
Straddles = Callable[[bytes, bytes], bool]  # of a prompt and its answer
# As plain integers: operators of flags take a microsecond each, several times a turn.
_REFUSED, _CONTINUES, _EXTENDS = REFUSED_FLAGS.value, TurnState.CONTINUES.value, TurnState.EXTENDS.value
_IN_ROOT, _KNOWN, _IS_ROOT = TurnState.IN_ROOT.value, TurnState.KNOWN.value, TurnState.IS_ROOT.value
_USUAL = _CONTINUES | _IN_ROOT
_LINE_ENDS, _BLANKS = b"\n\v\f\r", b"\t\n\v\f\r "
_LOOK_BACK = 4096  # bytes of a prompt that are looked at
_MARKERS = re.compile(rb"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]")
_LAST_BLOCK = re.compile(rb"<\|?([A-Za-z_]{1,40})\|?>[^<>]{0,200}<[/|]?\1\|?>\s*\Z")


class _Turn(NamedTuple):
    """A turn of the table, with its texts."""

    number: int
    message: int
    state: int
    prompt_size: int
    size: int
    flags: int
    common: int  # bytes that it has in common with the root
    cut: int  # where `text` begins
    shared: int  # where `prompt` begins
    text: bytes
    prompt: bytes
    pieces: Places
    spans: Places

    @property
    def own(self) -> Own:
        as_whole = self.state & _IS_ROOT and self.state & _IN_ROOT
        return Own(self.message, self.prompt_size, self.size, -1 if as_whole else self.flags)

    def whole(self, root: Chain) -> Chain:
        """The turn as a chain that shares nothing."""
        if self.state & _IN_ROOT:
            pieces, spans = root.before(self.size)
            return Chain(root.row, root.text[: self.size], pieces, spans, root.known, [self.own])
        pieces = np.concatenate((root.pieces[root.pieces[:, 1] < self.cut], self.pieces))
        spans = np.concatenate((root.spans[root.spans[:, 1] <= self.cut], self.spans))
        known = root.known and bool(self.state & _KNOWN)
        return Chain(root.row, root.text[: self.cut] + self.text, pieces, spans, known, [self.own])


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
        unusual = turns.table[(turns.table[:, 2] & _USUAL) != _USUAL, 0]
        odd = np.union1d(unusual, self._straddling_rows(rendered, turns)).astype(np.int64)
        notes: Found = {}
        made: list[Chain] = []
        if len(odd):
            by_row = _turns_of(turns, set(odd.tolist()))
            for whole in _wholes(rendered, odd):
                made += self._row(whole, by_row[whole.row], notes)
        simple = np.setdiff1d(np.arange(len(rendered.text_ends)), odd)
        return joined_chains(rendered, made, simple, {note: np.unique(rows) for note, rows in notes.items()})

    def _straddling_rows(self, rendered: Rendered, turns: Turns) -> Int64:
        """Rows with a turn in their text as it stands whose first token would take in the prompt's end."""
        table = turns.table[(turns.table[:, 2] & _USUAL) == _USUAL].astype(np.int64)
        rows, text = table[:, 0], np.frombuffer(rendered.data, np.uint8)
        starts = np.concatenate(([0], rendered.text_ends))[:-1][rows]
        seams, ends = starts + table[:, 3], starts + table[:, 4]
        inside = np.flatnonzero((table[:, 3] > 0) & (table[:, 3] < table[:, 4]) & (ends <= rendered.text_ends[rows]))
        doubtful = inside[_may_merge(text[seams[inside] - 1], text[seams[inside]])]
        found: list[int] = []
        for k in doubtful.tolist():
            start, seam, end = int(starts[k]), int(seams[k]), int(ends[k])
            if self._tears(_prompt_end(rendered.data, start, seam), rendered.data[seam:end]):
                found.append(int(rows[k]))
        return np.array(found, np.int64)

    # ---- one row

    def _row(self, whole: Chain, turns: list[_Turn], notes: Found) -> list[Chain]:
        base = next((turn for turn in turns if turn.state & _IS_ROOT), None)
        root = whole
        if base is not None and not base.state & _IN_ROOT:
            known = whole.known and bool(base.state & _KNOWN)
            root = replace(whole, text=base.text, pieces=base.pieces, spans=base.spans, known=known)
            notes.setdefault(Note.TRAILING_MESSAGES, []).append(whole.row)
        if base is not None and not base.state & _CONTINUES:
            joined = self._spliced(base, root)
            if joined is None:
                notes.setdefault(Note.TURN_UNSETTLED, []).append(whole.row)
            elif len(root.text) > base.size:
                notes.setdefault(Note.TRAILING_MESSAGES, []).append(whole.row)
            root = joined or root
        sides: list[Chain] = []
        previous: _Turn | None = None
        for turn in turns:
            if turn.state & _REFUSED:
                notes.setdefault(Note.TURN_REFUSED, []).append(whole.row)
            elif not turn.state & _CONTINUES:
                if turn is not base:
                    self._add_spliced(turn, root, sides, notes)
            elif self._is_torn(turn, root):
                self._add_torn(turn, root, sides, notes)
            elif turn.state & _IN_ROOT or turn is base:
                root.turns.append(turn.own)
            else:
                self._add_side(turn, previous, root, sides)
            previous = turn
        return [*sides, root]

    def _add_side(self, turn: _Turn, previous: _Turn | None, root: Chain, sides: list[Chain]) -> None:
        """A turn that the root does not have: it goes on with the chain before it, or begins one."""
        cut = turn.cut
        known = root.known and bool(turn.state & _KNOWN)
        side = Chain(root.row, turn.text, turn.pieces, turn.spans, known, [turn.own], skipped=cut)
        side.pieces, side.spans = side.moved(-cut)
        last = sides[-1] if sides else None
        follows = last is not None and previous is not None and last.turns[-1].message == previous.message
        if last is not None and follows and turn.state & _EXTENDS and not last.seam and not last.is_spliced:
            side.turns = [*last.turns, turn.own]
            sides.pop()
        side.others = range(side.turns[0].message + 1, turn.message)
        sides.append(self._cut_back(side, root))

    def _add_spliced(self, turn: _Turn, root: Chain, sides: list[Chain], notes: Found) -> None:
        """A turn whose render does not begin with its prompt."""
        chain = turn.whole(root)
        chain.turns = []
        joined = self._spliced(turn, chain)
        if joined is None:
            notes.setdefault(Note.TURN_UNSETTLED, []).append(root.row)
        else:
            seam = joined.turns[-1].prompt_end
            side = self._shortened(joined, root, min(turn.common, turn.shared))
            if self._may_tear and self._is_torn_at(joined.text, seam):
                side = replace(side, seam=seam - side.skipped)
            sides.append(side)

    def _add_torn(self, turn: _Turn, root: Chain, sides: list[Chain], notes: Found) -> None:
        """A chain of its own for a turn that is encoded apart from its prompt."""
        if not self._may_tear:
            notes.setdefault(Note.TURN_STRADDLES, []).append(root.row)
            return
        chain = self._shortened(turn.whole(root), root, min(turn.common, turn.prompt_size))
        sides.append(replace(chain, seam=turn.prompt_size - chain.skipped))

    def _is_torn(self, turn: _Turn, root: Chain) -> bool:
        """Whether the turn's first token would absorb the end of its prompt."""
        if turn.state & _IN_ROOT:
            return self._is_torn_at(root.text[: turn.size], turn.prompt_size)
        first = max(0, min(turn.cut, turn.prompt_size) - _LOOK_BACK)
        return self._is_torn_at(root.text[first : turn.cut] + turn.text, turn.prompt_size - first)

    def _is_torn_at(self, text: bytes, seam: int) -> bool:
        if not 0 < seam < len(text) or (text[seam - 1] in _LINE_ENDS and text[seam] not in _BLANKS):
            return False
        return self._tears(_prompt_end(text, 0, seam), text[seam:])

    def _tears(self, prompt: bytes, answer: bytes) -> bool:
        """Whether the first token of the answer would take in the prompt's end; never at a special token."""
        if self._safe and (prompt.endswith(self._safe) or answer.startswith(self._safe)):
            return False
        return self._straddles(prompt, answer)

    def _spliced(self, turn: _Turn, chain: Chain) -> Chain | None:
        """The server's prompt, then the answer of a turn that does not begin with it; None if it is undetermined."""
        first = chain.pieces[chain.pieces[:, 0] == turn.message]
        if not chain.known or not len(first) or first[0, 1] > turn.shared:
            return None
        start, text = int(first[0, 1]), chain.text[: turn.size]
        prompt = text[: turn.shared] + turn.prompt
        shared = self._boundaries.shared(prompt[start:], text[start:])
        if shared is None:
            shared = _before_block(prompt[start:])
        if shared is None or start + len(shared) > turn.shared or not _is_closed(prompt[start + len(shared) :]):
            return None
        header = start + len(shared) + _repeated_end(prompt[start + len(shared) :], text[start + len(shared) :])
        more = len(prompt) - header
        pieces, spans = chain.before(turn.size)
        behind = (pieces[:, 0] == turn.message) & (pieces[:, 2] >= header)
        pieces[:, 1] += np.where(pieces[:, 1] > header, more, 0).astype(np.int32)
        pieces[:, 2] += np.where(behind | (pieces[:, 2] > header), more, 0).astype(np.int32)
        spans = (spans + np.where(spans >= header, more, 0)).astype(np.int32)
        own = turn.own._replace(prompt_end=len(prompt), answer_end=len(text) + more)
        spliced = replace(chain, text=prompt + text[header:], pieces=pieces, spans=spans, is_spliced=True)
        return replace(spliced, turns=[*chain.turns, own])

    # ---- what is shared

    def _may_share(self, chain: Chain, root: Chain) -> bool:
        return chain.known and root.known and bool(self._safe) and chain.row not in self._apart

    def _shortened(self, chain: Chain, root: Chain, common: int) -> Chain:
        """A chain that is whole, from where it can be cut on: the start of a message in what is in common."""
        starts = chain.pieces[:, 1]
        for cut in reversed(starts[starts <= common].tolist() if self._may_share(chain, root) else []):
            if cut and chain.text.startswith(self._safe, cut) and root.text.startswith(chain.text[:cut]):
                kept = replace(chain, pieces=chain.pieces[starts >= cut], spans=chain.spans[chain.spans[:, 1] > cut])
                pieces, spans = kept.moved(-cut)
                return replace(chain, text=chain.text[cut:], pieces=pieces, spans=spans, skipped=cut)
        return chain

    def _cut_back(self, side: Chain, root: Chain) -> Chain:
        """Move the beginning of a chain back to where the tokenizer can begin, or to the very start."""
        cut, limit = side.skipped, side.turns[0].prompt_end
        may_share = self._may_share(side, root)
        if not cut or (may_share and cut <= limit and side.text.startswith(self._safe)):
            return side
        starts = root.pieces[:, 1]
        earlier = [start for start in starts[starts < cut].tolist() if start <= limit] if may_share else []
        at = next((s for s in reversed(earlier) if s and root.text.startswith(self._safe, s)), 0)
        inside = (starts >= at) & (starts < cut)
        spans = root.spans[(root.spans[:, 1] > at) & (root.spans[:, 1] <= cut)]
        before = replace(root, pieces=root.pieces[inside], spans=spans).moved(-at)
        pieces, spans = (np.concatenate(pair) for pair in zip(before, side.moved(cut - at), strict=True))
        return replace(side, text=root.text[at:cut] + side.text, pieces=pieces, spans=spans, skipped=at)


def _turns_of(turns: Turns, rows: set[int]) -> dict[int, list[_Turn]]:
    """The turns of some rows, in the order of their messages."""
    found: dict[int, list[_Turn]] = {row: [] for row in rows}
    kept, kept_prompt = (sizes.tolist() for sizes in turns.kept)
    numbers = np.arange(len(turns.table) + 1)
    piece_ends = np.searchsorted(turns.pieces[:, 0], numbers).tolist()
    span_ends = np.searchsorted(turns.spans[:, 0], numbers).tolist()
    at = 0
    for number, (row, *fields) in enumerate(turns.table.tolist()):
        middle, end = at + kept[number], at + kept[number] + kept_prompt[number]
        if row in found:
            pieces = turns.pieces[piece_ends[number] : piece_ends[number + 1], 1:]
            spans = turns.spans[span_ends[number] : span_ends[number + 1], 1:]
            texts = turns.data[at:middle], turns.data[middle:end]
            found[row].append(_Turn._make((number, *fields, *texts, pieces, spans)))
        at = end
    for own in found.values():
        own.sort(key=lambda turn: turn.message)
    return found


def _wholes(rendered: Rendered, rows: Int64) -> list[Chain]:
    """Rows as they were rendered whole."""
    every = np.arange(len(rendered.text_ends) + 1)
    piece_ends = np.searchsorted(rendered.piece_rows, every).tolist()
    span_ends = np.searchsorted(rendered.span_rows, every).tolist()
    found = []
    for row in rows.tolist():
        start, end = int(rendered.text_ends[row - 1]) if row else 0, int(rendered.text_ends[row])
        own, spans = slice(*piece_ends[row : row + 2]), slice(*span_ends[row : row + 2])
        pieces = rendered.piece_messages[own], rendered.piece_starts[own] - start, rendered.piece_ends[own] - start
        blocks = rendered.span_starts[spans] - start, rendered.span_ends[spans] - start
        known = bool(rendered.known[row])
        found.append(
            Chain(row, rendered.data[start:end], _stacked(*pieces), _stacked(*blocks), known, [], is_root=True)
        )
    return found


def _stacked(*columns: npt.NDArray[Any]) -> Places:
    return np.stack(columns, axis=1).astype(np.int32)


def _prompt_end(text: bytes, start: int, seam: int) -> bytes:
    """The last bytes of the prompt that ends at a seam, from a whole character on."""
    first = max(start, seam - _LOOK_BACK)
    while first < seam and text[first] & 0xC0 == 0x80:
        first += 1
    return text[first:seam]


def _may_merge(last: Any, first: Any) -> Any:
    """Whether a tokenizer may see two neighbouring bytes as one: hardly where a line ends before visible text."""
    blank = (first == 32) | ((first >= 9) & (first <= 13))
    return np.where((last >= 10) & (last <= 13), blank, True)


def _before_block(prompt: bytes) -> bytes | None:
    """What precedes the block that ends a prompt, such as `<|channel>thought\\n<channel|>`; None if none does."""
    block = _LAST_BLOCK.search(prompt)
    return prompt[: block.start()] if block else None


def _repeated_end(block: bytes, answer: bytes) -> int:
    """The size of a closing marker that an answer repeats although its prompt ends with it (DeepSeek-V3.2)."""
    last = block.rstrip()
    found = _MARKERS.match(answer)
    return found.end() if found and last.endswith(found.group()) else 0


def _is_closed(prompt: bytes) -> bool:
    """Whether all that a prompt opens it closes: `<think></think>` does, `<think>` does not."""
    if not prompt.strip():
        return True
    depth: Counter[bytes] = Counter()
    for found in _MARKERS.finditer(prompt):
        marker = found.group()
        name = re.sub(rb"[^A-Za-z_]", b"", marker)
        closes = marker.startswith((b"</", b"[/")) or (marker.endswith(b"|>") and not marker.startswith(b"<|"))
        depth[name] += -1 if closes else 1
        if depth[name] < 0:
            return False
    return bool(depth) and not any(depth.values())


# ---- chain segments --------------------------------------------------------------------------------------------------
#
# Turns rendered as inference sees them, arranged into examples and cut into segments.


class ChainSegments(NamedTuple):
    """Dataset to encode. Each text begins where the example departs from the last one of its row, the root."""

    texts: list[bytes]
    segments: Segments
    rows: Int64  # the conversation of each example
    order: Int64  # the position of each example within its row
    heads: Int64  # how many leading segments each example shares with the root
    seams: Int64  # where a text is split for encoding; 0 if it is not
    errors: dict[int, RowError]  # by conversation


def split_chains(arranger: Arranger, splitter: Splitter, rendered: Rendered) -> ChainSegments:
    """Arranges the turns of a batch into examples, and cuts them into segments."""
    chains = arranger.arrange(rendered)
    segments, errors = chain_segments(splitter, chains)
    heads, misaligned = _heads(chains, segments)
    if misaligned:
        chains = arranger.arrange(rendered, frozenset(misaligned))
        segments, errors = chain_segments(splitter, chains)
        heads, _ = _heads(chains, segments)  # examples that share nothing can't be misaligned
    order = np.arange(len(chains.rows)) - np.searchsorted(chains.rows, chains.rows)
    seams = np.where(segments.known, chains.seams, 0)
    return ChainSegments(chains.rendered.texts, segments, chains.rows, order, heads, seams, errors)


def _heads(chains: Chains, segments: Segments) -> tuple[Int64, set[int]]:
    """The number of leading segments each example shares with its root, and the rows where no segment ends there."""
    heads, misaligned = np.zeros(len(chains.rows), np.int64), set[int]()
    roots = np.searchsorted(chains.rows, chains.rows, side="right") - 1
    for example in np.flatnonzero(chains.skipped).tolist():
        first, last = segments.offsets[roots[example] : roots[example] + 2].tolist()
        count = int(np.searchsorted(segments.ends[first:last], chains.skipped[example], side="right"))
        if not count or segments.ends[first + count - 1] != chains.skipped[example]:
            misaligned.add(int(chains.rows[example]))
        heads[example] = count
    return heads, misaligned
