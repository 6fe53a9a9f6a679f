"""Adapts conversations to the forms that a template accepts.

Only what the template can't handle is changed: argument strings are parsed only if the template can't print strings,
null content becomes "" only if it would fail or print `None`, and so on (`adapt_probes.Needs`). The changes are a
function of the template and its variables. A conversation that needs no change is returned as it is. The C machine
adapts the rows that it reads in the same way.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from penstock.chat.adapt_probes import Needs, Plain, context, find_needs
from penstock.chat.conversation import Conversation, Message
from penstock.chat.json_rows import parse_text
from penstock.chat.notes import Note
from penstock.errors import RowError

_ABSENT = object()


class Adapter:
    """Adapts conversations to one template. `plain` renders with the reference engine."""

    def __init__(self, plain: Plain, *, arguments_as_given: bool = False) -> None:
        self.needs = find_needs(plain)
        if arguments_as_given:
            self.needs = replace(self.needs, object_arguments=False, other_strings_fail=False, string_arguments=False)
        self._notes: set[Note] = set()  # of the current conversation
        self._takes_all = self.needs == Needs()
        self._takes_calls = not (
            self.needs.object_arguments
            or self.needs.string_arguments
            or self.needs.wrapped_calls
            or self.needs.typed_calls
            or self.needs.no_empty_calls
            or self.needs.null_with_calls
        )

    def adapt(self, conversation: Conversation) -> Conversation:
        """Returns the conversation as the template accepts it; itself if nothing must change. Raises RowError."""
        if self._takes_all or conversation.pieces is not None:
            return conversation
        self._notes.clear()
        tools = None if conversation.tools is None else self.adapt_tools(conversation.tools)
        changed = self._changed(conversation)
        if not changed and tools is conversation.tools:
            return conversation
        messages = conversation.messages.copy()
        for number, message in changed.items():
            messages[number] = message
        return conversation._replace(messages=messages, tools=tools, notes=(*conversation.notes, *sorted(self._notes)))

    def _changed(self, conversation: Conversation) -> dict[int, Message]:
        """Returns adapted copies of the messages that must change, by number."""
        adapted = ((number, self._message(message, number)) for number, message in enumerate(conversation.messages))
        return {number: message for number, message in adapted if message is not conversation.messages[number]}

    def _message(self, message: Message, number: int) -> Message:
        """Adapts one message; returns itself if nothing must change."""
        needs = self.needs
        if "tool_calls" in message and not self._takes_calls:
            message = self._adapt_calls(message, number)
        given = content = message.get("content", _ABSENT)
        role = message["role"]
        if type(content) is list and self._must_join(content, role):
            content = "".join(part["text"] for part in content)
        if not content or content is _ABSENT:
            content = self._empty_content(message, content)
        if type(content) is str and role in needs.no_text:
            content = [{"type": "text", "text": content}]
        return message if content is given else {**message, "content": content}

    def _must_join(self, parts: list[Any], role: str) -> bool:
        if not parts:  # templates that expect lists don't expect empty ones
            return role in self.needs.no_parts or role in self.needs.no_text
        return role in (self.needs.no_part if len(parts) == 1 else self.needs.no_parts)

    def _empty_content(self, message: Message, content: object) -> object:
        """Returns empty content in the form that the template accepts."""
        where = context(message)
        if where == "calls" and self.needs.null_with_calls:
            return None
        if content is None and where in self.needs.text_for_null:
            return ""
        if content is _ABSENT and where in self.needs.text_for_missing:
            return ""
        return content

    def _adapt_calls(self, message: Message, number: int) -> Message:
        calls = message["tool_calls"]
        if not calls:
            if not self.needs.no_empty_calls:
                return message
            return {key: value for key, value in message.items() if key != "tool_calls"}
        adapted = [self._call(call, (number, which)) for which, call in enumerate(calls)]
        if all(new is old for new, old in zip(adapted, calls, strict=True)):
            return message
        return {**message, "tool_calls": adapted}

    def _call(self, call: dict[str, Any], place: tuple[int, int]) -> dict[str, Any]:
        is_bare = "function" not in call
        function = call if is_bare else call["function"]
        arguments = function.get("arguments")
        if type(arguments) is str and self.needs.object_arguments:
            parsed = self._parsed(arguments, function["name"], place)
            if parsed is not arguments:
                function = {**function, "arguments": parsed}
                self._notes.add(Note.ARGUMENTS_PARSED)
        elif type(arguments) is dict and self.needs.string_arguments:
            function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
            self._notes.add(Note.ARGUMENTS_DUMPED)
        if is_bare:
            return _wrapped(function) if self.needs.wrapped_calls else function
        if self.needs.typed_calls and "type" not in call:
            return {**call, "type": "function", "function": function}
        return call if function is call["function"] else {**call, "function": function}

    def _parsed(self, text: str, name: str, place: tuple[int, int]) -> object:
        """Parses an argument string to an object; an empty string is a call without arguments."""
        try:
            value = parse_text(text) if text.strip() else {}
        except ValueError:
            value = None
        if type(value) is dict:
            return value
        if not self.needs.other_strings_fail:
            return text
        where = f"messages[{place[0]}].tool_calls[{place[1]}] ({name})"
        raise RowError(
            "bad_tool_calls",
            f"the arguments of {where} are a string that is not a JSON object, and the template takes only objects",
            'Give them as an object, or as a string such as {"city": "Bern"}',
        )

    def adapt_tools(self, given: list[Any]) -> list[Any]:
        """Returns the tools as the template accepts them."""
        if self.needs.wrapped_tools and any(_is_bare(tool) for tool in given):
            return [_wrapped(tool) if _is_bare(tool) else tool for tool in given]
        if self.needs.bare_tools and any("function" in tool for tool in given):
            return [tool.get("function", tool) for tool in given]
        return given


def _is_bare(tool: dict[str, Any]) -> bool:
    return "function" not in tool and "name" in tool


def _wrapped(function: dict[str, Any]) -> dict[str, Any]:
    """Wraps a bare function, or a bare call and its id, as in OpenAI's API."""
    outside = {"id": function["id"]} if "id" in function else {}
    inside = {key: value for key, value in function.items() if key not in ("id", "type")}
    return {**outside, "type": "function", "function": inside}
