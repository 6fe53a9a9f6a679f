"""The conversations that each row format is read as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.prepare.chat.conversation import Conversation, Role
from penstock.prepare.chat.formats import FormatOptions, detect
from penstock.prepare.chat.rows import RowReader


def read(row: dict[str, Any], **options: Any) -> tuple[Conversation, ...]:
    return RowReader(detect([row], FormatOptions(**options))).conversations(json.dumps(row).encode())


def only(row: dict[str, Any], **options: Any) -> Conversation:
    (conversation,) = read(row, **options)
    return conversation


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_plain_messages_are_unchanged() -> None:
    messages = [system("S"), {"role": "developer", "content": "D"}, user("Hi"), bot("Ho")]
    assert only({"messages": messages}) == Conversation(messages)


def test_messages_keep_their_extra_keys() -> None:
    messages = [
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm"},
        {"role": "tool", "content": None, "tool_call_id": "c1"},
        {"role": "assistant", "content": [{"type": "text", "text": "Ho"}], "extra": {"x": [1]}},
    ]
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    assert only({"messages": messages, "tools": [TOOL]}) == Conversation(kept, [TOOL])


def test_roles_are_mapped() -> None:
    row = {"messages": [{"role": "me", "content": "Hi"}, {"role": "bot", "content": "Ho"}]}
    assert only(row, roles={"bot": "assistant", "me": "user"}).messages == [user("Hi"), bot("Ho")]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_may_be_json(tools: object) -> None:
    assert only({"messages": [user("Hi"), bot("Ho")], "tools": tools}).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, "", "[]", "null", " "])
def test_empty_tools_are_none(tools: object) -> None:
    assert only({"messages": [user("Hi"), bot("Ho")], "tools": tools}).tools is None


def test_an_empty_list_of_tools_is_kept() -> None:
    assert only({"messages": [user("Hi"), bot("Ho")], "tools": []}).tools == []


def test_a_cached_json_string_of_tools_reads_the_same() -> None:
    row = {"messages": [user("Hi"), bot("Ho")], "tools": json.dumps([TOOL])}
    reader = RowReader(detect([row]))
    assert reader.conversations(json.dumps(row).encode()) == reader.conversations(json.dumps(row).encode())


def test_template_variables_come_from_their_column() -> None:
    row = {"messages": [user("Hi"), bot("Ho")], "chat_template_kwargs": {"enable_thinking": False}}
    assert only(row).variables == {"enable_thinking": False}
    row["chat_template_kwargs"] = '{"enable_thinking": false}'
    assert only(row).variables == {"enable_thinking": False}
    assert only({**row, "chat_template_kwargs": {}}).variables is None


def test_a_system_column_comes_first() -> None:
    row = {"messages": [user("Hi"), {**bot("Ho"), "weight": 0.5}], "system": "S"}
    conversation = only(row)
    assert conversation.messages == [system("S"), user("Hi"), bot("Ho")]
    assert conversation.weights == (None, None, 0.5)
    assert only({**row, "system": ""}).messages == [user("Hi"), bot("Ho")]
    assert only({"messages": [system("S"), user("Hi"), bot("Ho")], "system": "S"}).messages[0] == system("S")


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({"weight": 0.25}, 0.25),
        ({"train": False}, 0.0),
        ({"trainable": True}, 1.0),
        ({"masked": True}, 0.0),
        ({"masked": 0}, 1.0),
        ({"loss": True}, 1.0),
        ({"loss_scale": 2}, 2.0),
        ({"loss_weight": 0}, 0.0),
        ({"weight": None}, None),
        ({"weight": None, "train": True}, 1.0),
        ({"weight": 0, "masked": True}, 0.0),
    ],
)
def test_weights_are_removed_from_messages(given: dict[str, Any], weight: float | None) -> None:
    conversation = only({"messages": [user("Hi"), {**bot("Ho"), **given}]})
    assert conversation.messages == [user("Hi"), bot("Ho")]
    assert conversation.weights == (None if weight is None else (None, weight))


def test_other_weight_keys() -> None:
    row = {"messages": [user("Hi"), {**bot("Ho"), "score": 3, "weight": "kept"}]}
    conversation = only(row, weight_keys=("score",))
    assert conversation.weights == (None, 3.0)
    assert conversation.messages[1]["weight"] == "kept"


def test_sharegpt() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "Ho", "weight": 1},
        ],
        "tools": "[]",
    }
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert only(row) == Conversation(
        [
            system("S"),
            user("Hi"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1"},
            bot("Ho"),
        ],
        None,
        (None, None, None, None, 1.0),
    )


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_tool_calls_may_be_one_call_and_text(wrapped: bool, as_text: bool, as_list: bool) -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    calls: Any = {"type": "function", "function": call} if wrapped else call
    calls = [calls] if as_list else calls
    row = {"messages": [user("Hi"), {**bot(""), "tool_calls": json.dumps(calls) if as_text else calls}]}
    assert only(row).messages[1]["tool_calls"] == (calls if as_list else [calls])


def test_sharegpt_calls_may_be_several() -> None:
    calls = [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": {}}]
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": json.dumps(calls)}]}
    message = only(row).messages[1]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]


def test_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "S", "history": [["Hi", "Ho"]]}
    assert only(row) == Conversation([system("S"), user("Hi"), bot("Ho"), user("Add.\n\n1 + 1"), bot("2")])
    assert only({"instruction": "Add.", "input": "", "output": "2"}).messages == [user("Add."), bot("2")]
    assert only({"instruction": "Add.", "input": None, "output": "2"}).messages == [user("Add."), bot("2")]
    assert only({"instruction": "", "input": "x", "output": "2"}).messages == [user("x"), bot("2")]


def test_query_response() -> None:
    row = {"query": "Q", "response": "R", "history": [["a", "b"], ["c", "d"]]}
    assert only(row).messages == [user("a"), bot("b"), user("c"), bot("d"), user("Q"), bot("R")]


def test_prompt_and_completion() -> None:
    assert only({"prompt": "P", "completion": " C"}).texts == ((Role.USER, "P"), (Role.ASSISTANT, " C"))
    assert only({"prompt": "", "completion": "C"}).texts == ((Role.ASSISTANT, "C"),)
    assert only({"prompt": [user("P")], "completion": [bot("C")]}) == Conversation([user("P"), bot("C")])
    assert only({"prompt": [user("P")], "completion": "C"}) == Conversation([user("P"), bot("C")])
    weighted = only({"prompt": [user("P")], "completion": [{**bot("C"), "weight": 2}], "tools": [TOOL]})
    assert weighted == Conversation([user("P"), bot("C")], [TOOL], (None, 2.0))


def test_text() -> None:
    assert only({"text": "T"}) == Conversation([], texts=((Role.ASSISTANT, "T"),))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("P")], "chosen": [bot("C")], "rejected": [bot("R")]},
        {"messages": [user("P")], "chosen": [bot("C")], "rejected": [bot("R")]},
        {"messages": [user("P")], "chosen": bot("C"), "rejected": bot("R")},
        {
            "conversations": [{"from": "human", "value": "P"}],
            "chosen": {"from": "gpt", "value": "C"},
            "rejected": {"from": "gpt", "value": "R"},
        },
        {"prompt": [user("P")], "chosen": "C", "rejected": "R"},
        {"prompt": "P", "chosen": [bot("C")], "rejected": [bot("R")]},
        {"prompt": "P", "chosen": [user("P"), bot("C")], "rejected": [user("P"), bot("R")]},
        {"prompt": [user("P")], "chosen": [user("P"), bot("C")], "rejected": [user("P"), bot("R")]},
        {"chosen": [user("P"), bot("C")], "rejected": [user("P"), bot("R")]},
        {"instruction": "P", "chosen": "C", "rejected": "R"},
        {"question": "P", "chosen": "C", "rejected": "R"},
    ],
)
def test_preference_messages(row: dict[str, Any]) -> None:
    assert read(row) == (Conversation([user("P"), bot("C")]), Conversation([user("P"), bot("R")]))
    chosen, rejected = read({**row, "tools": [TOOL], "system": "S"})
    assert chosen == Conversation([system("S"), user("P"), bot("C")], [TOOL])
    assert rejected == Conversation([system("S"), user("P"), bot("R")], [TOOL])


def test_a_repeated_prompt_may_follow_a_system_prompt() -> None:
    row = {"prompt": "P", "chosen": [system("S"), user("P"), bot("C")], "rejected": [system("S"), user("P"), bot("R")]}
    assert read(row)[1].messages == [system("S"), user("P"), bot("R")]


def test_preference_strings() -> None:
    row = {"prompt": "P", "chosen": " C", "rejected": " R"}
    assert [side.texts for side in read(row)] == [
        ((Role.USER, "P"), (Role.ASSISTANT, " C")),
        ((Role.USER, "P"), (Role.ASSISTANT, " R")),
    ]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Human: a\n\nAssistant: Sure", "Human: a\n\nAssistant: Sorry", "Human: a\n\nAssistant:"),
        ("Q: one A", "Q: one B", "Q: one"),
        ("yes", "no", ""),
        ("same words", "same words", "same"),
        ("a b", "a b c", "a"),
    ],
)
def test_the_implicit_prompt_of_strings_ends_before_a_word(chosen: str, rejected: str, prompt: str) -> None:
    for side, whole in zip(read({"chosen": chosen, "rejected": rejected}), (chosen, rejected), strict=True):
        assert side.texts is not None
        assert "".join(text for _, text in side.texts) == whole
        assert [text for role, text in side.texts if role is Role.USER] == ([prompt] if prompt else [])


def calling(arguments: object) -> list[dict[str, Any]]:
    return [user("Hi"), {**bot(""), "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize("number", [2**63, 2**64, 2**64 + 1, -(2**63) - 1, 10**30 + 7])
def test_integers_of_any_size_stay_exact(number: int) -> None:
    conversation = only({"messages": calling({"x": number, "y": 0.5, "z": 1e30})})
    arguments = conversation.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"x": number, "y": 0.5, "z": 1e30}
    assert isinstance(arguments["x"], int)
    assert isinstance(arguments["z"], float)
    text = json.dumps([{"n": number}])
    assert only({"messages": [user("Hi"), bot("Ho")], "tools": text}).tools == [{"n": number}]


def test_a_byte_order_mark_is_ignored() -> None:
    row = {"messages": calling({"x": 2**70})}
    reader = RowReader(detect([row]))
    plain = json.dumps(row).encode()
    assert reader.conversations(b"\xef\xbb\xbf" + plain) == reader.conversations(plain)


NULLS = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "Weather?", "tool_calls": None, "reasoning_content": None},
    {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "sunny", "name": None},
    {"role": "assistant", "content": "Sunny.", "tool_calls": None, "thinking": None},
]
KEYS = (  # prints the keys that messages have
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.keys() | list | sort | join(',') }}:"
    "{{ m.content if m.content is defined else 'missing' }}"
    "{{ m.tool_calls | tojson if 'tool_calls' in m }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("fast", [True, False])
def test_null_keys_of_messages_are_dropped_as_transformers_does(tokenizer: Path, tmp_path: Path, fast: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "template.jinja").write_text(KEYS)
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": NULLS}) + "\n")
    ds = ps.prepare(
        source, tokenizer=str(tokenizer), template=str(tmp_path / "template.jinja"), cache=tmp_path / "cache",
        workers="1", fast=fast, regions="structure",
    )  # fmt: skip
    own = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    expected = own.apply_chat_template(NULLS, chat_template=KEYS, tokenize=True, return_dict=True)["input_ids"]
    assert ds.input_ids(0).tolist() == expected
    messages = ds.conversation(0)["messages"]
    assert [sorted(message) for message in messages] == [
        ["content", "role"], ["content", "role"], ["role", "tool_calls"], ["content", "role"], ["content", "role"],
    ]  # fmt: skip
    assert messages[2]["tool_calls"][0]["id"] is None  # only keys of messages are dropped
