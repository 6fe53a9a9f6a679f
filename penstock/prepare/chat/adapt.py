"""Adapts conversations to the forms that a template accepts.

Only what the template can't handle is changed: argument strings are parsed only if the template can't print strings,
null content becomes "" only if it would fail or print `None`, and so on (`adapt_probes.Needs`). The changes are a
function of the template and its variables. A conversation that needs no change is returned as it is. The C machine
adapts the rows that it reads in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.errors import RowError
from penstock.literals import Literals
from penstock.prepare.chat.conversation import Conversation, Message
from penstock.prepare.chat.json_rows import parse_text
from penstock.prepare.chat.notes import Note
from penstock.prepare.chat.spans import moved

# ---- adapt probes ----------------------------------------------------------------------------------------------------
#
# Probes which forms of messages, tools and calls a chat template accepts.
#
# Each probe renders small conversations that differ in a single form. A template *accepts* a form if it renders it and
# the marked text comes out unchanged: neither lost nor printed as the Python or JSON notation of the data structure
# around it. Costs about 50 renders of a few lines: 5 to 50 ms per template, once.


Plain = Callable[..., str]  # (messages, tools=None, variables=None, add_generation_prompt=False) -> text

_CITY = "⟦Zürich⟧"
_OBJECT = {"city": _CITY}
_TEXT = json.dumps(_OBJECT, ensure_ascii=False)
_LEFT, _RIGHT = "⟦left⟧", "⟦right⟧"
_NAME, _ABOUT = "probe_weather", "⟦weather⟧"
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city."}}}
_FUNCTION: dict[str, Any] = {"name": _NAME, "description": _ABOUT, "parameters": _PARAMETERS}
_TOOLS: list[Any] = [{"type": "function", "function": _FUNCTION}]
_QUESTION: Message = {"role": "user", "content": "Weather?"}
_ANSWER: Message = {"role": "assistant", "content": "Sunny."}
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Needs:
    """The forms that a template can't accept as they are. By default, it accepts everything."""

    object_arguments: bool = False  # argument strings must be parsed …
    other_strings_fail: bool = False  # … and strings that aren't JSON objects fail
    string_arguments: bool = False  # argument objects must be dumped
    wrapped_calls: bool = False  # a bare {name, arguments} must become {type, function}
    typed_calls: bool = False  # a {function} must have its type
    no_empty_calls: bool = False  # `tool_calls` that is null or empty must be removed
    null_with_calls: bool = False  # empty content must be null, or the calls are not printed
    wrapped_tools: bool = False
    bare_tools: bool = False
    text_for_null: frozenset[str] = frozenset()  # values of `context()` where null content must be ""
    text_for_missing: frozenset[str] = frozenset()
    no_part: frozenset[str] = frozenset()  # roles whose content must not be a list of one part
    no_parts: frozenset[str] = frozenset()  # … nor of several
    no_text: frozenset[str] = frozenset()  # roles whose content must not be a string


def context(message: Message) -> str:
    """Returns the kind of a message without content, as templates distinguish them: "calls" or its role."""
    return "calls" if message.get("tool_calls") else str(message["role"])


class _Scene(NamedTuple):
    """The context of a tool call in a probe; some templates accept only a simple one."""

    content: object = ""
    has_result: bool = True
    has_tools: bool = True


_SCENES = tuple(_Scene(c, r, t) for c in ("", None) for r in (True, False) for t in (True, False))


def find_needs(plain: Plain) -> Needs:
    """Returns the needs of a template, which may refuse any conversation by raising RowError."""
    return _Probe(plain).needs()


class _Probe:
    """Probes one template."""

    def __init__(self, plain: Plain) -> None:
        self._plain = plain
        self._no_text: frozenset[str] = frozenset()  # roles known so far to require lists
        self._scene = _SCENES[0]
        self._arguments: object = _OBJECT

    def needs(self) -> Needs:
        no_part, no_parts, self._no_text = self._content_forms("system", "developer", "user", "assistant")
        as_object, as_text = self._find_scene()
        object_taken = as_object is not None and _CITY in as_object and "{'city'" not in as_object
        text_taken = as_text is not None and _TEXT in as_text
        self._arguments = _TEXT if text_taken and not object_taken else _OBJECT
        of_tool = self._content_forms("tool")
        self._no_text |= of_tool[2]
        null, missing = self._empty_forms()
        wrapped_tools, bare_tools = self._tool_forms()
        wrapped_calls, typed_calls = self._call_forms()
        return Needs(
            object_arguments=object_taken and not text_taken,
            other_strings_fail=object_taken and as_text is None,
            string_arguments=text_taken and not object_taken,
            wrapped_calls=wrapped_calls,
            typed_calls=typed_calls,
            no_empty_calls=self._no_empty_calls(),
            null_with_calls=self._scene.content is None,
            wrapped_tools=wrapped_tools,
            bare_tools=bare_tools,
            text_for_null=null,
            text_for_missing=missing,
            no_part=no_part | of_tool[0],
            no_parts=no_parts | of_tool[1],
            no_text=self._no_text,
        )

    def _try(self, messages: list[Message], tools: list[Any] | None = None) -> str | None:
        try:
            return self._plain([self._fit(message) for message in messages], tools=tools)
        except RowError:
            return None

    def _fit(self, message: Message) -> Message:
        if message["role"] in self._no_text and type(message.get("content")) is str:
            return _listed(message)
        return message

    def _find_scene(self) -> tuple[str | None, str | None]:
        """Finds the first scene that shows a call. Returns its renders with arguments as object and as string."""
        refused: tuple[str | None, str | None] = (None, None)
        plain = None
        for scene in _SCENES:
            texts = self._call(scene, _call(_OBJECT)), self._call(scene, _call(_TEXT))
            if _shows(texts[0], _CITY) or _shows(texts[1], _CITY):
                self._scene = scene
                return texts
            if plain is None and scene.content == "" and texts != refused:
                plain = scene, texts  # the fallback if no call is ever shown: the first scene that renders at all
        self._scene, texts = plain or (_SCENES[0], refused)
        return texts

    def _call(self, scene: _Scene, call: dict[str, Any], result: object = "Sunny") -> str | None:
        """Renders a conversation with one tool call."""
        calling = _present({"role": "assistant", "content": scene.content, "tool_calls": [call]})
        messages = [_QUESTION, calling]
        if scene.has_result:
            messages += [_result(result), _ANSWER]
        return self._try(messages, _TOOLS if scene.has_tools else None)

    def _call_forms(self) -> tuple[bool, bool]:
        """Whether calls must be wrapped, and whether they must have their type."""
        call = _call(self._arguments)
        usual = self._call(self._scene, call)
        if usual is None or _CITY not in usual:
            return False, False
        bare = self._call(self._scene, call["function"])
        typeless = self._call(self._scene, {key: value for key, value in call.items() if key != "type"})
        return _is_less(bare, usual), _is_less(typeless, usual)

    def _no_empty_calls(self) -> bool:
        without: Message = {"role": "assistant", "content": _LEFT}
        if not _shows(self._try([_QUESTION, without]), _LEFT):
            return False
        empty: tuple[object, ...] = (None, [])
        return not all(_shows(self._try([_QUESTION, {**without, "tool_calls": calls}]), _LEFT) for calls in empty)

    def _tool_forms(self) -> tuple[bool, bool]:
        """Whether tools must be wrapped, and whether they must be bare."""
        wrapped = _shows(self._try([_QUESTION, _ANSWER], _TOOLS), _NAME, _ABOUT)
        bare = _shows(self._try([_QUESTION, _ANSWER], [_FUNCTION]), _NAME, _ABOUT)
        return wrapped and not bare, bare and not wrapped

    def _empty_forms(self) -> tuple[frozenset[str], frozenset[str]]:
        """Returns the contexts in which null content, and missing content, must be an empty string."""
        renders: dict[str, Callable[[object], str | None]] = {
            "calls": lambda content: self._call(self._scene._replace(content=content), _call(self._arguments)),
            "assistant": self._reasoning,
            "tool": lambda content: self._call(self._scene._replace(has_result=True), _call(self._arguments), content),
        }
        if self._scene.content is None:
            del renders["calls"]
        null = frozenset(name for name, render in renders.items() if _is_worse(render(None), render("")))
        missing = frozenset(name for name, render in renders.items() if _is_worse(render(_ABSENT), render("")))
        return null, missing

    def _reasoning(self, content: object) -> str | None:
        return self._try([_QUESTION, _present({"role": "assistant", "content": content, "reasoning_content": "Hm."})])

    def _content_forms(self, *roles: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Returns the roles that can't accept a list of one part, a list of several parts, and a string."""
        no_part, no_parts, no_text = set(), set(), set()
        for role in roles:
            text = self._render_message(role, _LEFT + _RIGHT)
            is_text = _shows(text, _LEFT, _RIGHT)
            is_part, is_parts = (
                _shows(listed, _LEFT, _RIGHT) and not _spells_more(listed, text, "'type'", '"type"')
                for listed in (
                    self._render_message(role, _parts(_LEFT + _RIGHT)),
                    self._render_message(role, _parts(_LEFT, _RIGHT)),
                )
            )
            if is_text and not is_part:
                no_part.add(role)
            if (is_text or is_part) and not is_parts:
                no_parts.add(role)
            if is_part and not is_text:
                no_text.add(role)
        return frozenset(no_part), frozenset(no_parts), frozenset(no_text)

    def _render_message(self, role: str, content: object) -> str | None:
        """Renders a message of a role among others, whose content is a string or, if that fails, a list."""
        if role == "tool":
            return self._call(self._scene._replace(has_result=True), _call(self._arguments), content)
        message: Message = {"role": role, "content": content}
        for question, answer in ((_QUESTION, _ANSWER), (_listed(_QUESTION), _listed(_ANSWER))):
            match role:
                case "user":
                    messages = [message, answer]
                case "assistant":
                    messages = [question, message]
                case _:
                    messages = [message, question, answer]
            text = self._try(messages)
            if _shows(text, _LEFT):
                return text
        return None


def _call(arguments: object) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _result(content: object) -> Message:
    return _present({"role": "tool", "tool_call_id": "call00001", "name": _NAME, "content": content})


def _present(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not _ABSENT}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _listed(message: Message) -> Message:
    return {**message, "content": _parts(message["content"])}


def _shows(text: str | None, *markers: str) -> bool:
    return text is not None and all(marker in text for marker in markers)


def _spells_more(text: str | None, than: str | None, *words: str) -> bool:
    """Whether one of the words occurs more often in a render than in another one."""
    return any((text or "").count(word) > (than or "").count(word) for word in words)


def _is_less(text: str | None, usual: str) -> bool:
    """Whether a render loses the call's name or arguments."""
    return not _shows(text, _CITY) or _spells_more(usual, text, _NAME)


def _is_worse(text: str | None, empty: str | None) -> bool:
    """Whether a render without content fails, prints `None` or loses the call, while one with "" doesn't."""
    if empty is None:
        return False
    return text is None or _spells_more(text, empty, "None", "null") or _spells_more(empty, text, _CITY)


# ---- adapt -----------------------------------------------------------------------------------------------------------


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
        if self._takes_all or conversation.texts is not None:
            return conversation
        self._notes.clear()
        tools = None if conversation.tools is None else self.adapt_tools(conversation.tools)
        adapted = ((number, self._message(message, number)) for number, message in enumerate(conversation.messages))
        changed = {number: message for number, message in adapted if message is not conversation.messages[number]}
        if not changed and tools is conversation.tools:
            return conversation
        messages = conversation.messages.copy()
        spans = list(conversation.spans or ())
        for number, message in changed.items():
            if spans and (places := spans[number]):
                spans[number] = moved(places, messages[number]["content"], message["content"])
            messages[number] = message
        conversation = conversation._replace(spans=tuple(spans) or None)
        return conversation._replace(messages=messages, tools=tools, notes=(*conversation.notes, *sorted(self._notes)))

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


# ---- special text ----------------------------------------------------------------------------------------------------
#
# Finds special tokens and turn markers in the text of messages, before a template renders it.


class SpecialTextFinder:
    """Searches all strings of conversations, including keys, for a set of texts (the needles)."""

    def __init__(self, contents: Iterable[str]) -> None:
        # One-character and whitespace tokens (such as "\n") are ordinary text that templates also print.
        found = {content for content in contents if len(content) > 1 and not content.isspace()}
        self.needles = sorted(found, key=lambda content: (-len(content.encode()), content))
        self._literals = Literals(found)

    def first(self, conversation: Conversation) -> str | None:
        """Returns the first needle in a conversation's text, or None."""
        if not self.needles:
            return None
        values = [conversation.messages, conversation.tools, [text for _, text in conversation.texts or ()]]
        return self._literals.first(_strings(values))


def _strings(value: Any) -> list[str]:
    """Returns all strings in a JSON value in order; iteratively, because rows may be nested deeply."""
    todo, found = [value], []
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            for key, own in reversed(item.items()):
                todo += (own, key)
        elif isinstance(item, list | tuple):
            todo += reversed(item)
    return found
