"""Assistant turns as inference sees them: the prompt that a server sends, and what the template prints for the answer.

For assistant message i the prompt is `messages[:i]` with the generation prompt, and the turn is `messages[:i+1]`. The
*root* of a row is the last turn that the template accepts, plus later messages if their text is only appended. Other
turns are described by the prefix they share with the root. `penstock.native` makes the same table in C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.template.printed import Shown, flags_of
from penstock.prepare.template.tracing.provenance import Span

Table = npt.NDArray[np.int32]


class TurnColumn(IntEnum):
    """The columns of `Turns.table`. Sizes and places are in bytes."""

    ROW = 0  # number of the conversation
    MESSAGE = 1
    STATE = 2  # `TurnState`
    PROMPT_SIZE = 3
    SIZE = 4
    FLAGS = 5  # `MessageFlag`
    COMMON = 6  # size of the prefix that it shares with the root
    CUT = 7  # where its kept text begins: at the start of a message, at most at COMMON
    SHARED = 8  # size of the prefix that prompt and turn share


class SpanColumn(IntEnum):
    """The columns of a table of spans: text that one message printed."""

    ROW = 0  # number of the conversation or turn
    MESSAGE = 1
    START = 2
    END = 3


class TagColumn(IntEnum):
    """The columns of a table of `{% generation %}` blocks."""

    ROW = 0  # number of the conversation or turn
    START = 1
    END = 2


MARK_SHIFT = 8  # a label is a `Field`, and above its bits the number of the marked span it lies in (from 1; 0: none)
FIELD_BITS = (1 << MARK_SHIFT) - 1


class Field(IntEnum):
    """A field of an assistant message, as the low bits of a label."""

    NONE = 0
    REASONING = 1  # `reasoning_content`, `reasoning`, `thinking`; parts of the content with such a type
    CONTENT = 2
    CALL_NAME = 3
    CALL_ARGUMENTS = 4  # everything inside, keys included
    THOUGHT = 5  # content between `<think>` and `</think>`, or before the first `</think>`
    THINK_TAG = 6  # these tags themselves
    TOOL_RESPONSE = 7  # a tool's result that an assistant message carries (`tool_responses`)


class FieldColumn(IntEnum):
    """The columns of a table of runs of fields; the same places as in `SpanColumn`."""

    ROW = 0  # number of the conversation or turn
    LABEL = 1
    START = 2
    END = 3


class TurnState(IntFlag):
    """What the renders of a turn showed."""

    PROMPT_REFUSED = 1  # the template refuses the messages before it
    TURN_REFUSED = 2  # the template refuses the messages up to it
    CONTINUES = 4  # the turn begins with its prompt
    EXTENDS = 8  # its prompt begins with the turn before it
    IN_ROOT = 16  # the root begins with the turn
    KNOWN = 32  # it is certain which message printed what
    IS_ROOT = 64  # it is the root; IN_ROOT then says that later messages only append to it


REFUSED = TurnState.PROMPT_REFUSED | TurnState.TURN_REFUSED
_WIDTHS = (len(TurnColumn), len(SpanColumn), len(TagColumn), len(FieldColumn))


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a batch: a table, and texts.

    `data` has the kept texts in order: of turns that are not in the root, and the rest of prompts that their turns do
    not continue.
    """

    table: Table  # `TurnColumn`
    data: bytes
    spans: Table  # `SpanColumn`, of the kept text of turns
    tags: Table  # `TagColumn`
    fields: Table  # `FieldColumn`

    @classmethod
    def of(cls, table: bytes, data: bytes, spans: bytes, tags: bytes, fields: bytes) -> Turns:
        """The machine's arrays."""
        arrays = (np.frombuffer(found, np.int32) for found in (table, spans, tags, fields))
        shapes = [array.reshape(-1, width) for array, width in zip(arrays, _WIDTHS, strict=True)]
        return cls(shapes[0], data, shapes[1], shapes[2], shapes[3])

    @property
    def kept(self) -> tuple[Int64, Int64]:
        """How many bytes of each turn, and of its prompt, are kept."""
        table = self.table.astype(np.int64)
        states = table[:, TurnColumn.STATE]
        is_there = (states & REFUSED) == 0
        turns = table[:, TurnColumn.SIZE] - table[:, TurnColumn.CUT]
        prompts = table[:, TurnColumn.PROMPT_SIZE] - table[:, TurnColumn.SHARED]
        return (
            np.where(is_there & _without(states, TurnState.IN_ROOT), turns, 0),
            np.where(is_there & _without(states, TurnState.CONTINUES), prompts, 0),
        )

    def moved(self, places: npt.NDArray[np.int64]) -> Turns:
        """The same turns, with conversations renumbered."""
        table = self.table.copy()
        table[:, TurnColumn.ROW] = places[table[:, TurnColumn.ROW]]
        return Turns(table, self.data, self.spans, self.tags, self.fields)


def _without(states: Int64, flag: TurnState) -> npt.NDArray[np.bool_]:
    return np.asarray((states & int(flag)) == 0)


def joined_turns(parts: Sequence[Turns]) -> Turns:
    """The turns of several batches, whose conversation numbers already refer to the merged batch."""
    before = np.cumsum([0, *(len(part.table) for part in parts)])
    runs = [[part.spans.copy(), part.tags.copy(), part.fields.copy()] for part in parts]
    for own, first in zip(runs, before[:-1], strict=True):
        for table in own:
            table[:, 0] += first  # `ROW` of each
    return Turns(
        np.concatenate([part.table for part in parts]),
        b"".join(part.data for part in parts),
        *(np.concatenate(tables) for tables in zip(*runs, strict=True)),
    )


# ---- turns by the reference


class TracedText(NamedTuple):
    """A text with its spans, None if they are uncertain, its `{% generation %}` blocks and its fields."""

    data: bytes
    spans: list[Span] | None
    tags: list[tuple[int, int]]
    fields: list[tuple[int, int, int]]  # label, start, end


Prompt = Callable[[Conversation, int], bytes | None]  # the first messages with a generation prompt; None: refused
Traced = Callable[[Conversation, int], TracedText | None]  # the first messages; None: refused


class _Both(NamedTuple):
    message: int
    state: TurnState
    prompt: bytes
    shown: TracedText

    @property
    def turn(self) -> bytes:
        return self.shown.data


_NOTHING = TracedText(b"", None, [], [])


def reference_turns(
    conversations: Sequence[Conversation | None], prompt: Prompt, traced: Traced, used_keys: Mapping[str, str]
) -> Turns:
    """The turns of conversations, rendered by the reference; a conversation that is None has no turns."""
    table: list[tuple[int, ...]] = []
    spans: list[tuple[int, int, int, int]] = []
    tags: list[tuple[int, int, int]] = []
    fields: list[tuple[int, int, int, int]] = []
    data: list[bytes] = []
    for row, conversation in enumerate(conversations):
        if conversation is None:
            continue
        found = _both(conversation, prompt, traced)
        base = next((turn for turn in reversed(found) if not turn.state & REFUSED), None)
        if base is not None and base.message + 1 == len(conversation.messages):
            whole = base.shown
        else:
            whole = traced(conversation, len(conversation.messages)) or _NOTHING
        is_whole = base is None or whole.data.startswith(base.turn)
        root, root_spans, *_ = whole if is_whole or base is None else base.shown
        for turn in found:
            state, common, cut, flags = turn.state, 0, 0, 4
            if not state & REFUSED:
                common = _common(root, turn.turn)
                if turn is base:
                    state |= TurnState.IS_ROOT
                    state |= TurnState.IN_ROOT if is_whole else TurnState(0)
                elif common == len(turn.turn):
                    state |= TurnState.IN_ROOT
                shown = turn.shown
                if shown.spans is not None and turn.message + 1 < len(conversation.messages):
                    state |= TurnState.KNOWN
                if not state & TurnState.IN_ROOT:
                    if shown.spans is not None and turn is not base:
                        cut = _cut(shown.spans, root_spans or [], common)
                    number = len(table)
                    spans += [(number, *span) for span in shown.spans or () if span.start >= cut]
                    tags += [(number, start, end) for start, end in shown.tags if end > cut]
                    fields += [(number, label, max(start, cut), end) for label, start, end in shown.fields if end > cut]
                    data.append(turn.turn[cut:])
                own = [shown.data[s.start : s.end] for s in shown.spans or () if s.message == turn.message]
                printed = b"".join(own) if shown.spans is not None else shown.data
                texts = Shown(printed, shown.data)
                flags = int(flags_of(conversation.messages[turn.message], texts, used_keys))
            shared = _common(turn.prompt, turn.turn)
            if not state & (REFUSED | TurnState.CONTINUES):
                data.append(turn.prompt[shared:])
            sizes = len(turn.prompt), len(turn.turn)
            table.append((row, turn.message, int(state), *sizes, flags, common, cut, shared))
    runs = _table(spans, SpanColumn), _table(tags, TagColumn), _table(fields, FieldColumn)
    return Turns(_table(table, TurnColumn), b"".join(data), *runs)


def _both(conversation: Conversation, prompt_of: Prompt, traced: Traced) -> list[_Both]:
    """Prompt and turn of each assistant message."""
    found: list[_Both] = []
    for number, message in enumerate(conversation.messages):
        if message.get("role") != "assistant":
            continue
        prompt = prompt_of(conversation, number) if number else None  # there is no prompt without a message
        turn = traced(conversation, number + 1) if prompt is not None else None
        if prompt is None or turn is None:
            state = TurnState.PROMPT_REFUSED if prompt is None else TurnState.TURN_REFUSED
            found.append(_Both(number, state, b"", _NOTHING))
            continue
        state = TurnState.CONTINUES if turn.data.startswith(prompt) else TurnState(0)
        if found and not found[-1].state & REFUSED and prompt.startswith(found[-1].turn):
            state |= TurnState.EXTENDS
        found.append(_Both(number, state, prompt, turn))
    return found


def _cut(spans: list[Span], root: list[Span], common: int) -> int:
    """The start of the last span that begins in the common prefix and follows only spans of the root."""
    cut = 0
    for own, other in zip(spans, root, strict=False):
        if own.start > common or (own.message, own.start) != (other.message, other.start):
            break
        cut = own.start
        if own != other:
            break
    return cut


def _common(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    differ = np.frombuffer(one, np.uint8, size) != np.frombuffer(other, np.uint8, size)
    return int(differ.argmax()) if differ.any() else size


def _table(rows: Sequence[tuple[int, ...]], columns: type[IntEnum]) -> Table:
    return np.array(rows, np.int32).reshape(-1, len(columns))
