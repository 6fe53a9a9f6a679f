"""Finds what a template drops: tool calls (the row is refused), messages, reasoning, names and other keys (noted).

Training on a row without its calls would teach the model to stay silent. The engines report for each message whether
its calls, content and reasoning appear in the text; this module evaluates the reports of a whole batch at once.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Message, Role
from penstock.prepare.chat.notes import Note, NotedRows
from penstock.prepare.template.printed import MessageFlag, shows_arguments
from penstock.prepare.template.rendered import Rendered


def find_dropped(rendered: Rendered) -> tuple[dict[int, RowError], NotedRows]:
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
        if row not in errors:
            conversation = rendered.conversation(row)
            index = number - int(rendered.message_offsets[row])
            errors[row] = _calls_dropped(index, conversation.messages[index], _text(rendered, row))
    missing = (flags & MessageFlag.CONTENT_PRINTED) == 0
    reasoning = (flags & (MessageFlag.HAS_REASONING | MessageFlag.REASONING_PRINTED)) == MessageFlag.HAS_REASONING
    found = {
        Note.CONTENT_DROPPED: missing & (roles == Role.ASSISTANT),
        Note.SYSTEM_DROPPED: missing & (roles == Role.SYSTEM),
        Note.MESSAGE_DROPPED: missing & (roles != Role.ASSISTANT) & (roles != Role.SYSTEM),
        Note.REASONING_DROPPED: reasoning,
        Note.NAME_DROPPED: (flags & MessageFlag.NAME_DROPPED) > 0,
        Note.KEY_UNUSED: (flags & MessageFlag.KEY_DROPPED) > 0,
    }
    return errors, {note: np.unique(rows[where]) for note, where in found.items() if where.any()}


def _text(rendered: Rendered, row: int) -> bytes:
    return rendered.data[int(rendered.text_ends[row - 1]) if row else 0 : int(rendered.text_ends[row])]


def _calls_dropped(index: int, message: Message, text: bytes) -> RowError:
    shown = shows_arguments(message, text)
    return RowError(
        "tool_calls_dropped",
        f"the chat template prints the arguments, but not the name, of a tool call of message {index}"
        if shown
        else f"the chat template drops the tool calls of message {index}",
        "Use a template that prints tool calls (--template), give a `function_call` as `tool_calls`, or remove "
        "the calls from the row",
    )
