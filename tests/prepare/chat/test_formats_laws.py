"""Laws of reading rows: content is preserved, and any bytes are either read or refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Conversation, Role
from penstock.prepare.chat.formats import FormatOptions, detect
from penstock.prepare.chat.rows import RowReader

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=8)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
messages = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, roles, texts), max_size=5).map(
    lambda given: [*given, {"role": "assistant", "content": "end"}]
)
SAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": ""}]}


def reader(sample: dict[str, Any], **options: Any) -> RowReader:
    return RowReader(detect([sample], FormatOptions(**options)))


@given(messages)
def test_messages_round_trip(given: list[dict[str, Any]]) -> None:
    (conversation,) = reader(SAMPLE).conversations(json.dumps({"messages": given}).encode())
    assert conversation.messages == given
    assert conversation == Conversation(given)


@given(messages, st.dictionaries(texts, values, max_size=3), st.booleans())
def test_arguments_and_extra_keys_are_unchanged(
    given: list[dict[str, Any]], value: dict[str, Any], as_text: bool
) -> None:
    function = {"name": "f", "arguments": json.dumps(value) if as_text else value}
    given = [*given, {"role": "assistant", "content": "", "tool_calls": [{"function": function}], "extra": value}]
    row = json.dumps({"messages": given, "tools": [{"name": "f", "parameters": value}]}).encode()
    (conversation,) = reader(SAMPLE).conversations(row)
    assert json.dumps(conversation.messages) == json.dumps(given)
    assert json.dumps(conversation.tools) == json.dumps([{"name": "f", "parameters": value}])


@given(messages)
def test_sharegpt_and_messages_agree(given: list[dict[str, Any]]) -> None:
    names = {"user": "human", "assistant": "gpt", "tool": "observation"}
    renamed = [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in given]
    sample = {"conversations": [{"from": "human", "value": ""}]}
    (conversation,) = reader(sample).conversations(json.dumps({"conversations": renamed}).encode())
    assert conversation.messages == given


@given(texts, texts.filter(bool), texts.filter(bool))
def test_strings_of_a_preference_pair_are_unchanged(prompt: str, chosen: str, rejected: str) -> None:
    row = {"chosen": prompt + chosen, "rejected": prompt + rejected}
    sides = reader({"chosen": "a", "rejected": "b"}).conversations(json.dumps(row).encode())
    assert len(sides) == 2
    for side, whole in zip(sides, row.values(), strict=True):
        assert side.texts is not None
        assert "".join(text for _, text in side.texts) == whole
        assert side.texts[-1][0] is Role.ASSISTANT
        assert all(text for _, text in side.texts)
    assert [p for p in sides[0].texts or () if p[0] is Role.USER] == [
        p for p in sides[1].texts or () if p[0] is Role.USER
    ]


SAMPLES = [
    SAMPLE,
    {"conversations": [{"from": "human", "value": ""}]},
    {"instruction": "a", "output": "b"},
    {"prompt": "a", "completion": "b"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"text": "a"},
]
column_names = st.sampled_from(
    [
        "messages",
        "conversations",
        "tools",
        "system",
        "chat_template_kwargs",
        "instruction",
        "input",
        "output",
        "history",
        "prompt",
        "completion",
        "chosen",
        "rejected",
        "text",
        "images",
    ]
)
keys = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "weight",
        "masked",
        "reasoning_content",
        "type",
        "text",
        "function",
    ]
)
some_roles = roles | st.sampled_from(["human", "gpt", "function_call", "bot"])
loose = st.dictionaries(keys, values | some_roles, max_size=4) | st.fixed_dictionaries(
    {"role": some_roles, "content": values}, optional={"tool_calls": values, "weight": values}
)


@given(st.sampled_from(SAMPLES), st.dictionaries(column_names, values | st.lists(loose, max_size=4), max_size=6))
def test_any_object_is_read_or_refused(sample: dict[str, Any], row: dict[str, Any]) -> None:
    try:
        conversations = reader(sample).conversations(json.dumps(row).encode())
    except RowError as error:
        assert error.kind and error.reason
    else:
        assert len(conversations) == (2 if "chosen" in sample else 1)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(row: bytes) -> None:
    try:
        reader(SAMPLE).conversations(row)
    except RowError as error:
        assert error.kind in {"invalid_json", "invalid_utf8", "not_an_object", "missing_column", "lone_surrogate"}
