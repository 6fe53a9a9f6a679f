"""Reads the columns besides the messages: tools, system prompt, template variables. Refuses media columns.

Tools may be a list, a JSON string of one, or a list of JSON strings; an empty value means none. Datasets that store
tools as strings have few distinct ones, and they are long, so each is parsed once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.chat.conversation import Message
from penstock.chat.formats import MEDIA_COLUMNS, Mapping
from penstock.chat.json_rows import describe_type, parse_text
from penstock.errors import RowError

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

    def __init__(self, mapping: Mapping) -> None:
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

    def with_system(
        self, messages: list[Message], weights: tuple[float | None, ...] | None, system: str
    ) -> tuple[list[Message], tuple[float | None, ...] | None]:
        """Returns the messages and weights with the system prompt of the system column in front."""
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages], (None, *weights) if weights else weights
        if messages[0].get("content") == system:
            return messages, weights
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
