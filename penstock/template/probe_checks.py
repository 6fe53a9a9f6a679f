"""Checks a template on the probes before it is used: that the engines agree, and that the regions are right.

Regions are wrong if a marker word of one message lies in a piece of another and either of them is an assistant message;
they are uncertain if a word of an assistant lies in no piece. In both cases the template's regions are unknown. The
checks take about 0.1 s per template.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.chat.conversation import Conversation
from penstock.template.probes import WORD
from penstock.template.rendered import Rendered

Row = tuple[bytes, bool, list[tuple[int, int, int]], list[tuple[int, int]], bool]


def rows(regions: Rendered) -> Iterator[Row]:
    """Yields each row: its text, whether its regions are known, its pieces and spans in the text, whether it failed."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in regions.text_ends]
    spans: list[list[tuple[int, int]]] = [[] for _ in regions.text_ends]
    begins = [0, *regions.text_ends.tolist()]
    columns = (regions.piece_rows, regions.piece_messages, regions.piece_starts, regions.piece_ends)
    for row, message, start, end in zip(*(column.tolist() for column in columns), strict=True):
        pieces[row].append((message, start - begins[row], end - begins[row]))
    columns3 = (regions.span_rows, regions.span_starts, regions.span_ends)
    for row, start, end in zip(*(column.tolist() for column in columns3), strict=True):
        spans[row].append((start - begins[row], end - begins[row]))
    for row, end in enumerate(begins[1:]):
        text = regions.data[begins[row] : end]
        yield text, bool(regions.known[row]), pieces[row], spans[row], row in regions.errors


def first_difference(served: Rendered, expected: Rendered) -> str:
    """The first difference between the engines on the probes, or an empty string."""
    for number, (one, other) in enumerate(zip(rows(served), rows(expected), strict=True)):
        for what, a, b in zip(("text", "knowledge", "pieces", "spans", "refusal"), one, other, strict=True):
            if a != b:
                return f"what the machine renders differently: the {what} of probe {number}"
    words = {number: str(error) for number, error in served.errors.items()}
    if words != {number: str(error) for number, error in expected.errors.items()}:
        return "what the machine refuses in other words"
    return ""


def first_region_error(rendered: Rendered, conversations: Sequence[Conversation]) -> str:
    """The first marker word that does not lie in a piece of its own message, or an empty string."""
    for number, (row, conversation) in enumerate(zip(rows(rendered), conversations, strict=True)):
        text, known, pieces, _, failed = row
        if failed or not known:
            continue
        speakers = [message.get("role") == "assistant" for message in conversation.messages]
        for word in WORD.finditer(text):
            owner = next((m for m, start, end in pieces if start <= word.start() < end), None)
            speaker = int(word[1])
            if owner is None and speakers[speaker]:
                return f"text of an assistant appears outside of the messages (built-in conversation {number})"
            if owner not in (None, speaker) and (speakers[speaker] or (owner is not None and speakers[owner])):
                return f"text of message {speaker} appears inside message {owner} (built-in conversation {number})"
    return ""
