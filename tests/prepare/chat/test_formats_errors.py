"""The kind and the exact wording of every row error."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from penstock.errors import RowError
from penstock.prepare.chat.formats import detect
from penstock.prepare.chat.rows import RowReader
from penstock.spelling import as_arguments

HI = {"role": "user", "content": "Hi"}
HO = {"role": "assistant", "content": "Ho"}
GOOD: dict[str, dict[str, Any]] = {
    "messages": {"messages": [HI, HO]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "completion": {"prompt": "a", "completion": "b"},
    "preference": {"prompt": [HI], "chosen": [HO], "rejected": [HO]},
    "implicit": {"chosen": [HI, HO], "rejected": [HI, HO]},
    "text": {"text": "a"},
}
PART = 'A text part is {"type": "text", "text": "…"}'
CALL = 'A tool call is {"type": "function", "function": {"name": "f", "arguments": {…}}}'
TOOL = 'Tools are a list such as [{"type": "function", "function": {"name": "f", "parameters": {…}}}], or its JSON'
LIST = 'Messages are a list such as [{"role": "user", "content": "Hi"}, …]'
PAIRS = 'Earlier turns are pairs such as [["question", "answer"], …]'


def refusal(kind: str, row: bytes) -> RowError:
    with pytest.raises(RowError) as caught:
        RowReader(detect([GOOD[kind]])).conversations(row)
    return caught.value


@pytest.mark.parametrize(
    ("row", "kind", "text"),
    [
        (
            b'{"messages": [',
            "invalid_json",
            "invalid JSON at byte 14: unexpected end of data. Each row must be one JSON object",
        ),
        (
            '{"messages": "ä", x}'.encode(),
            "invalid_json",
            "invalid JSON at byte 19: unexpected character, expected a string key. Each row must be one JSON object",
        ),
        (
            b'{"messages": NaN}',
            "invalid_json",
            "invalid JSON at byte 13: unexpected character, expected a JSON value. Each row must be one JSON object",
        ),
        (
            b'{"messages": "a\xffb"}',
            "invalid_utf8",
            "byte 15 (0xff) is not valid UTF-8 (invalid start byte). Write the file as UTF-8",
        ),
        (
            b'{"messages": "\xed\xa0\x80"}',
            "invalid_utf8",
            "byte 14 (0xed) is not valid UTF-8 (invalid continuation byte). Write the file as UTF-8",
        ),
        (
            b'{"messages": "\xc3\xa4\\ud83d!"}',
            "lone_surrogate",
            "the escape \\ud83d at byte 16 is half of a surrogate pair. "
            "Write the whole character, or remove the escape",
        ),
        (
            b'{"messages": "\\udc00"}',
            "lone_surrogate",
            "the escape \\udc00 at byte 14 is half of a surrogate pair. "
            "Write the whole character, or remove the escape",
        ),
        (
            b"[1]",
            "not_an_object",
            'the row is a list, not a JSON object. Each row must be an object such as {"messages": […]}',
        ),
    ],
)
def test_rows_that_are_not_json_objects(row: bytes, kind: str, text: str) -> None:
    error = refusal("messages", row)
    assert (error.kind, str(error)) == (kind, as_arguments(text))


MESSAGES: list[tuple[object, str, str]] = [
    (None, "missing_column", "column 'messages' is null. Remove the row or give it a value"),
    ("Hi", "no_messages", f"column 'messages' is a string, not a list of messages. {LIST}"),
    ([], "no_messages", "column 'messages' is an empty list. Remove the row or give it messages"),
    (["Hi"], "bad_message", "messages[0] is a string, not a message. Make it an object"),
    (
        [HI, {"role": "bot", "content": "Ho"}],
        "unknown_role",
        "role 'bot' is unknown; expected system, user, assistant or tool. Map it with --role bot=assistant",
    ),
    (
        [{"role": "human", "content": "Hi"}],
        "unknown_role",
        "role 'human' is unknown; expected system, user, assistant or tool. Map it with --role human=user",
    ),
    (
        [HI, {"role": "ipython", "content": "4"}],
        "unknown_role",
        "role 'ipython' is unknown; expected system, user, assistant or tool. Map it with --role ipython=tool",
    ),
    (
        [HI, {"role": "narrator", "content": "Night falls."}],
        "unknown_role",
        "role 'narrator' is unknown; expected system, user, assistant or tool. "
        "Say which of them it is with --role narrator=…",
    ),
    (
        [{"role": "Asistant", "content": "Hi"}],
        "unknown_role",
        "role 'Asistant' is unknown; expected system, user, assistant or tool. Map it with --role Asistant=assistant",
    ),
    (
        [{"role": ["user"], "content": ""}],
        "unknown_role",
        "the role of messages[0] is a list; expected system, user, assistant or tool",
    ),
    (
        [{"from": "human", "value": "Hi"}],
        "unknown_role",
        "messages[0] has no 'role'; its keys are from, value. Name the keys with --role-key and --content-key",
    ),
    (
        [HI],
        "no_assistant",
        "no message has the role assistant, so nothing can be trained. "
        "Remove the row, or map the role that answers (--role NAME=assistant)",
    ),
    (
        [{"role": "user", "content": 5}, HO],
        "bad_content",
        "messages[0].content is a number; expected a string or a list of text parts. "
        "Give it as text, for example as its JSON",
    ),
    (
        [HI, HO, {"role": "tool", "content": {"a": 1}}],
        "bad_content",
        "messages[2].content is an object; expected a string or a list of text parts. "
        "Give it as text, for example as its JSON",
    ),
    (
        [{"role": "user", "content": None}, HO],
        "bad_content",
        "messages[0].content is null; a message of role user needs content",
    ),
    (
        [{"role": "user"}, HO],
        "bad_content",
        "messages[0].content is missing (keys: role); a message of role user needs content",
    ),
    (
        [HI, {"role": "assistant", "content": None, "tool_calls": []}],
        "bad_content",
        "messages[1].content is null; a message of role assistant needs content, tool_calls or reasoning_content",
    ),
    (
        [{"role": "user", "content": ["Hi"]}, HO],
        "bad_content",
        f"messages[0].content[0] is a string; expected a text part. {PART}",
    ),
    (
        [{"role": "user", "content": [{"type": "tool_use"}]}, HO],
        "bad_content",
        f"messages[0].content[0] has type 'tool_use'; expected a text part. {PART}",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}, HO],
        "image_content",
        "messages[0].content[1] is a part of type 'image_url'; images, audio and video are not served. "
        "Remove such parts or rows",
    ),
    (
        [HI, {**HO, "tool_calls": "x(f)"}],
        "bad_tool_calls",
        "messages[1].tool_calls is a string that is not JSON (unexpected character, expected a JSON value: "
        f"line 1 column 1 (char 0)). {CALL}",
    ),
    (
        [HI, {**HO, "tool_calls": '{"a": 1}'}],
        "bad_tool_calls",
        f"messages[1].tool_calls[0] has no function name. {CALL}",
    ),
    (
        [HI, {**HO, "tool_calls": '[{"function": {}}]'}],
        "bad_tool_calls",
        f"messages[1].tool_calls[0] has no function name. {CALL}",
    ),
    (
        [HI, {**HO, "tool_calls": [{"id": 1}]}],
        "bad_tool_calls",
        f"messages[1].tool_calls[0] has no function name. {CALL}",
    ),
    (
        [HI, {**HO, "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        "bad_tool_calls",
        "the arguments of messages[1].tool_calls[0] (f) are a list. Give them as an object or as a JSON string",
    ),
    (
        [HI, {**HO, "weight": "high"}],
        "bad_weight",
        "messages[1].weight is 'high'; expected true, false, null or a number from 0 up",
    ),
    (
        [HI, {**HO, "weight": -1}],
        "bad_weight",
        "messages[1].weight is -1; expected true, false, null or a number from 0 up",
    ),
    ([HI, {**HO, "masked": 0.5}], "bad_weight", "messages[1].masked is 0.5; expected true, false or null"),
    ([HI, {**HO, "weight": 1, "train": False}], "bad_weight", "messages[1] has two weights, 1 and 0. Keep one"),
]


@pytest.mark.parametrize(("messages", "kind", "text"), MESSAGES)
def test_bad_messages(messages: object, kind: str, text: str) -> None:
    error = refusal("messages", json.dumps({"messages": messages}).encode())
    assert (error.kind, str(error)) == (kind, as_arguments(text))


MORE: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "messages",
        {"text": "a", "id": 1},
        "missing_column",
        "there is no column 'messages'; the row's columns are text, id (format text), unlike those of the first rows "
        "(format messages). Prepare rows of different formats apart and mix the datasets (ps.mix)",
    ),
    (
        "messages",
        {},
        "missing_column",
        "there is no column 'messages'; the row's columns are (none). Name the column with --messages-key",
    ),
    (
        "messages",
        {"messages": [HI, HO], "tools": {"a": 1}},
        "bad_tools",
        f"column 'tools' is an object, not a list of tools. {TOOL}",
    ),
    ("messages", {"messages": [HI, HO], "tools": [1]}, "bad_tools", f"tools[0] is a number, not an object. {TOOL}"),
    (
        "messages",
        {"messages": [HI, HO], "tools": "["},
        "bad_tools",
        f"column 'tools' is a string that is not JSON (unexpected end of data: line 1 column 2 (char 1)). {TOOL}",
    ),
    ("messages", {"messages": [HI, HO], "system": 1}, "bad_content", "column 'system' is a number; expected a string"),
    (
        "messages",
        {"messages": [{"role": "system", "content": "A"}, HI, HO], "system": "B"},
        "system_conflict",
        "column 'system' and the first message are two different system prompts. Keep one of them",
    ),
    (
        "messages",
        {"messages": [HI, HO], "images": ["a.png"]},
        "image_content",
        "column 'images' is not empty; images, audio and video are not served. "
        "Remove the column, or the rows that use it",
    ),
    (
        "messages",
        {"messages": [HI, HO], "chat_template_kwargs": [1]},
        "bad_variables",
        "column 'chat_template_kwargs' is a list; expected an object",
    ),
    (
        "messages",
        {"messages": [HI, HO], "chat_template_kwargs": {"tools": []}},
        "bad_variables",
        "column 'chat_template_kwargs' sets 'tools', which is not a template variable. Remove it",
    ),
    (
        "messages",
        {"messages": [HI, HO], "chat_template_kwargs": {"enable_thinking": True, "max_length": 9}},
        "bad_variables",
        "column 'chat_template_kwargs' sets 'max_length', which is not a template variable. Remove it",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "bot", "value": "Hi"}]},
        "unknown_role",
        "role 'bot' is unknown; expected system, human, gpt, tool, observation or function_call. "
        "Map it with --role bot=assistant",
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "f(1)"}]},
        "bad_tool_calls",
        "conversations[0] is a function call, but its text is not the JSON of one. "
        'Its text must be such as {"name": "f", "arguments": {…}}',
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": "a", "content": "b"}]},
        "bad_message",
        "conversations[0] has its role or content twice: from, value, content. Keep one",
    ),
    ("alpaca", {"instruction": 1, "output": "b"}, "bad_content", "column 'instruction' is a number; expected a string"),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": "x"},
        "bad_history",
        f"column 'history' is a string, not a list. {PAIRS}",
    ),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["x"]]},
        "bad_history",
        f"history[0] is not a pair of strings. {PAIRS}",
    ),
    (
        "completion",
        {"prompt": "a", "completion": [HO]},
        "bad_content",
        "one of 'prompt' and 'completion' is a string and the other is not. "
        "Give both as strings or both as lists of messages",
    ),
    (
        "completion",
        {"prompt": "a", "completion": ""},
        "empty_text",
        "column 'completion' is an empty string. Remove the row",
    ),
    (
        "completion",
        {"prompt": "a", "completion": "b", "system": "S"},
        "bad_content",
        "column 'system' has a value, but strings are not rendered by a template. "
        "Give the row's texts as lists of messages, or remove the column",
    ),
    (
        "preference",
        {"prompt": [HI], "chosen": [HO], "rejected": "x"},
        "bad_content",
        "one of 'chosen' and 'rejected' is a string and the other is not. "
        "Give both as strings or both as lists of messages",
    ),
    (
        "preference",
        {"prompt": [HI], "chosen": [HO], "rejected": [HO, HI]},
        "no_assistant",
        "rejected ends in a message of role user; expected assistant",
    ),
    (
        "preference",
        {"prompt": [HI], "chosen": [HO], "rejected": [{"role": "user", "content": "Other"}, HO]},
        "prompt_mismatch",
        "rejected starts with a message of role user that is not the row's prompt. "
        "Give only the answer there, or repeat the prompt exactly in both",
    ),
    (
        "implicit",
        {"chosen": [HI, HO], "rejected": [{"role": "user", "content": "Other"}, HO]},
        "prompt_mismatch",
        "chosen and rejected have no message in common and the row has no prompt. "
        "Name the prompt's column with --prompt-key, or start both with the same messages",
    ),
    ("text", {"text": ""}, "empty_text", "column 'text' is an empty string. Remove the row"),
    ("text", {"text": ["a"]}, "bad_content", "column 'text' is a list; expected a string"),
]


@pytest.mark.parametrize(("kind_of_rows", "row", "kind", "text"), MORE)
def test_bad_rows(kind_of_rows: str, row: dict[str, Any], kind: str, text: str) -> None:
    error = refusal(kind_of_rows, json.dumps(row).encode())
    assert (error.kind, str(error)) == (kind, as_arguments(text))
    assert str(pickle.loads(pickle.dumps(error.at("a.jsonl:3")))) == f"a.jsonl:3: {as_arguments(text)}"
