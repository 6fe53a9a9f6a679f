"""What a template sees of a conversation, as transformers prepares it, and what its refusal tells the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.chat.conversation import Conversation, Message
from penstock.chat.guards import Suspect, has_float
from penstock.errors import RowError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
ODD_SPACE = "white space that engines disagree about"


def check_types(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    """transformers' own checks before it renders."""
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"Chat messages should be dicts, but got {message!r}")
    for tool in tools or ():
        if not isinstance(tool, dict):
            raise ValueError(f"Tools should be JSON schemas, but got {tool!r}")


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Reasoning under all the names that templates read, as transformers does it."""
    aliased = []
    for message in messages:
        if "reasoning_content" in message or "thinking" in message or "reasoning" in message:
            reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
            if reasoning is not None:
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        aliased.append(message)
    return aliased


def reserved(conversation: Conversation, suspect: Suspect | None) -> str:
    """Why a row is left to the reference from the start, '' where it is not."""
    if conversation.plain:
        return ""
    if conversation.has_float or (conversation.variables and has_float(conversation.variables)):
        return "floats"
    if suspect is not None and suspect.control:
        return "control characters"
    if suspect is not None and (suspect.odd_space or suspect.odd_value):
        return ODD_SPACE if suspect.odd_space else "integers beyond 64 bits"
    values: Sequence[Any] = conversation.messages + (conversation.tools or [])
    return "" if all(isinstance(value, dict) for value in values) else "values of unexpected types"


def refusal(error: Exception) -> RowError:
    """What a template's error tells the user. It loses its frames: through them it would hold the rows of a slice."""
    error.__traceback__ = None
    name = "" if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: "
    return RowError(
        "template",
        f"the chat template refused the conversation: {name}{error}",
        "Change the row, or choose a template that accepts it",
    )
