"""Finds what a template drops: tool calls (the row is refused), messages, reasoning and names (noted).

Training on a row without its calls would teach the model to stay silent. The engines report for each message whether
its calls, content and reasoning appear in the text; this module evaluates the reports of a whole batch at once.
"""

from __future__ import annotations

import numpy as np

from penstock.arrays import Int64
from penstock.chat.conversation import Part, Role
from penstock.chat.notes import Note, NotedRows
from penstock.errors import RowError
from penstock.regions.cuts import Pieces, run_lengths
from penstock.regions.segments import Segments
from penstock.template.rendered import MessageFlag, Rendered

_NEARLY_EMPTY = 24  # bytes; an empty thinking block is 19


def find_dropped(rendered: Rendered, pieces: Pieces, segments: Segments) -> tuple[dict[int, RowError], NotedRows]:
    """Returns errors for missing calls, and notes for missing messages, reasoning and names."""
    roles, flags = rendered.message_roles, rendered.message_flags
    rows = np.repeat(np.arange(len(rendered.text_ends)), np.diff(rendered.message_offsets))
    if rendered.errors:
        flags = np.where(np.isin(rows, list(rendered.errors)), np.uint8(MessageFlag.CONTENT_PRINTED), flags)
    has_calls = (flags & MessageFlag.HAS_CALLS) > 0
    calls_dropped = has_calls & (roles == Role.ASSISTANT) & ((flags & MessageFlag.CALLS_PRINTED) == 0)
    errors: dict[int, RowError] = {}
    for number in np.flatnonzero(calls_dropped).tolist():
        row = int(rows[number])
        errors.setdefault(row, _calls_dropped(number - int(rendered.message_offsets[row])))
    content_missing = (flags & MessageFlag.CONTENT_PRINTED) == 0
    checked = (_printed(rendered, segments) < _NEARLY_EMPTY) | has_calls
    answers = content_missing & checked & (roles == Role.ASSISTANT) & segments.known[rows]
    unprinted = np.bincount(pieces.numbers, minlength=len(roles)) == 0
    systems = content_missing & unprinted & (roles == Role.SYSTEM)
    others = content_missing & unprinted & ~np.isin(roles, (Role.SYSTEM, Role.ASSISTANT)) & rendered.known[rows]
    reasoning = (flags & (MessageFlag.HAS_REASONING | MessageFlag.REASONING_PRINTED)) == MessageFlag.HAS_REASONING
    found = {
        Note.CONTENT_DROPPED: answers,
        Note.SYSTEM_DROPPED: systems,
        Note.MESSAGE_DROPPED: others,
        Note.REASONING_DROPPED: reasoning,
        Note.NAME_DROPPED: (flags & MessageFlag.NAME_DROPPED) > 0,
    }
    return errors, {note: np.unique(rows[where]) for note, where in found.items() if where.any()}


def _printed(rendered: Rendered, segments: Segments) -> Int64:
    """The number of body bytes that each assistant message printed."""
    rows = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    body = (segments.parts == Part.BODY) & (segments.roles == Role.ASSISTANT)
    numbers = rendered.message_offsets[rows[body]] + segments.messages[body]
    sizes = np.bincount(numbers, run_lengths(segments)[body], minlength=len(rendered.message_roles))
    return sizes.astype(np.int64)


def _calls_dropped(index: int) -> RowError:
    return RowError(
        "tool_calls_dropped",
        f"the chat template drops the tool calls of message {index}",
        "Use a template that prints tool calls (--template), give a `function_call` as `tool_calls`, or remove "
        "the calls from the row",
    )
