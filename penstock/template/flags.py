"""Checks whether a message's content, reasoning, name and tool calls appear in the text it printed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import IntFlag
from typing import Any

from penstock.chat.conversation import Message
from penstock.chat.formats import REASONING_KEYS


class MessageFlag(IntFlag):
    """What is known about a rendered message; stored as uint8."""

    HAS_CALLS = 1  # the message has tool calls, or the `function_call` that preceded them in OpenAI's API …
    CALLS_PRINTED = 2  # … and its text names each called function as often as it is called
    HAS_REASONING = 8  # an assistant message has reasoning, in its own field or in its content …
    REASONING_PRINTED = 16  # … and its text contains it, stripped
    NAME_DROPPED = 32  # the message has a speaker's name, which its text does not contain
    CONTENT_PRINTED = 4  # its content (after `</think>`, stripped) is in its text, or is not a string


def flags_of(message: Message, text: bytes) -> MessageFlag:
    """The flags of a message that printed this text."""
    flags = MessageFlag(0)
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else None)
    if calls:
        flags |= MessageFlag.HAS_CALLS
        if _prints_calls(calls, text):
            flags |= MessageFlag.CALLS_PRINTED
    if _prints_content(message.get("content"), text):
        flags |= MessageFlag.CONTENT_PRINTED
    reasoning = _reasoning(message) if message.get("role") == "assistant" else ""
    if reasoning:
        flags |= MessageFlag.HAS_REASONING
        if reasoning.encode(errors="replace") in text:
            flags |= MessageFlag.REASONING_PRINTED
    name = message.get("name")
    if isinstance(name, str) and name and message.get("role") != "tool":  # a tool result is named by its call
        content = message.get("content")
        in_content = content.count(name) if isinstance(content, str) else 0
        if text.count(name.encode(errors="replace")) <= in_content:
            flags |= MessageFlag.NAME_DROPPED
    return flags


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


def _calls(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        calls = message.get("tool_calls")
        yield from calls if isinstance(calls, list) else ()


def _reasoning(message: Message) -> str:
    """The reasoning of an assistant: from its own field, or from its content before the last `</think>`."""
    given = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if given is not None:
        return given.strip() if isinstance(given, str) else ""
    content = message.get("content")
    before = content.rpartition("</think>")[0] if isinstance(content, str) else ""
    return before.rpartition("<think>")[2].strip()


def _prints_content(content: Any, text: bytes) -> bool:
    """Whether the text contains the content without its reasoning."""
    return not isinstance(content, str) or content.rpartition("</think>")[2].strip().encode(errors="replace") in text


def _prints_calls(calls: Any, text: bytes) -> bool:
    """Whether each called function is named as often as it is called."""
    names = [name for call in calls if (name := _name(call))] if isinstance(calls, list) else []
    return all(_occurs(name, names.count(name), text) for name in set(names))


def _name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _occurs(name: str, times: int, text: bytes) -> bool:
    """Whether a name occurs at least this many times, verbatim or escaped as JSON."""
    spellings = (name, json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1])
    return any(text.count(spelling.encode(errors="replace")) >= times for spelling in spellings)
