"""Random conversations of unusual text, for whatever must survive any content."""

from __future__ import annotations

import random
from typing import Any

SCRIPT = '<script>alert("zq")</script>'
PIECES = (
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\u200b", "\ufeff", "\x00", "\x1f", "a",
    "The", " turbine", "größe", "e\u0301", "\u0344", "灯", "日本語", "नमस्ते", "مرحبا", "\u202e", "😀",
    "👨‍👩‍👧", "\U0001cc00", "\U00010d50", "0", "12345", "<|im_start|>", "<|im_end|>", "</s>", "<s>",
    "[INST]", "<think>", "</think>", "▁", "▁▁", "{{ x }}", "{% raw %}", "```", "x = [1, 2]", "\\n",
    "&amp;", SCRIPT, "<img src=x onerror=alert(1)>", "'\"", "'s", "don't", "...", "—",
)  # fmt: skip


def text(choose: random.Random, longest: int = 12) -> str:
    """Pieces that tokenizers, templates and pages treat in special ways; sometimes any code points."""
    parts = choose.choices(PIECES, k=choose.randint(0, longest))
    if choose.random() < 0.3:
        codes = (choose.choice((choose.randrange(0xD800), choose.randrange(0xE000, 0x110000))) for _ in range(6))
        parts += map(chr, codes)
    if choose.random() < 0.05:
        parts = parts * choose.randint(2, 200)
    choose.shuffle(parts)
    return "".join(parts)


def conversation(choose: random.Random) -> dict[str, Any]:
    """A row of messages, sometimes with a system prompt, reasoning or a tool call."""
    messages: list[dict[str, Any]] = []
    tools = None
    if choose.random() < 0.3:
        messages.append({"role": "system", "content": text(choose)})
    for _ in range(choose.randint(1, 3)):
        messages.append({"role": "user", "content": text(choose)})
        answer: dict[str, Any] = {"role": "assistant", "content": text(choose, 30)}
        if choose.random() < 0.2:
            answer["reasoning_content"] = text(choose)
        if choose.random() < 0.15:
            tools = [_tool()]
            call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"q": text(choose)}}}
            messages.append({"role": "assistant", "content": text(choose), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "call00001", "name": "f", "content": text(choose)})
        messages.append(answer)
    return {"messages": messages} | ({"tools": tools} if tools else {})


def _tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}}
    return {"type": "function", "function": {"name": "f", "description": "Looks up.", "parameters": parameters}}
