"""Conversations with reasoning and calls of tools, and a template that drops the reasoning of earlier turns."""

from __future__ import annotations

from typing import Any


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, thought: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"reasoning_content": thought} if thought else {})}


def calls(thought: str | None = None) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": {"city": "Bern"}}
    return says("", thought) | {"tool_calls": [{"id": "call00001", "type": "function", "function": function}]}


RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "look_up"}
CHATS: list[list[dict[str, Any]]] = [
    [user("2 + 2?"), says("4", "two and two"), user("3 + 3?"), says("6", "three and three")],
    [user("hi"), says("hello"), user("bye"), says("goodbye"), user("still here?")],
    [user("weather?"), calls("look it up"), RESULT, says("Sunny.", "easy"), user("and Basel?"), says("No idea.")],
    [user("weather?"), calls(), RESULT, calls(), RESULT, says("Sunny."), user("thanks"), says("Welcome.", "polite")],
    [{"role": "system", "content": "Be brief."}, user("a"), says("b", "c"), user("d"), says("e")],
    [user("one"), says("two", "three")],
    [user("newlines"), says("\n\nlike these"), user("more"), says("  spaces", "hm")],
]
QWEN = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}\n<think>\n{{ m.reasoning_content or '' }}\n</think>\n"
    "{%- endif %}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}\n<|im_start|>assistant\n{%- endif %}"
)
