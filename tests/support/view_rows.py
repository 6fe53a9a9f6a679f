"""Rows for tests of views: random ones for property tests, and one small conversation with known parts."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import Piece

ROLES = [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.ASSISTANT, Role.TOOL, Role.OTHER]
SHAPES = [(2, 3, 1, 1), (1, 0, 1, 0), (0, 2, 0, 0), (0, 0, 0, 0), (2, 1, 1, 0)]  # header, body, stop, tail
MESSAGES = st.tuples(
    st.sampled_from(ROLES),
    st.sampled_from(SHAPES),
    st.integers(0, 99),  # determines the ids: few distinct ones, so that the sides of a pair share prefixes
    st.sampled_from([None, None, 0.0, 0.5, 2.0]),
)
Shape = tuple[Role, tuple[int, int, int, int], int, float | None]


def _message(number: int, shape: Shape) -> list[Piece]:
    role, sizes, salt, weight = shape
    parts = (Part.HEADER, Part.BODY, Part.STOP, Part.TAIL) if role is Role.ASSISTANT else (Part.BODY,)
    lengths = sizes if role is Role.ASSISTANT else (sum(sizes),)
    return [
        Piece(number, role, part, tuple(int(salt % 10 == place) for place in range(length)), weight)
        for part, length in zip(parts, lengths, strict=True)
        if length or salt % 2  # runs without tokens too
    ]


def _row(shapes: list[Shape], opening: int) -> list[Piece]:
    """A conversation after `opening` tokens of glue; -1: a row whose regions are unknown."""
    pieces = [piece for number, shape in enumerate(shapes) for piece in _message(number, shape)]
    if opening < 0:
        return [Piece(-1, Role.NONE, Part.GLUE, tuple(token for piece in pieces for token in piece.ids))]
    return [Piece(-1, Role.NONE, Part.GLUE, (5,) * opening)] * (opening > 0 and len(pieces) > 0) + pieces


CONVERSATIONS = st.lists(MESSAGES, max_size=5)


def rows(unknown: bool = True) -> st.SearchStrategy[list[Piece]]:
    """A conversation with zero to five messages, or a row whose regions are unknown."""
    return st.builds(_row, CONVERSATIONS, st.sampled_from([0, 1, 2, -1] if unknown else [0, 1, 2]))


def _pair(prompt: list[Shape], chosen: list[Shape], rejected: list[Shape], opening: int) -> list[list[Piece]]:
    return [_row([*prompt, *chosen], opening), _row([*prompt, *rejected], opening)]


def pairs() -> st.SearchStrategy[list[list[Piece]]]:
    """Two conversations that start with the same messages."""
    ends = st.lists(MESSAGES, max_size=2)
    return st.builds(_pair, st.lists(MESSAGES, max_size=3), ends, ends, st.sampled_from([0, 0, 1, -1]))


def chat(*turns: tuple[Role, int], weights: dict[int, float] | None = None, first_id: int = 10) -> list[Piece]:
    """A conversation: one role and body length per message; assistants get two header tokens, a stop and a tail."""
    pieces, at = list[Piece](), first_id
    for number, (role, length) in enumerate(turns):
        weight = (weights or {}).get(number)
        shape = [(Part.BODY, length)]
        if role is Role.ASSISTANT:
            shape = [(Part.HEADER, 2), (Part.BODY, length), (Part.STOP, 1), (Part.TAIL, 1)]
        for part, size in shape:
            pieces.append(Piece(number, role, part, tuple(range(at, at + size)), weight))
            at += size
    return pieces


def tool_chat(weights: dict[int, float] | None = None) -> list[Piece]:
    """Two turns, each with a tool call: 9 messages."""
    return chat(
        (Role.SYSTEM, 2),
        (Role.USER, 3),
        (Role.ASSISTANT, 3),
        (Role.TOOL, 2),
        (Role.ASSISTANT, 2),
        (Role.USER, 2),
        (Role.ASSISTANT, 1),
        (Role.TOOL, 1),
        (Role.ASSISTANT, 2),
        weights=weights,
    )


PARTS = [
    Part.HEADER,
    Part.REASONING_MARKUP,
    Part.REASONING,
    Part.REASONING_MARKUP,
    Part.CONTENT,
    Part.CALL_MARKUP,
    Part.CALL_NAME,
    Part.CALL_ARGUMENTS,
    Part.CALL_MARKUP,
    Part.MARKUP,
    Part.STOP,
    Part.TAIL,
]


def answer(number: int, parts: list[Part] = PARTS, first_id: int = 100, weight: float | None = None) -> list[Piece]:
    """An assistant's message that is divided into parts, with two tokens of each."""
    return [
        Piece(number, Role.ASSISTANT, part, (first_id + 2 * at, first_id + 2 * at + 1), weight)
        for at, part in enumerate(parts)
    ]
