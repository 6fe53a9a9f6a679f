"""Checks whether a message's content, reasoning, name, tool calls and other keys appear in the text it printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntFlag
from typing import Any, NamedTuple

from jinja2 import nodes

from penstock.prepare.chat.conversation import Message
from penstock.prepare.chat.formats import REASONING_KEYS

_REASONING_DETAILS = "reasoning_details"  # OpenRouter's, beside the same reasoning under another name
_CHECKED_KEYS = (  # keys of messages with a check of their own, and keys that are not text for a model
    *("role", "content", "name", "tool_calls", "function_call", *REASONING_KEYS),
    *("id", "tool_call_id", "timestamp"),
)
_TAG = re.compile("</?think>")


class MessageFlag(IntFlag):
    """What is known about a rendered message; stored as uint8."""

    HAS_CALLS = 1  # the message has tool calls, or the `function_call` that preceded them in OpenAI's API …
    CALLS_PRINTED = 2  # … and its text names each called function as often as it is called
    HAS_REASONING = 8  # an assistant message has reasoning, in its own field or in its content …
    REASONING_PRINTED = 16  # … and its text contains it, stripped
    NAME_DROPPED = 32  # the message has a speaker's name, which its text does not contain
    CONTENT_PRINTED = 4  # its content (of an assistant without the reasoning) is in the text, or there is none
    KEY_DROPPED = 64  # another key has text that is not in the text


class Shown(NamedTuple):
    """The text that a message printed (the whole text if regions are unknown), and the whole text."""

    own: bytes
    whole: bytes


def flags_of(message: Message, shown: Shown, keys: Mapping[str, str]) -> MessageFlag:
    """The flags of a message, given the keys that the template uses.

    The text of an assistant must appear in what the message printed, that of others anywhere.
    """
    flags = MessageFlag(0)
    is_answer = message.get("role") == "assistant"
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else None)
    if calls:
        flags |= MessageFlag.HAS_CALLS
        if _prints_calls(calls, shown.own):
            flags |= MessageFlag.CALLS_PRINTED
    said, reasoning = _texts(message)
    if all(_appears(words, shown.own if is_answer else shown.whole) for words in said):
        flags |= MessageFlag.CONTENT_PRINTED
    if reasoning:
        flags |= MessageFlag.HAS_REASONING
        if all(words.encode(errors="replace") in shown.own for words in reasoning):
            flags |= MessageFlag.REASONING_PRINTED
    name = message.get("name")
    if isinstance(name, str) and name and message.get("role") != "tool":  # a tool result is named by its call
        content = message.get("content")
        in_content = content.count(name) if isinstance(content, str) else 0
        if shown.own.count(name.encode(errors="replace")) <= in_content:
            flags |= MessageFlag.NAME_DROPPED
    if not all(_appears(words, shown.whole) for words in _others(message, keys)):
        flags |= MessageFlag.KEY_DROPPED
    return flags


def used_keys(tree: nodes.Template) -> dict[str, str]:
    """The keys of messages with a check of their own, and those that a template may use: all names in its expressions.

    The latter have the value "named". They come last, because the usual keys are looked up one after the other.
    """
    names = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return dict.fromkeys(_CHECKED_KEYS, "") | dict.fromkeys(sorted(names.difference(_CHECKED_KEYS)), "named")


def shows_tools(tools: list[Any] | None, messages: Sequence[Message], text: bytes) -> bool:
    """Whether a text shows every tool: its name and the first line of its description.

    A tool without a description must be named more often than it is called.
    """
    for tool in tools or ():
        name = _name(tool)
        function = tool.get("function", tool)
        about = function.get("description") if isinstance(function, dict) else None
        line = about.strip().partition("\n")[0].strip() if isinstance(about, str) else ""
        calls = 0 if line else [_name(call) for call in _calls(messages)].count(name)
        if name and not (_occurs(name, calls + 1, text) and (not line or _occurs(line, 1, text))):
            return False
    return True


def shows_arguments(message: Message, text: bytes) -> bool:
    """Whether a text shows the longest string in the arguments of each call."""
    calls = message.get("tool_calls")
    functions = (
        [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    words = [_longest_text(function.get("arguments")) for function in functions if isinstance(function, dict)]
    return bool(words) and all(words) and all(_appears(one, text) for one in words)


def shows_documents(variables: dict[str, Any] | None, text: bytes) -> bool:
    """Whether a text shows the longest string of each document in a row's template variables."""
    documents = (variables or {}).get("documents")
    listed = documents if isinstance(documents, list) else [documents]
    return all(_appears(_longest_text(document), text) for document in listed)


def _calls(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        calls = message.get("tool_calls")
        yield from calls if isinstance(calls, list) else ()


def _texts(message: Message) -> tuple[list[str], list[str]]:
    """The content of a message, and an assistant's reasoning: from its own field, and before each `</think>`."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    found = (part.get("text") if isinstance(part, dict) else part for part in parts)
    texts = [text for text in found if isinstance(text, str)]
    if message.get("role") != "assistant":
        return texts, []
    said: list[str] = []
    reasoning = [given] if isinstance(given := _given_reasoning(message), str) else []
    for text in texts:
        for chunk, tag in zip(_TAG.split(text), [*_TAG.findall(text), ""], strict=True):
            (reasoning if tag == "</think>" else said).append(chunk)
    return said, [words for chunk in reasoning if (words := chunk.strip())]


def _given_reasoning(message: Message) -> Any:
    return next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)


def _others(message: Message, keys: Mapping[str, str]) -> Iterator[str]:
    """The longest text under each other key. A word under a name that the template knows is a switch, not text."""
    for key, value in message.items():
        use = keys.get(key)
        if use == "" or (key == _REASONING_DETAILS and _given_reasoning(message) is not None):
            continue
        words = _longest_text(value).strip()
        if use is None or any(blank in words for blank in " \t\n"):
            yield words


def _longest_text(value: Any) -> str:
    """The longest string in a value (in bytes; the first of several), or an empty one."""
    longest, size, todo = "", 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str) and len(item.encode(errors="replace")) > size:
            longest, size = item, len(item.encode(errors="replace"))
        elif isinstance(item, dict):
            todo += reversed(item.values())
        elif isinstance(item, list):
            todo += reversed(item)
    return longest


def _prints_calls(calls: Any, text: bytes) -> bool:
    """Whether each called function is named as often as it is called."""
    names = [name for call in calls if (name := _name(call))] if isinstance(calls, list) else []
    return all(_occurs(name, names.count(name), text) for name in set(names))


def _name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _appears(words: str, text: bytes) -> bool:
    """Whether words, stripped, occur in a text."""
    return _occurs(words.strip(), 1, text)


def _occurs(name: str, times: int, text: bytes) -> bool:
    """Whether a name occurs at least this many times, verbatim or escaped as JSON."""
    if text.count(name.encode(errors="replace")) >= times:
        return True
    spellings = (json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1])
    return any(text.count(spelling.encode(errors="replace")) >= times for spelling in spellings)
