"""Probes which forms of messages, tools and calls a chat template accepts.

Each probe renders small conversations that differ in a single form. A template *accepts* a form if it renders it and
the marked text comes out unchanged: neither lost nor printed as the Python or JSON notation of the data structure
around it. Costs about 50 renders of a few lines: 5 to 50 ms per template, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.chat.conversation import Message
from penstock.errors import RowError

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
