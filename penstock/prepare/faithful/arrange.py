"""Arranges the rendered turns of rows into chains.

A chain is stored from the start of a message at which the tokenizer starts afresh. A turn whose answer is undetermined
belongs to no chain, and is noted. If a turn does not begin with its prompt, we use the server's prompt, followed by the
answer, provided that whatever the prompt adds is a closed block, such as an empty `<think>` block. Rows whose turns all
begin with their prompts take a few numpy passes (`sides`), others about ten microseconds per turn.
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
from penstock.prepare.faithful.chains import (
    Chain,
    Chains,
    ChainTable,
    OwnTurn,
    Places,
    chain_segments,
    joined_chains,
)
from penstock.prepare.faithful.sides import side_chains, with_roots
from penstock.prepare.regions.headers import Boundaries
from penstock.prepare.regions.segments import Segments
from penstock.prepare.regions.splitter import Splitter
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.turns import REFUSED as REFUSED_FLAGS
from penstock.prepare.template.turns import FieldColumn, SpanColumn, TagColumn, TurnColumn, Turns, TurnState

Found = dict[Note, list[int]]
Straddles = Callable[[bytes, bytes], bool]  # takes a prompt and its answer
# Plain integers, because operators of flags take a microsecond each, several times a turn.
_REFUSED, _CONTINUES, _EXTENDS = REFUSED_FLAGS.value, TurnState.CONTINUES.value, TurnState.EXTENDS.value
_IN_ROOT, _KNOWN, _IS_ROOT = TurnState.IN_ROOT.value, TurnState.KNOWN.value, TurnState.IS_ROOT.value
_ROW, _STATE = TurnColumn.ROW.value, TurnColumn.STATE.value
_PROMPT_SIZE, _SIZE = TurnColumn.PROMPT_SIZE.value, TurnColumn.SIZE.value
_MESSAGE, _START, _END = SpanColumn.MESSAGE.value, SpanColumn.START.value, SpanColumn.END.value
_TAG_START, _TAG_END = TagColumn.START.value, TagColumn.END.value
_OF_ROOT = _IN_ROOT | _IS_ROOT
_LINE_ENDS, _BLANKS = b"\n\v\f\r", b"\t\n\v\f\r "
_LOOK_BACK = 4096  # bytes at the end of a prompt that decide its last tokens
_MARKERS = re.compile(rb"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,40}\]")
_LAST_BLOCK = re.compile(rb"<\|?([A-Za-z_]{1,40})\|?>[^<>]{0,200}<[/|]?\1\|?>\s*\Z")


class _Turn(NamedTuple):
    """A turn: its number, the columns of `TurnColumn` after the first, and its texts."""

    number: int
    message: int
    state: int
    prompt_size: int
    size: int
    flags: int
    common: int  # size of the prefix that it shares with the root
    cut: int  # where `text` begins
    shared: int  # where `prompt` begins
    text: bytes
    prompt: bytes
    spans: Places  # `SpanColumn`
    tags: Places  # `TagColumn`
    fields: Places  # `FieldColumn`

    @property
    def own(self) -> OwnTurn:
        as_whole = self.state & _IS_ROOT and self.state & _IN_ROOT
        return OwnTurn(self.message, self.prompt_size, self.size, -1 if as_whole else self.flags)

    def whole(self, root: Chain) -> Chain:
        """The turn as a chain that shares nothing."""
        if self.state & _IN_ROOT:
            return Chain(root.row, root.text[: self.size], *root.before(self.size), root.known, [self.own])
        spans = np.concatenate((root.spans[root.spans[:, _START] < self.cut], self.spans))
        tags = np.concatenate((root.tags[root.tags[:, _TAG_END] <= self.cut], self.tags))
        fields = np.concatenate((root.fields[root.fields[:, _START] < self.cut], self.fields))
        known = root.known and bool(self.state & _KNOWN)
        return Chain(root.row, root.text[: self.cut] + self.text, spans, tags, fields, known, [self.own])


class Arranger:
    """Arranges rendered turns into examples."""

    def __init__(
        self, boundaries: Boundaries, safe_tokens: Sequence[str], straddles: Straddles, *, may_tear: bool
    ) -> None:
        """A text can be cut at `safe_tokens` without changing any token. `straddles` tells whether an answer's first
        token would absorb the end of its prompt, `may_tear` whether prompt and answer can be encoded separately."""
        self._boundaries, self._straddles, self._may_tear = boundaries, straddles, may_tear
        self._safe = tuple(token.encode() for token in safe_tokens)
        self._apart: frozenset[int] = frozenset()

    def arrange(self, rendered: Rendered, apart: frozenset[int] = frozenset()) -> Chains:
        """The examples of a batch in row order, the root last in its row. Examples of rows in `apart` share nothing."""
        self._apart = apart
        turns = rendered.turns
        assert turns is not None
        every, states = turns.table[:, _ROW], turns.table[:, _STATE]
        roots = with_roots(rendered)
        odd = np.union1d(every[(states & _CONTINUES) == 0], self._straddling_rows(roots, turns))
        rewritten = np.setdiff1d(every[(states & _OF_ROOT) == 0], odd)
        sides = side_chains(roots, rewritten, self._safe, apart)
        torn = self._straddling_sides(sides)
        if len(torn):
            odd = np.union1d(odd, torn)
            sides = side_chains(roots, np.setdiff1d(rewritten, torn), self._safe, apart)
        trailing = every[(states & (_IS_ROOT | _IN_ROOT)) == _IS_ROOT]
        notes: Found = {Note.TRAILING_MESSAGES: np.setdiff1d(trailing, odd).tolist()} if len(trailing) else {}
        made: list[Chain] = []
        if len(odd):
            by_row = _turns_of(turns, set(odd.tolist()))
            for whole in _wholes(rendered, odd.astype(np.int64)):
                made += self._row(whole, by_row[whole.row], notes)
        simple = np.setdiff1d(np.arange(len(rendered.text_ends)), odd)
        table = sides.followed_by(ChainTable.of(made)) if made else sides
        return joined_chains(roots, table, simple, {note: np.unique(rows) for note, rows in notes.items() if rows})

    def _straddling_rows(self, roots: Rendered, turns: Turns) -> Int64:
        """Rows with a turn in their root whose first token would absorb the end of its prompt."""
        states = turns.table[:, _STATE]
        table = turns.table[((states & _OF_ROOT) > 0) & ((states & _CONTINUES) > 0)].astype(np.int64)
        rows = table[:, _ROW]
        starts = np.concatenate(([0], roots.text_ends))[:-1][rows]
        torn = self._are_torn(roots.data, starts, starts + table[:, _PROMPT_SIZE], starts + table[:, _SIZE])
        found: Int64 = rows[torn]
        return found

    def _straddling_sides(self, sides: ChainTable) -> Int64:
        """Rows with such a turn in one of these chains."""
        examples, _, prompt_ends, answer_ends, _ = sides.turns.T
        starts = np.cumsum([0, *map(len, sides.texts)])[examples]
        origins = starts - sides.skipped[examples]
        torn = self._are_torn(b"".join(sides.texts), starts, origins + prompt_ends, origins + answer_ends)
        return np.unique(sides.rows[examples[torn]])

    def _are_torn(self, data: bytes, starts: Int64, seams: Int64, ends: Int64) -> Int64:
        """The numbers of the answers data[seam:end] whose first token would absorb the end of its prompt, which is
        data[start:seam]."""
        text = np.frombuffer(data, np.uint8)
        inside = np.flatnonzero((seams > starts) & (seams < ends))
        doubtful = inside[_may_merge(text[seams[inside] - 1], text[seams[inside]])]
        places = zip(starts[doubtful].tolist(), seams[doubtful].tolist(), ends[doubtful].tolist(), strict=True)
        is_torn = [
            not (data.startswith(self._safe, seam, end) or data.endswith(self._safe, start, seam))
            and self._straddles(_prompt_end(data, start, seam), data[seam:end])
            for start, seam, end in places
        ]
        torn: Int64 = doubtful[np.array(is_torn, np.bool_)]
        return torn

    # ---- one row

    def _row(self, whole: Chain, turns: list[_Turn], notes: Found) -> list[Chain]:
        base = next((turn for turn in turns if turn.state & _IS_ROOT), None)
        root = whole
        if base is not None and not base.state & _IN_ROOT:
            known = whole.known and bool(base.state & _KNOWN)
            root = replace(whole, text=base.text, spans=base.spans, tags=base.tags, fields=base.fields, known=known)
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
        """Adds a turn that the root lacks: it extends the previous chain, or begins one."""
        cut = turn.cut
        known = root.known and bool(turn.state & _KNOWN)
        side = Chain(root.row, turn.text, turn.spans, turn.tags, turn.fields, known, [turn.own], skipped=cut)
        side.spans, side.tags, side.fields = side.moved(-cut)
        last = sides[-1] if sides else None
        follows = last is not None and previous is not None and last.turns[-1].message == previous.message
        if last is not None and follows and turn.state & _EXTENDS and not last.seam and not last.is_spliced:
            side.turns = [*last.turns, turn.own]
            sides.pop()
        side.others = range(side.turns[0].message + 1, turn.message)
        sides.append(self._cut_back(side, root))

    def _add_spliced(self, turn: _Turn, root: Chain, sides: list[Chain], notes: Found) -> None:
        """Adds a turn whose render does not begin with its prompt."""
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
        """Adds a chain for a turn that is encoded separately from its prompt."""
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
        """Whether the first token of the answer would absorb the end of the prompt; never at a special token."""
        if self._safe and (prompt.endswith(self._safe) or answer.startswith(self._safe)):
            return False
        return self._straddles(prompt, answer)

    def _spliced(self, turn: _Turn, chain: Chain) -> Chain | None:
        """The server's prompt, then the answer of a turn that does not begin with it; None if that is undetermined."""
        own_starts = chain.spans[chain.spans[:, _MESSAGE] == turn.message, _START]
        if not chain.known or not len(own_starts) or own_starts[0] > turn.shared:
            return None
        start, text = int(own_starts[0]), chain.text[: turn.size]
        prompt = text[: turn.shared] + turn.prompt
        shared = self._boundaries.shared(prompt[start:], text[start:])
        if shared is None:
            shared = _before_block(prompt[start:])
        if shared is None or start + len(shared) > turn.shared or not _is_closed(prompt[start + len(shared) :]):
            return None
        header = start + len(shared) + _repeated_end(prompt[start + len(shared) :], text[start + len(shared) :])
        more = len(prompt) - header
        spans, tags, fields = chain.before(turn.size)
        starts, ends, tag_places = spans[:, _START], spans[:, _END], tags[:, _TAG_START:]
        moves = (ends > header) | ((spans[:, _MESSAGE] == turn.message) & (ends >= header))
        starts += np.where(starts > header, more, 0).astype(np.int32)
        ends += np.where(moves, more, 0).astype(np.int32)
        tag_places += np.where(tag_places >= header, more, 0).astype(np.int32)
        fields[:, _START] += np.where(fields[:, _START] >= header, more, 0).astype(np.int32)
        fields[:, _END] += np.where(fields[:, _END] > header, more, 0).astype(np.int32)
        own = turn.own._replace(prompt_end=len(prompt), answer_end=len(text) + more)
        turns = [*chain.turns, own]
        text = prompt + text[header:]
        return replace(chain, text=text, spans=spans, tags=tags, fields=fields, turns=turns, is_spliced=True)

    # ---- shared prefixes

    def _may_share(self, chain: Chain, root: Chain) -> bool:
        return chain.known and root.known and bool(self._safe) and chain.row not in self._apart

    def _shortened(self, chain: Chain, root: Chain, common: int) -> Chain:
        """A whole chain without the prefix that it shares with the root, which ends at the start of a message."""
        starts = chain.spans[:, _START]
        for cut in reversed(starts[starts <= common].tolist() if self._may_share(chain, root) else []):
            if cut and chain.text.startswith(self._safe, cut) and root.text.startswith(chain.text[:cut]):
                tags, fields = chain.tags[chain.tags[:, _TAG_END] > cut], chain.fields[chain.fields[:, _END] > cut]
                kept = replace(chain, spans=chain.spans[starts >= cut], tags=tags, fields=fields)
                spans, tags, fields = kept.moved(-cut)
                return replace(chain, text=chain.text[cut:], spans=spans, tags=tags, fields=fields, skipped=cut)
        return chain

    def _cut_back(self, side: Chain, root: Chain) -> Chain:
        """Moves the start of a chain back to where the tokenizer can start, or to the start of the text."""
        cut, limit = side.skipped, side.turns[0].prompt_end
        may_share = self._may_share(side, root)
        if not cut or (may_share and cut <= limit and side.text.startswith(self._safe)):
            return side
        starts = root.spans[:, _START]
        earlier = [start for start in starts[starts < cut].tolist() if start <= limit] if may_share else []
        at = next((s for s in reversed(earlier) if s and root.text.startswith(self._safe, s)), 0)
        inside = (starts >= at) & (starts < cut)
        tag_ends = root.tags[:, _TAG_END]
        tags = root.tags[(tag_ends > at) & (tag_ends <= cut)]
        fields = root.fields[(root.fields[:, _START] >= at) & (root.fields[:, _START] < cut)]
        before = replace(root, spans=root.spans[inside], tags=tags, fields=fields).moved(-at)
        spans, tags, fields = (np.concatenate(pair) for pair in zip(before, side.moved(cut - at), strict=True))
        return replace(side, text=root.text[at:cut] + side.text, spans=spans, tags=tags, fields=fields, skipped=at)


def _turns_of(turns: Turns, rows: set[int]) -> dict[int, list[_Turn]]:
    """The turns of some rows, in the order of their messages."""
    found: dict[int, list[_Turn]] = {row: [] for row in rows}
    kept, kept_prompt = (sizes.tolist() for sizes in turns.kept)
    numbers = np.arange(len(turns.table) + 1)
    span_ends = np.searchsorted(turns.spans[:, SpanColumn.ROW], numbers).tolist()
    tag_ends = np.searchsorted(turns.tags[:, TagColumn.ROW], numbers).tolist()
    field_ends = np.searchsorted(turns.fields[:, FieldColumn.ROW], numbers).tolist()
    at = 0
    for number, (row, *columns) in enumerate(turns.table.tolist()):
        middle, end = at + kept[number], at + kept[number] + kept_prompt[number]
        if row in found:
            spans = turns.spans[span_ends[number] : span_ends[number + 1]]
            tags = turns.tags[tag_ends[number] : tag_ends[number + 1]]
            fields = turns.fields[field_ends[number] : field_ends[number + 1]]
            texts = turns.data[at:middle], turns.data[middle:end]
            found[row].append(_Turn._make((number, *columns, *texts, spans, tags, fields)))
        at = end
    for own in found.values():
        own.sort(key=lambda turn: turn.message)
    return found


def _wholes(rendered: Rendered, rows: Int64) -> list[Chain]:
    """Rows as they were rendered as a whole."""
    every = np.arange(len(rendered.text_ends) + 1)
    span_ends = np.searchsorted(rendered.span_rows, every).tolist()
    tag_ends = np.searchsorted(rendered.tag_rows, every).tolist()
    field_ends = np.searchsorted(rendered.fields.rows, every).tolist()
    found = []
    for row in rows.tolist():
        start, end = int(rendered.text_ends[row - 1]) if row else 0, int(rendered.text_ends[row])
        own, tagged = slice(*span_ends[row : row + 2]), slice(*tag_ends[row : row + 2])
        places = rendered.span_starts[own] - start, rendered.span_ends[own] - start
        spans = _stacked(rendered.span_rows[own], rendered.span_messages[own], *places)
        places = rendered.tag_starts[tagged] - start, rendered.tag_ends[tagged] - start
        tags = _stacked(rendered.tag_rows[tagged], *places)
        runs = rendered.fields.taken(np.arange(*field_ends[row : row + 2]))
        fields = _stacked(runs.rows, runs.labels, runs.starts - start, runs.ends - start)
        known = bool(rendered.known[row])
        found.append(Chain(row, rendered.data[start:end], spans, tags, fields, known, [], is_root=True))
    return found


def _stacked(*columns: npt.NDArray[Any]) -> Places:
    return np.stack(columns, axis=1).astype(np.int32)


def _prompt_end(text: bytes, start: int, seam: int) -> bytes:
    """The last bytes of the prompt that ends at a seam, starting at a character."""
    first = max(start, seam - _LOOK_BACK)
    while first < seam and text[first] & 0xC0 == 0x80:
        first += 1
    return text[first:seam]


def _may_merge(last: Any, first: Any) -> Any:
    """Whether one token may hold two adjacent bytes: not if a line ends and visible text follows."""
    blank = (first == 32) | ((first >= 9) & (first <= 13))
    return np.where((last >= 10) & (last <= 13), blank, True)


def _before_block(prompt: bytes) -> bytes | None:
    """The text before the block that ends a prompt, such as `<|channel>thought\\n<channel|>`; None if there is none."""
    block = _LAST_BLOCK.search(prompt)
    return prompt[: block.start()] if block else None


def _repeated_end(block: bytes, answer: bytes) -> int:
    """The size of a closing marker that an answer repeats although its prompt ends with it (DeepSeek-V3.2)."""
    last = block.rstrip()
    found = _MARKERS.match(answer)
    return found.end() if found and last.endswith(found.group()) else 0


def _is_closed(prompt: bytes) -> bool:
    """Whether a prompt closes everything it opens: `<think></think>` does, `<think>` does not."""
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


# ---- segments


class ChainSegments(NamedTuple):
    """Examples to encode. Each text begins where the example departs from its root, the last example of the row."""

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
    counts, width = np.diff(segments.offsets), np.int64(1) << 32
    keys = np.repeat(np.arange(len(counts)), counts) * width + segments.ends
    roots = np.searchsorted(chains.rows, chains.rows, side="right") - 1
    wanted = roots * width + chains.skipped
    found = np.searchsorted(keys, wanted, side="right")
    heads = np.where(chains.skipped > 0, found - segments.offsets[roots], 0)
    aligned = (heads > 0) & (np.concatenate(([-1], keys))[found] == wanted)
    return heads, set(chains.rows[(chains.skipped > 0) & ~aligned].tolist())
