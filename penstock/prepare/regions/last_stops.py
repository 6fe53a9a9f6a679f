"""Stops that templates print with the next turn, and `--stop append`, which adds them to answers that end a row.

GLM ends an answer with the marker of the next turn (`<|user|>`), Apertus prints an answer's own end token once another
message follows. The last answer of a row then has no stop, although a model generates one there. What follows the
answers of the probes tells which token it is: one for plain answers, maybe another one for tool calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from penstock.prepare.chat.conversation import Role
from penstock.prepare.chat.notes import Note, joined_notes
from penstock.prepare.regions.calibrate import ProbeRenders
from penstock.prepare.template.printed import MessageFlag
from penstock.prepare.template.rendered import Rendered


class LastStops:
    """Appends the stop that inference would see to rows that end in an answer without one."""

    def __init__(self, probes: ProbeRenders, markers: Sequence[bytes]) -> None:
        self._markers = tuple(markers)
        found = {True: Counter[bytes](), False: Counter[bytes]()}
        for has_calls, is_last, text in _after_answers(probes):
            marker = max((m for m in self._markers if text.startswith(m)), key=len, default=b"")
            if marker and not is_last:
                found[has_calls][marker] += 1
        plain = max(found[False], key=found[False].__getitem__, default=b"")
        self._stops = {False: plain, True: max(found[True], key=found[True].__getitem__, default=plain)}

    def __bool__(self) -> bool:
        return bool(self._stops[False])

    def __call__(self, rendered: Rendered) -> Rendered:
        """The same batch with stops appended to texts; they belong to no message yet."""
        if not len(rendered.span_rows):
            return rendered
        lasts = np.full(len(rendered.text_ends), -1, np.int64)
        lasts[rendered.span_rows] = np.arange(len(rendered.span_rows))
        numbers = rendered.message_offsets[1:] - 1
        owners = rendered.message_offsets[rendered.span_rows[lasts]] + rendered.span_messages[lasts]
        open_ended = rendered.known & (lasts >= 0) & (owners == numbers)
        open_ended &= rendered.message_roles[numbers] == Role.ASSISTANT
        open_ended &= rendered.span_ends[lasts] == rendered.text_ends
        stops: dict[int, bytes] = {}
        for row in np.flatnonzero(open_ended).tolist():
            start, end = int(rendered.span_starts[lasts[row]]), int(rendered.text_ends[row])
            if not rendered.data[start:end].rstrip().endswith(self._markers):
                stops[row] = self._stops[bool(rendered.message_flags[numbers[row]] & MessageFlag.HAS_CALLS)]
        return _appended(rendered, stops) if stops else rendered


def _appended(rendered: Rendered, stops: dict[int, bytes]) -> Rendered:
    added = np.zeros(len(rendered.text_ends), np.int64)
    added[list(stops)] = [len(stop) for stop in stops.values()]
    moved = np.cumsum(added) - added
    return replace(
        rendered,
        data=b"".join(text + stops.get(row, b"") for row, text in enumerate(rendered.texts)),
        text_ends=rendered.text_ends + np.cumsum(added),
        span_starts=rendered.span_starts + moved[rendered.span_rows],
        span_ends=rendered.span_ends + moved[rendered.span_rows],
        tag_starts=rendered.tag_starts + moved[rendered.tag_rows],
        tag_ends=rendered.tag_ends + moved[rendered.tag_rows],
        fields=rendered.fields.moved(np.arange(len(moved)), moved),
        notes=joined_notes(rendered.notes, {Note.STOP_APPENDED: np.array(sorted(stops), np.int64)}),
    )


def token_after_every_answer(probes: ProbeRenders, special_tokens: Iterable[str]) -> str:
    """The special token that follows every plain answer, outside of its turn; empty if there is none."""
    tokens = sorted((token.encode() for token in special_tokens if token), key=len, reverse=True)
    texts = [text.lstrip() for has_calls, _, text in _after_answers(probes) if not has_calls]
    found = {next((token for token in tokens if text.startswith(token)), b"") for text in texts}
    return found.pop().decode() if len(found) == 1 else ""


def _after_answers(probes: ProbeRenders) -> list[tuple[bool, bool, bytes]]:
    """Of each answer: whether it calls tools, whether it is the last message, and the text after its region."""
    rendered, found = probes.rendered, []
    ends: dict[tuple[int, int], int] = {}
    for row, message, end in zip(rendered.span_rows, rendered.span_messages, rendered.span_ends, strict=True):
        ends[int(row), int(message)] = int(end)
    for (row, number), end in ends.items():
        messages = probes.conversations[row].messages
        if messages[number]["role"] == "assistant":
            text = rendered.data[end : int(rendered.text_ends[row])]
            found.append(("tool_calls" in messages[number], number + 1 == len(messages), text))
    return found
