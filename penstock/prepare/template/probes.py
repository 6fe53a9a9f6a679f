"""Probe conversations for checking a template: every shape that templates are known to treat differently.

Each text of message n contains a marker word `<letter>zq<n>k` (U user, A assistant, S system, T tool, R reasoning,
C call arguments), so that a rendered text shows whether its regions are right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from penstock.prepare.chat.conversation import Conversation, Message
from penstock.prepare.template.rendered import Rendered

WORD: Final = re.compile(rb"[UASTRC]zq(\d+)k")


def _tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": f"The {name}.", "parameters": parameters}}


WEATHER: Final = _tool(
    "get_weather",
    {
        "city": {"type": "string", "description": "The city, e.g. Zürich"},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": "integer", "description": "How many"},
    },
    ["city"],
)
SEARCH: Final = _tool(
    "search",
    {
        "q": {"type": "string", "description": 'query <x> & "y" \\ 日本語'},
        "filters": {
            "type": "array",
            "items": {"type": "object", "properties": {"field": {"type": ["string", "null"]}}, "required": ["field"]},
        },
        "exact": {"type": "boolean", "default": False},
        "items": {"type": "array", "items": {"type": "integer"}},
        "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    ["q", "filters"],
)
PING: Final = {"type": "function", "function": {"name": "ping", "description": "", "parameters": {}}}


def user(n: int, **more: Any) -> Message:
    return {"role": "user", "content": f"Uzq{n}k?", **more}


def assistant(n: int, **more: Any) -> Message:
    return {"role": "assistant", "content": f"Azq{n}k.", **more}


def system(n: int) -> Message:
    return {"role": "system", "content": f"Szq{n}k."}


def result(n: int, call: int = 1) -> Message:
    content = f'{{"r": "Tzq{n}k", "l": [1, null]}}'
    return {"role": "tool", "tool_call_id": f"call0000{call}", "name": "get_weather", "content": content}


def calling(n: int, text: bool, call: int = 1, **more: Any) -> Message:
    arguments = {"city": f'Czq{n}k <&> "é" \'', "days": 3, "exact": True, "none": None, "deep": {"l": [1, {"a": []}]}}
    given = json.dumps(arguments, ensure_ascii=False) if text else arguments
    function = {"name": "get_weather", "arguments": given}
    calls = [{"id": f"call0000{call}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", **more, "tool_calls": calls}


def in_parts(*messages: Message) -> list[Message]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _with_calls(text: bool) -> list[Conversation]:
    tools = [WEATHER, SEARCH]
    chat = [system(0), user(1), calling(2, text), result(3), assistant(4), user(5), assistant(6)]
    twice = calling(1, text)
    twice["tool_calls"] = twice["tool_calls"] + calling(1, text, 2)["tool_calls"]
    reasoning = [
        user(0),
        calling(1, text, reasoning_content="Rzq1k"),
        result(2),
        assistant(3, reasoning_content="Rzq3k"),
        user(4),
        assistant(5, reasoning_content="Rzq5k\n"),
    ]
    return [
        Conversation(chat, tools),
        Conversation(chat),
        Conversation([user(0), twice, result(1 + 1), result(3, 2), assistant(4)], tools),
        Conversation([user(0), calling(1, text, content=None), result(2), assistant(3)], tools),
        Conversation(
            [user(0), calling(1, text, content="Azq1k"), result(2), calling(3, text, 2), result(4, 2), assistant(5)],
            tools,
        ),
        Conversation(reasoning, tools),
        Conversation([user(0), calling(1, text)], tools),
    ]


def _plain() -> list[Conversation]:
    bare = calling(1, False)
    del bare["content"]
    return [
        Conversation([user(0), assistant(1)]),
        Conversation([system(0), user(1), assistant(2), user(3), assistant(4), user(5), assistant(6)]),
        Conversation([user(0), assistant(1), user(2), assistant(3)], [WEATHER, PING]),
        Conversation([system(0), user(1), assistant(2)], [SEARCH]),
        Conversation([assistant(0), user(1), assistant(2)]),
        Conversation([user(0), user(1), assistant(2)]),
        Conversation([user(0), assistant(1), assistant(2)]),
        Conversation([user(0), assistant(1), user(2)]),
        Conversation([system(0), user(1), assistant(2), system(3), user(4), assistant(5)]),
        Conversation([user(0), assistant(1, reasoning_content="Rzq1k"), user(2), assistant(3, thinking="Rzq3k")]),
        Conversation([user(0), assistant(1, content="<think>\nRzq1k\n</think>\n\nAzq1k"), user(2), assistant(3)]),
        Conversation([user(0), assistant(1, content="a</think>\nAzq1k<think>b")]),
        Conversation(in_parts(system(0), user(1), assistant(2), user(3), assistant(4))),
        Conversation([{"role": "developer", "content": "Szq0k"}, user(1), assistant(2)]),
        Conversation([user(0), assistant(1), {"role": "critic", "content": "no"}, assistant(3)]),
        Conversation(
            [system(0), {"role": "user", "content": " \n Uzq1k \t\n"}, assistant(2, content="\n Azq2k é日本 \n")]
        ),
        Conversation([{"role": "system", "content": ""}, {"role": "user", "content": ""}, assistant(2, content="")]),
        Conversation([user(0), bare, result(2), assistant(3)], [WEATHER]),
        Conversation(
            [user(0, name="bob", weight=0), assistant(1, tool_calls=None), user(2), assistant(3, tool_calls=[])]
        ),
        Conversation([user(0), {"role": "assistant", "content": None}]),
        Conversation([user(0), {"role": "assistant"}]),
        Conversation([{"content": "Uzq0k"}, assistant(1)]),
        Conversation([user(0), assistant(1, content={"a": "Azq1k"})]),
        Conversation(
            [user(0), assistant(1), {"role": "tool", "content": {"r": ["Tzq2k", 5]}}, assistant(3)], [WEATHER]
        ),
        Conversation([system(0)]),
        Conversation([]),
        Conversation(
            [user(0), assistant(1), user(2), assistant(3)], variables={"enable_thinking": False, "thinking": False}
        ),
        Conversation(
            [user(0), assistant(1), user(2), assistant(3)], variables={"enable_thinking": True, "thinking": True}
        ),
    ]


PROBES: Final = (*_plain(), *_with_calls(text=False), *_with_calls(text=True))


# ---- checks of a template on the probes: that the engines agree, and that the regions are right
#
# Regions are wrong if a marker word of one message lies in a span of another and either of them is an assistant
# message; they are uncertain if a word of an assistant lies in no span. In both cases the template's regions are
# unknown. The checks take about 0.1 s per template.


Row = tuple[bytes, bool, list[tuple[int, int, int]], list[tuple[int, int]], bool]


def rows(regions: Rendered) -> Iterator[Row]:
    """Yields each row: its text, whether its regions are known, its spans and tags in the text, whether it failed."""
    spans: list[list[tuple[int, int, int]]] = [[] for _ in regions.text_ends]
    tags: list[list[tuple[int, int]]] = [[] for _ in regions.text_ends]
    begins = [0, *regions.text_ends.tolist()]
    columns = (regions.span_rows, regions.span_messages, regions.span_starts, regions.span_ends)
    for row, message, start, end in zip(*(column.tolist() for column in columns), strict=True):
        spans[row].append((message, start - begins[row], end - begins[row]))
    columns3 = (regions.tag_rows, regions.tag_starts, regions.tag_ends)
    for row, start, end in zip(*(column.tolist() for column in columns3), strict=True):
        tags[row].append((start - begins[row], end - begins[row]))
    for row, end in enumerate(begins[1:]):
        text = regions.data[begins[row] : end]
        yield text, bool(regions.known[row]), spans[row], tags[row], row in regions.errors


def first_difference(served: Rendered, expected: Rendered) -> str:
    """The first difference between the engines on the probes, or an empty string."""
    for number, (one, other) in enumerate(zip(rows(served), rows(expected), strict=True)):
        for what, a, b in zip(("text", "knowledge", "spans", "tags", "refusal"), one, other, strict=True):
            if a != b:
                return f"what the machine renders differently: the {what} of probe {number}"
    words = {number: str(error) for number, error in served.errors.items()}
    if words != {number: str(error) for number, error in expected.errors.items()}:
        return "what the machine refuses in other words"
    return ""


def first_region_error(rendered: Rendered, conversations: Sequence[Conversation]) -> str:
    """The first marker word that does not lie in a span of its own message, or an empty string."""
    for number, (row, conversation) in enumerate(zip(rows(rendered), conversations, strict=True)):
        text, known, spans, _, failed = row
        if failed or not known:
            continue
        speakers = [message.get("role") == "assistant" for message in conversation.messages]
        for word in WORD.finditer(text):
            owner = next((m for m, start, end in spans if start <= word.start() < end), None)
            speaker = int(word[1])
            if owner is None and speakers[speaker]:
                return f"text of an assistant appears outside of the messages (built-in conversation {number})"
            if owner not in (None, speaker) and (speakers[speaker] or (owner is not None and speakers[owner])):
                return f"text of message {speaker} appears inside message {owner} (built-in conversation {number})"
    return ""
