"""Preference rows: where the prompt ends and the two answers begin.

A prompt (or none) and the two sides enter; two whole conversations leave, with a common beginning. A side may be
the answer alone or the whole conversation; without a prompt of its own, the row's prompt is what both sides share.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile

from penstock.chat.conversation import Message
from penstock.chat.formats_messages import NormalizedMessages
from penstock.errors import RowError


def whole_sides(
    prompt: NormalizedMessages | None, chosen: NormalizedMessages, rejected: NormalizedMessages, names: tuple[str, str]
) -> tuple[NormalizedMessages, NormalizedMessages]:
    """Both sides as whole conversations, each ending in an assistant message."""
    for side, name in ((chosen, names[0]), (rejected, names[1])):
        role = side.messages[-1]["role"]
        if role != "assistant":
            raise RowError("no_assistant", f"{name} ends in a message of role {role}; expected assistant")
    if prompt is None:
        if not _shared(chosen.messages, rejected.messages):
            raise RowError(
                "prompt_mismatch",
                f"{names[0]} and {names[1]} have no message in common and the row has no prompt",
                "Name the prompt's column with --prompt-key, or start both with the same messages",
            )
        return chosen, rejected
    if _starts_with(chosen.messages, prompt.messages) and _starts_with(rejected.messages, prompt.messages):
        return chosen, rejected
    for side, name in ((chosen, names[0]), (rejected, names[1])):
        role = side.messages[0]["role"]
        if role in ("system", "user"):
            raise RowError(
                "prompt_mismatch",
                f"{name} starts with a message of role {role} that is not the row's prompt",
                "Give only the answer there, or repeat the prompt exactly in both",
            )
    return prompt.then(chosen), prompt.then(rejected)


def shared_text(chosen: str, rejected: str) -> str:
    """What two strings begin with in common, without the last word: an answer never starts inside a word."""
    most = min(len(chosen), len(rejected))
    length = bisect_left(range(most), True, key=lambda i: chosen[: i + 1] != rejected[: i + 1])
    word = len(list(takewhile(lambda character: not character.isspace(), reversed(chosen[:length]))))
    return chosen[: max(0, length - word - 1)]


def _starts_with(messages: list[Message], prompt: list[Message]) -> bool:
    """Whether a side repeats the prompt; its own system prompt may come before."""
    skip = int(messages[0]["role"] == "system" and prompt[0]["role"] != "system")
    return len(messages) > len(prompt) + skip and messages[skip : skip + len(prompt)] == prompt


def _shared(chosen: list[Message], rejected: list[Message]) -> bool:
    return len(chosen) > 1 and len(rejected) > 1 and chosen[0] == rejected[0]
