"""Stencils give what the engine and the splitter give, whatever the messages say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.meters import ROOT, pipeline_of
from penstock.chat.conversation import Conversation, Message
from penstock.chat.plain_rows import PlainRows
from penstock.chat.rows import Normaliser
from penstock.chat.special_text import SpecialTextFinder
from penstock.errors import RowError
from tests.chat.splitting import assistant, returns, user
from tests.chat.stencil_probes import MAPPING, SAID, TEMPLATES, Made, check, made, served
from tests.chat.tools_cases import HOSTILE_TOOLS

pytestmark = pytest.mark.usefixtures("inner_loops")

CONTENTS = st.one_of(st.sampled_from(SAID), st.text(max_size=8), st.text("ab \n<|end>", max_size=8))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)


@st.composite
def tool_calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    count = draw(st.integers(0, 3))
    names = st.sampled_from(("f", "get_weather", "", "<|end|>", "\U0010fe000n0\U0010fe01", "naïve", " f "))
    functions = [{"name": draw(names), "arguments": draw(ARGUMENTS | st.just("{}"))} for _ in range(count)]
    return [
        {"id": f"call{number}", "type": "function", "function": function}
        if draw(st.booleans())
        else {"type": "function", "function": function}
        for number, function in enumerate(functions)
    ]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role = draw(st.sampled_from(("user", "assistant", "user", "assistant", "system", "tool")))
    message: Message = {"role": role, "content": draw(CONTENTS)}
    if role == "assistant" and draw(st.integers(0, 3)) == 0:
        message["tool_calls"] = draw(tool_calls())
    if draw(st.integers(0, 5)) == 0:
        message[draw(st.sampled_from(("name", "tool_call_id", "id", "rating", "reasoning_content", "thinking")))] = "x"
    return message


@st.composite
def orderly(draw: st.DrawFn) -> list[Message]:
    """Turns as every template takes them, some with calls and their results."""
    words = CONTENTS.filter(lambda said: bool(said and not said.isspace())).map(str)
    said = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        said.append(user(draw(words)))
        if draw(st.integers(0, 3)) == 0:
            functions = [{"name": "f", "arguments": draw(ARGUMENTS)} for _ in range(draw(st.integers(1, 2)))]
            made_calls = [{"type": "function", "function": function} for function in functions]
            said += [assistant(draw(CONTENTS), tool_calls=made_calls), returns(draw(words))]
        said.append(assistant(draw(words)))
    return said


SAID_IN_ROWS = st.one_of(orderly(), st.lists(messages(), min_size=1, max_size=12))
TOOLS = st.none() | st.lists(st.sampled_from(HOSTILE_TOOLS) | ARGUMENTS, max_size=4)
ROWS = st.lists(
    st.fixed_dictionaries({"messages": SAID_IN_ROWS}, optional={"tools": TOOLS, "x": VALUES}), min_size=1, max_size=5
)


def read(records: Sequence[dict[str, Any]]) -> tuple[list[bytes], list[Conversation]]:
    """The rows that can be read, and what is read from them."""
    reader = Normaliser(MAPPING)
    rows: list[bytes] = []
    found: list[Conversation] = []
    for row in (json.dumps(record, ensure_ascii=False).encode() for record in records):
        try:
            found += reader.conversations(row)
            rows.append(row)
        except RowError:
            pass
    return rows, found


def is_adaptable(parts: Made, conversation: Conversation) -> bool:
    try:
        parts.adapter.adapt(conversation)
    except RowError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEMPLATES), ROWS)
def test_any_conversations(name: str, records: list[dict[str, Any]]) -> None:
    parts = made(name)
    served(parts, [found for found in read(records)[1] if is_adaptable(parts, found)])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TEMPLATES), ROWS)
def test_any_rows_those_that_are_plain_decoded_as_such(name: str, records: list[dict[str, Any]]) -> None:
    parts = made(name)
    rows, conversations = read(records)
    assert parts.engine.locality is not None
    plain = PlainRows(MAPPING, parts.engine.locality)
    stencils = parts.stencils(plain.roles)
    draft = stencils.draft()
    plain.read(rows, SpecialTextFinder(()).find(rows)[1], (), draft)
    adapted = [parts.adapter.adapt(c) if is_adaptable(parts, c) else c for c in conversations]
    for row in set(range(len(rows))).difference(draft.rows):
        if is_adaptable(parts, conversations[row]):
            draft.add(row, adapted[row])
    filled = stencils.fill(draft)
    assert filled is None or all(is_adaptable(parts, conversations[row]) for row in filled.rows)
    check(parts, filled, adapted)


@cache
def bundled() -> Made:
    """The bundled tokenizer's own template, with the special tokens of its vocabulary."""
    row = json.dumps({"messages": [user("How many?"), assistant("Seven.")]}).encode()
    rendering = pipeline_of(str(ROOT / "examples" / "tokenizer"), [row]).renderings["default"]
    return Made(rendering.engine, rendering.splitter, rendering.adapter)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_any_rows_of_the_bundled_tokenizer(records: list[dict[str, Any]]) -> None:
    parts = bundled()
    served(parts, [found for found in read(records)[1] if is_adaptable(parts, found)])
