"""Stencils: what a local template prints around the words of a message, learned once and then filled in.

Enters: a batch of conversations. Leaves: for most rows of a local template their texts and segments, exactly as the
engine and the splitter would give them; all other rows are left to these. A stencil is learned from a conversation of
the same shape whose words are placeholders, rendered and split the usual way; it holds wherever the context is the
same (`locality` says why, and the proof of each slice looks at it again). Costs a render per new context, then about
0.5 µs a message and a copy of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Final

import numpy as np

from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation, Message, Part, Role
from penstock.chat.engine import TemplateEngine
from penstock.chat.parts import Splitter
from penstock.chat.regions import Bool, Int64
from penstock.chat.sentinels import HOLE_END, HOLE_SPACE, HOLE_START
from penstock.chat.shapes import Batch, Draft, Shape, Shapes, Tools
from penstock.chat.stencil import Fill, Filled, Hole, Run, Stencil, Table

_ABOUT: Final = f"{HOLE_START}([0-9]+)"
_HOLE: Final = re.compile(
    f'{{"{HOLE_START}t([0-9]+){HOLE_END}": 0}}'  # a tool
    f'|{{"{_ABOUT}a([0-9]+){HOLE_END}": 0}}'  # arguments
    f"|{_ABOUT}n([0-9]+){HOLE_END}"  # a name
    f"|({HOLE_SPACE}?){_ABOUT}{HOLE_END}({HOLE_SPACE}?)"  # content
)
_MOST_FAILURES: Final = 64
_MOST_STENCILS: Final = 4096  # bounds memory, and the time spent on data of which no two rows are alike
_TOO_MANY: Final = "more kinds of conversations than stencils are learned for"
_NO_TEXT: Final = "lone surrogates, or very deep nesting, in tools or the arguments of calls nearby"
_MARKS: Final = frozenset((HOLE_START, HOLE_END, HOLE_SPACE))


class Refused(Exception):
    """Why no stencil is learned from a conversation."""


class Stencils:
    """The stencils of one template."""

    def __init__(self, engine: TemplateEngine, splitter: Splitter, names: Mapping[str, str], adapter: Adapter) -> None:
        self._engine, self._splitter, self._adapter = engine, splitter, adapter
        self.why_not = self._find_why_not()
        self._shapes = None if self.why_not or engine.locality is None else Shapes(engine.locality, names)
        self._table = Table()
        self._failures: set[frozenset[int]] = set()  # contexts that could not be learned together
        self._why: dict[int, str] = {}

    def _find_why_not(self) -> str:
        """Why the template does not allow for stencils, or ''."""
        if self._engine.why_not_local:
            return f"messages depend on each other in this template: {self._engine.why_not_local}"
        if self._splitter.is_tagged:
            return "the template's own tags are followed"
        return self._engine.why_unknown

    @property
    def active(self) -> bool:
        """Whether the template allows for stencils."""
        return self._shapes is not None

    def draft(self) -> Draft:
        """An empty draft, to be filled in."""
        assert self._shapes is not None
        return Draft(self._shapes, self._adapter)

    def fill(self, draft: Draft) -> Filled | None:
        """Serve what can be served; None where that is nothing."""
        assert self._shapes is not None
        batch = draft.batch()
        if not batch.rows:
            return None
        contexts = self._shapes.contexts(batch)
        numbers = self._table.find(contexts)
        if (numbers < 0).any():
            self._learn_missing(batch, contexts, numbers)
            numbers = self._table.find(contexts)
            served = np.minimum.reduceat(numbers, batch.offsets[:-1]) >= 0
            draft.left |= self._reasons(batch, contexts, numbers, served)
            numbers = numbers[np.repeat(served, np.diff(batch.offsets))]
            batch = batch.taken(served)
            if not batch.rows:
                return None
        try:
            return self._table.fill(batch, numbers)
        except (UnicodeEncodeError, RecursionError):
            draft.left |= dict.fromkeys(batch.rows, _NO_TEXT)
            return None

    def _reasons(self, batch: Batch, contexts: Int64, numbers: Int64, served: Bool) -> dict[int, str]:
        """Why rows are not served: each by the first context that has no stencil."""
        places = np.where(numbers < 0, np.arange(len(numbers)), len(numbers))
        firsts = contexts[np.minimum.reduceat(places, batch.offsets[:-1])[~served]].tolist()
        rows = compress(batch.rows, (~served).tolist())
        return {row: self._why.get(context, _TOO_MANY) for row, context in zip(rows, firsts, strict=True)}

    def _learn_missing(self, batch: Batch, contexts: Int64, numbers: Int64) -> None:
        rows = np.unique(np.searchsorted(batch.offsets, np.flatnonzero(numbers < 0), side="right") - 1)
        for row in rows.tolist():
            own = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
            missing = self._table.lacks(contexts[own].tolist())
            if not missing or missing in self._failures:
                continue
            if len(self._failures) >= _MOST_FAILURES or len(self._table) >= _MOST_STENCILS:
                break
            try:
                learned = list(self._learn(batch.codes[own], batch.tools[row]))
            except Refused as reason:
                self._failures.add(missing)
                self._why |= dict.fromkeys(missing.difference(self._why), str(reason))
                continue
            self._table.add(contexts[own].tolist(), learned)
        self._table.index()

    # ---- learning

    def _learn(self, codes: Int64, tools: Tools | None) -> Iterator[Stencil]:
        """The stencils of all messages of a row with these codes and so many tools."""
        assert self._shapes is not None
        shapes = [shape for code in codes.tolist() if (shape := self._shapes.known[code]) is not None]
        conversation = Conversation(
            [_placeholder(number, shape) for number, shape in enumerate(shapes)],
            tools=None if tools is None else [{f"{HOLE_START}t{k}{HOLE_END}": 0} for k in range(len(tools))],
        )
        regions = self._engine.render([conversation])
        segments, errors = self._splitter.split([conversation], regions)
        if errors or regions.errors:
            raise Refused("the template refuses the conversation, or drops its tool calls")
        if segments.notes or not segments.known.all():
            raise Refused("the template has no stop, or none that is a special token of this tokenizer")
        ends = segments.ends.tolist()
        runs = list(
            zip(
                [0, *ends[:-1]], ends, segments.roles.tolist(), segments.parts.tolist(), segments.messages.tolist(),
                strict=False,
            )
        )  # fmt: skip
        previous = Role.NONE
        for number, (shape, share) in enumerate(zip(shapes, _shares(runs, len(shapes)), strict=True)):
            stencil = _stencil(number, shape, share, regions.data)
            if shape.role is Role.ASSISTANT and not self._is_certain(stencil, previous):
                raise Refused("words may change where headers and stops end")
            yield stencil
            previous = shape.role

    def _is_certain(self, stencil: Stencil, previous: Role) -> bool:
        """Whether header and stop of an answer are the same whatever the answer says."""
        own = [run for run in stencil.runs if run.own]
        if not own or stencil.inner:
            return False
        glue = max((run.end for run in stencil.runs if not run.own and not run.filled), default=0)
        header, stop = own[0], next((run for run in own if run.part is Part.STOP), None)
        if header.part is not Part.HEADER or header.filled or stop is None or not stop.filled:
            return False
        opening = stencil.before[glue:]
        ending = stencil.after[: own[-1].end - len(stencil.before)]
        return self._splitter.settles(previous, opening, opening[: header.end - glue], ending)


_Share = list[tuple[int, int, int, int, int]]  # start, end, role, part, message


def _shares(runs: _Share, messages: int) -> list[_Share]:
    """The segments of a conversation, message by message; glue goes with what precedes it."""
    shares: list[_Share] = [[] for _ in range(messages)]
    current = 0
    for run in runs:
        message = run[4]
        if message >= 0:
            if message < current:
                raise Refused("messages are not printed in order")
            current = message
        elif shares[current] and 2 < current < messages - 1:
            raise Refused("there is text between messages")
        shares[current].append(run)
    if runs and runs[-1][4] < 0 and current < messages - 1:
        raise Refused("the last message is not printed")
    return shares


def _placeholder(number: int, shape: Shape) -> Message:
    content = f"{HOLE_SPACE}{HOLE_START}{number}{HOLE_END}{HOLE_SPACE}" if shape.content else shape.content
    message: Message = {"role": shape.role.name.lower(), "content": content}
    if shape.calls:
        functions = [
            {
                "name": f"{HOLE_START}{number}n{call}{HOLE_END}",
                "arguments": {f"{HOLE_START}{number}a{call}{HOLE_END}": 0},
            }
            for call in range(shape.calls)
        ]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def _stencil(number: int, shape: Shape, share: _Share, data: bytes) -> Stencil:
    """The stencil that one share shows."""
    start, end = (share[0][0], share[-1][1]) if share else (0, 0)
    (first, *holes), (low, *places) = _taken_apart(number, data[start:end].decode())
    last = holes.pop() if holes else ""
    found = [hole for hole in holes if isinstance(hole, Hole)]
    wanted = {Hole(fill, k) for k in range(shape.calls) for fill in (Fill.NAME, Fill.ARGUMENTS)}
    has_content = any(hole.fill in (Fill.CONTENT, Fill.TRIMMED) for hole in found)
    if has_content != bool(shape.content) or not wanted <= set(found):
        raise Refused("the template drops something")
    high = places[-2] if holes else low
    runs: list[Run] = []
    for _, stop, role, part, message in share:
        at = stop - start
        filled, inside = at >= high and bool(found), 0
        if low < at < high:
            inside = bisect_right(places, at)
            beyond = at - (places[inside - 1] if inside else low)
            if beyond and isinstance(holes[inside], Hole):
                raise Refused("a part ends within words")
            at = low + beyond
        runs.append(Run(at - (high - low) if filled else at, filled, Role(role), Part(part), message >= 0, inside))
    own = [number for number, run in enumerate(runs) if run.own]
    parts = [runs[number].part for number in own]
    if parts != sorted(set(parts)) or (own and own[-1] - own[0] != len(own) - 1):
        raise Refused("a message is printed in pieces")
    return Stencil(str(first).encode(), tuple(holes), str(last).encode(), tuple(runs))


def _taken_apart(number: int, text: str) -> tuple[list[Hole | str], list[int]]:
    """The holes, with what stands before, between and after them; and the byte where each of these ends."""
    items: list[Hole | str] = []
    places: list[int] = []
    at = 0
    for match in _HOLE.finditer(text):
        items += [text[at : match.start()], _hole(match, number)]
        places += [len(text[: match.start()].encode()), len(text[: match.end()].encode())]
        at = match.end()
    items.append(text[at:])
    places.append(len(text.encode()))
    if any(isinstance(item, str) and not _MARKS.isdisjoint(item) for item in items):
        raise Refused("the template changes the words")
    return items, places


def _hole(match: re.Match[str], number: int) -> Hole:
    tool, with_arguments, arguments, with_name, name, before, with_content, after = match.groups()
    if tool:
        return Hole(Fill.TOOL, int(tool))
    if int(with_arguments or with_name or with_content) != number:
        raise Refused("a message is printed among others")
    if with_arguments:
        return Hole(Fill.ARGUMENTS, int(arguments))
    if with_name:
        return Hole(Fill.NAME, int(name))
    if before != after:
        raise Refused("the template strips one side of the words")
    return Hole(Fill.CONTENT if before else Fill.TRIMMED)
