"""Normalises and validates the lists of messages in parsed rows.

Roles are renamed to those of templates, weights and marked spans are removed, and keys whose value is null are dropped,
as transformers' `apply_chat_template` does from 5.23 on. All other keys stay as they are. The parsed objects are
changed in place, and copied only if keys must be renamed.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Message
from penstock.prepare.chat.formats import CALLS, INVERSE_WEIGHT_KEY, MEDIA_COLUMNS, REASONING_KEYS, ROLES, ColumnMapping
from penstock.prepare.chat.json_rows import describe_type, parse_text
from penstock.prepare.chat.spans import LARGEST_WEIGHT, SPAN_KEYS, MarkedSpans, take_spans

_MEDIA = ("image", "audio", "video")
_USUAL_TARGETS = {
    **dict.fromkeys(("ai", "bot", "model", "chatbot", "agent"), "assistant"),
    **dict.fromkeys(("human", "customer", "question"), "user"),
    **dict.fromkeys(("function", "ipython", "environment", "observation", "result", "code_output"), "tool"),
}


class NormalizedMessages(NamedTuple):
    """Normalised messages, their weights, the values in them that are not plain strings, and their marked spans."""

    messages: list[Message]
    weights: tuple[float | None, ...] | None = None
    loose: tuple[object, ...] = ()
    spans: tuple[MarkedSpans | None, ...] | None = None

    def then(self, more: NormalizedMessages) -> NormalizedMessages:
        """Returns these messages followed by more."""
        counts = len(self.messages), len(more.messages)
        return NormalizedMessages(
            self.messages + more.messages,
            _joined(self.weights, more.weights, counts),
            self.loose + more.loose,
            _joined(self.spans, more.spans, counts),
        )


_Own = TypeVar("_Own")


def _joined(
    first: tuple[_Own | None, ...] | None, second: tuple[_Own | None, ...] | None, counts: tuple[int, int]
) -> tuple[_Own | None, ...] | None:
    """Joins what messages have of their own; None if none of them has it."""
    if first is None and second is None:
        return None
    return (first or (None,) * counts[0]) + (second or (None,) * counts[1])


class MessageReader:
    """Reads lists of messages according to a mapping."""

    def __init__(self, mapping: ColumnMapping) -> None:
        self._role_key = mapping.role_key or "role"
        self._content_key = mapping.content_key or "content"
        self._roles = dict(mapping.roles) or ROLES
        self._weight_keys = mapping.weight_keys
        self._weight_names = frozenset(mapping.weight_keys)
        self._renames = (self._role_key, self._content_key) != ("role", "content")
        self._expected = "system, user, assistant or tool"
        if "gpt" in self._roles:
            self._expected = "system, human, gpt, tool, observation or function_call"

    def read(self, value: object, column: str) -> NormalizedMessages:
        """Reads the messages of a column: a list, or a single message."""
        if type(value) is dict:
            value = [value]
        if type(value) is not list:
            raise RowError(
                "no_messages",
                f"column {column!r} is {describe_type(value)}, not a list of messages",
                'Messages are a list such as [{"role": "user", "content": "Hi"}, …]',
            )
        if not value:
            raise RowError("no_messages", f"column {column!r} is an empty list", "Remove the row or give it messages")
        messages: list[Message] = value  # we own the parsed objects, so they are changed in place
        weights: list[float | None] = [None] * len(messages)
        loose: list[object] = []
        marked: dict[int, MarkedSpans] = {}
        for number, message in enumerate(messages):
            where = f"{column}[{number}]"
            if type(message) is not dict:
                raise RowError(
                    "bad_message", f"{where} is {describe_type(message)}, not a message", "Make it an object"
                )
            role = self._role(message, where)
            if not self._weight_names.isdisjoint(message):
                weights[number] = self._take_weight(message, where)
            if self._renames:
                message = messages[number] = self._renamed(message, where)
            if role == CALLS:
                role = "assistant"
                _set_calls(message, where)
            message["role"] = role
            if message.get("tool_calls") is not None:
                message["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
            check_message(message, where, self._weight_names)
            if type(message.get("content")) is list or not SPAN_KEYS.isdisjoint(message):
                if weights[number] is None and message.get("train_detail") == []:
                    weights[number] = 0.0  # Axolotl trains nothing of it
                if found := take_spans(message, where):
                    marked[number] = found
            nulls = []
            for key, own in message.items():
                if own is None:
                    nulls.append(key)
                elif type(own) is not str:
                    loose.append(own)
            for key in nulls:
                del message[key]
        is_weighted = any(weight is not None for weight in weights)
        spans = tuple(map(marked.get, range(len(messages)))) if marked else None
        return NormalizedMessages(messages, tuple(weights) if is_weighted else None, tuple(loose), spans)

    def _role(self, message: Message, where: str) -> str:
        role = message.get(self._role_key)
        known = self._roles.get(role) if type(role) is str else None
        if known is not None:
            return known
        if self._role_key not in message:
            raise RowError(
                "unknown_role",
                f"{where} has no {self._role_key!r}; its keys are {', '.join(message) or '(none)'}",
                "Name the keys with --role-key and --content-key",
            )
        if type(role) is not str:
            raise RowError("unknown_role", f"the role of {where} is {describe_type(role)}; expected {self._expected}")
        likely = _likely(role)
        raise RowError(
            "unknown_role",
            f"role {role!r} is unknown; expected {self._expected}",
            f"Map it with --role {role}={likely}" if likely else f"Say which of them it is with --role {role}=…",
        )

    def _renamed(self, message: Message, where: str) -> Message:
        """Returns the message with the template's key names, in the given order."""
        names = {self._role_key: "role", self._content_key: "content"}
        renamed = {names.get(key, key): value for key, value in message.items()}
        if len(renamed) != len(message):
            raise RowError("bad_message", f"{where} has its role or content twice: {', '.join(message)}", "Keep one")
        return renamed

    def _take_weight(self, message: Message, where: str) -> float | None:
        weight: float | None = None
        for key in self._weight_keys:
            if key in message:
                value = _weight(message.pop(key), key, where)
                if weight is not None and value is not None and value != weight:
                    raise RowError("bad_weight", f"{where} has two weights, {weight:g} and {value:g}", "Keep one")
                weight = value if value is not None else weight
        return weight


def _weight(value: object, key: str, where: str) -> float | None:
    if value is None:
        return None
    if key == INVERSE_WEIGHT_KEY:
        if value in (0, 1) and type(value) in (bool, int):
            return 0.0 if value else 1.0
        raise RowError("bad_weight", f"{where}.{key} is {_shown(value)}; expected true, false or null")
    if type(value) in (bool, int, float) and value >= 0:  # type: ignore[operator]
        if value > LARGEST_WEIGHT:  # type: ignore[operator]
            raise RowError("bad_weight", f"{where}.{key} is larger than {LARGEST_WEIGHT:g}", "Give a smaller weight")
        return float(value)  # type: ignore[arg-type]
    raise RowError("bad_weight", f"{where}.{key} is {_shown(value)}; expected true, false, null or a number from 0 up")


def _shown(value: object) -> str:
    return repr(value) if type(value) in (int, float, str) else describe_type(value)


def _likely(role: str) -> str | None:
    """Guesses the meaning of an unknown role name, for the error's remedy. A wrong guess would be trained on."""
    near = get_close_matches(role, ROLES, 1, 0.75)
    return near[0] if near else _USUAL_TARGETS.get(role.lower())


def check_message(message: Message, where: str, weight_keys: Collection[str] = ()) -> None:
    """Raises RowError unless content and tool calls have a type that templates can render."""
    calls = message.get("tool_calls")
    if calls:
        check_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    kind = type(content)
    if kind is str:
        return
    if kind is list:
        _check_parts(content, f"{where}.content", weight_keys)  # type: ignore[arg-type]
        return
    role = message["role"]
    if content is not None:
        raise RowError(
            "bad_content",
            f"{where}.content is {describe_type(content)}; expected a string or a list of text parts",
            "Give it as text, for example as its JSON",
        )
    if role == "assistant" and (calls or any(message.get(key) for key in REASONING_KEYS)):
        return
    if role == "tool" and "content" in message:
        return
    state = "null" if "content" in message else f"missing (keys: {', '.join(message)})"
    needed = "content, tool_calls or reasoning_content" if role == "assistant" else "content"
    raise RowError("bad_content", f"{where}.content is {state}; a message of role {role} needs {needed}")


def _check_parts(parts: list[Any], where: str, weight_keys: Collection[str]) -> None:
    for number, part in enumerate(parts):
        if type(part) is dict and part.get("type") == "text" and type(part.get("text")) is str:
            for key in weight_keys:
                if part.get(key) is not None:
                    raise RowError(
                        "bad_weight",
                        f"{where}[{number}].{key}: a part has no weight of its own",
                        "Give the weight to the message, or mark text of the part with spans",
                    )
            continue
        if type(part) is not dict:
            raise RowError(
                "bad_content", f"{where}[{number}] is {describe_type(part)}; expected a text part", _TEXT_PART
            )
        name = str(part.get("type"))
        if any(media in name for media in _MEDIA) or any(media in key for media in _MEDIA for key in part):
            raise RowError(
                "image_content",
                f"{where}[{number}] is a part of type {name!r}; images, audio and video are not served",
                "Remove such parts or rows",
            )
        raise RowError("bad_content", f"{where}[{number}] has type {name!r}; expected a text part", _TEXT_PART)


_TEXT_PART = 'A text part is {"type": "text", "text": "…"}'


def check_calls(calls: object, where: str) -> None:
    """Raises RowError unless tool calls are a list of {function: {name, arguments}} or of {name, arguments}."""
    if type(calls) is not list:
        raise RowError("bad_tool_calls", f"{where} is {describe_type(calls)}, not a list", _CALL)
    for number, call in enumerate(calls):
        function = call.get("function", call) if type(call) is dict else call
        if type(function) is not dict or type(function.get("name")) is not str:
            raise RowError("bad_tool_calls", f"{where}[{number}] has no function name", _CALL)
        arguments = function.get("arguments")
        if arguments is not None and type(arguments) not in (dict, str):
            raise RowError(
                "bad_tool_calls",
                f"the arguments of {where}[{number}] ({function['name']}) are {describe_type(arguments)}",
                "Give them as an object or as a JSON string",
            )


def _read_calls(calls: Any, where: str) -> Any:
    """Returns a list of tool calls, parsed if it or its elements are JSON strings; None for the text of none.

    Tables hold them as text, with "[]" where a message calls nothing. A single call may be given without a list.
    """
    if type(calls) is str:
        calls = (_parsed_call(calls, where) or None) if calls.strip() else None
    if type(calls) is dict and calls:
        calls = [calls]
    if type(calls) is list and any(type(call) is str for call in calls):
        parsed = (_parsed_call(call, f"{where}[{k}]") if type(call) is str else call for k, call in enumerate(calls))
        return list(parsed)
    return calls


def _parsed_call(text: str, where: str) -> Any:
    try:
        return parse_text(text)
    except ValueError as error:
        raise RowError("bad_tool_calls", f"{where} is a string that is not JSON ({error})", _CALL) from None


_CALL = 'A tool call is {"type": "function", "function": {"name": "f", "arguments": {…}}}'


def _set_calls(message: Message, where: str) -> None:
    """Turns a message whose text is the JSON of its calls into one with `tool_calls`."""
    text = message.pop("content", None)
    try:
        calls = parse_text(text) if type(text) is str else text
    except ValueError:
        calls = None
    if type(calls) is dict:
        calls = [calls]
    if type(calls) is not list or not calls:
        raise RowError(
            "bad_tool_calls",
            f"{where} is a function call, but its text is not the JSON of one",
            'Its text must be such as {"name": "f", "arguments": {…}}',
        )
    message["content"] = ""
    message["tool_calls"] = [_wrapped(call) for call in calls]


def _wrapped(call: object) -> object:
    """Wraps a bare {name, arguments} as templates expect it; returns anything else as it is, to be refused later."""
    if type(call) is dict and "function" not in call:
        return {"type": "function", "function": call}
    return call


# ---- extra columns ---------------------------------------------------------------------------------------------------
#
# Reads the columns besides the messages: tools, system prompt, template variables. Refuses media columns.
#
# Tools may be a list, a JSON string of one, or a list of JSON strings; an empty value means none. Datasets that store
# tools as strings have few distinct ones, and they are long, so each is parsed once.


RESERVED_VARIABLES = (  # what the row decides, and arguments that apply_chat_template doesn't pass to a template
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "conversation", "chat_template"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
)
_TEXTS_KEPT = 64
_TOOL = 'Tools are a list such as [{"type": "function", "function": {"name": "f", "parameters": {…}}}], or its JSON'


class Chat(NamedTuple):
    """The template's inputs besides the messages."""

    tools: list[Any] | None = None
    system: str | None = None
    variables: dict[str, Any] | None = None


NO_CHAT = Chat()


class ChatColumns:
    """Reads the columns besides the messages according to a mapping."""

    def __init__(self, mapping: ColumnMapping) -> None:
        columns = dict(mapping.columns)
        self._tools = columns.get("tools", "")
        self._system = columns.get("system", "")
        self._variables = columns.get("variables", "")
        self._media = tuple(name for name in MEDIA_COLUMNS if name not in columns.values())
        self._parsed: dict[str, Any] = {}
        self.names = frozenset((self._tools, self._system, self._variables, *self._media))

    def read(self, record: dict[str, Any]) -> Chat:
        """Reads a parsed row's tools, system prompt and template variables."""
        if self.names.isdisjoint(record):
            return NO_CHAT
        for column in self._media:
            if record.get(column):
                raise RowError(
                    "image_content",
                    f"column {column!r} is not empty; images, audio and video are not served",
                    "Remove the column, or the rows that use it",
                )
        system = record.get(self._system)
        if system is not None and type(system) is not str:
            raise RowError("bad_content", f"column {self._system!r} is {describe_type(system)}; expected a string")
        return Chat(
            self._read_tools(record.get(self._tools)),
            system or None,
            self._read_variables(record.get(self._variables)),
        )

    def with_system(self, turns: NormalizedMessages, system: str) -> NormalizedMessages:
        """Returns the messages with the system prompt of the system column in front."""
        first = turns.messages[0]
        if first["role"] != "system":
            return NormalizedMessages([{"role": "system", "content": system}]).then(turns)
        if first.get("content") == system:
            return turns
        raise RowError(
            "system_conflict",
            f"column {self._system!r} and the first message are two different system prompts",
            "Keep one of them",
        )

    def _read_tools(self, value: object) -> list[Any] | None:
        if type(value) is str:  # an empty string means no tools; an empty list is passed on, as in transformers
            value = self._parse(value, f"column {self._tools!r}") if value.strip() else None
            value = value or None
        if value is None:
            return None
        if type(value) is not list:
            raise RowError("bad_tools", f"column {self._tools!r} is {describe_type(value)}, not a list of tools", _TOOL)
        for number, tool in enumerate(value):
            where = f"{self._tools}[{number}]"
            if type(tool) is str:
                tool = value[number] = self._parse(tool, where)
            if type(tool) is not dict:
                raise RowError("bad_tools", f"{where} is {describe_type(tool)}, not an object", _TOOL)
        return value

    def _parse(self, text: str, where: str) -> Any:
        value = self._parsed.get(text)
        if value is None:
            try:
                value = parse_text(text)
            except ValueError as error:
                raise RowError("bad_tools", f"{where} is a string that is not JSON ({error})", _TOOL) from None
            if len(self._parsed) >= _TEXTS_KEPT:
                self._parsed.clear()
            self._parsed[text] = value
        return value

    def _read_variables(self, value: object) -> dict[str, Any] | None:
        column = self._variables
        if type(value) is str and value.strip():
            try:
                value = parse_text(value)
            except ValueError as error:
                raise RowError("bad_variables", f"column {column!r} is a string that is not JSON ({error})") from None
        if not value or type(value) is str:
            return None
        if type(value) is not dict:
            raise RowError("bad_variables", f"column {column!r} is {describe_type(value)}; expected an object")
        for name in RESERVED_VARIABLES:
            if name in value:
                raise RowError(
                    "bad_variables",
                    f"column {column!r} sets {name!r}, which is not a template variable",
                    "Remove it",
                )
        return value
