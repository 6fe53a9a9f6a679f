"""What the tests of stencils share: templates, words, and what is served held against the engine and the splitter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

from benchmarks.conformance import trl_templates
from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation, Message
from penstock.chat.engine import TemplateEngine
from penstock.chat.formats import ROLES, Format, Mapping
from penstock.chat.parts import Splitter
from penstock.chat.shapes import Draft
from penstock.chat.stencil import Filled
from penstock.chat.stencils import Stencils
from tests.chat.splitting import recipe

TURN: Final = "<|{{ m.role }}|>{{ m.content }}<|end|>"
PROMPT: Final = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OWN: Final = {
    "whole": f"{{% for m in messages %}}{TURN}{{% endfor %}}{PROMPT}",
    "trimmed": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}" + PROMPT,
    "a longer header after a tool": "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and "
    "loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}<b>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if messages[-1].role == 'tool' %}<b>{% endif %}{% endif %}",
    "calls": "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}: {{ c.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
    + PROMPT,
    "a longer prompt": f"{{% for m in messages %}}{TURN}{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|><b>"
    "{% endif %}",
    "all but a system prompt": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
    "^{{ messages[0].content }}^{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    + TURN + "{% endfor %}" + PROMPT,
    "tools first": "{% if tools %}# Tools{% for tool in tools %}\n{{ loop.index }} {{ tool | tojson }}{% endfor %}"
    "{% elif tools is not none %}none{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}: {{ c.function.arguments | tojson }}]{% endfor %}<|end|>"
    "{% endfor %}" + PROMPT,
    "tools beside messages": "{% if messages[0].role == 'system' %}^{{ messages[0].content }}^"
    "{{ tools | tojson if tools }}{% endif %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ tools | tojson if tools and loop.first }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}{{ tools | tojson if tools and m.role == 'tool' }}<|end|>"
    "{% endfor %}" + PROMPT,
}  # fmt: skip
SAID: Final = (
    None, "", " ", "\n\n", "<|end|>", "<|im_end|>", "</s>", "<|eot_id|>", "<end_of_turn>", "<|im_start|>assistant\n",
    "<|assistant|>", "assistant\n", "<b>", "<b> more", "<think>\n", "<think>\n\n</think>\n\n", "\nmore", " leading",
    "trailing \n", "\u2003", "\u3000wide\u3000", "\U0010fe000\U0010fe01", "\u2003\U0010fe001\U0010fe01\u2003",
    '{"\U0010fe000a0\U0010fe01": 0}', "\U0010fe00", "é日本\U0001f600", "\x1cx\x1f", "\x01\x10", "a\r\nb", "\U0010ff00",
    "{{ x }}{% if %}", "e\u0301", "[f: {}]", "^",
)  # fmt: skip
MAPPING: Final = Mapping(
    Format.MESSAGES,
    (("messages", "messages"), ("system", "system"), ("tools", "tools"), ("variables", "chat_template_kwargs")),
    roles=tuple(sorted(ROLES.items())),
)


class Made(NamedTuple):
    """All that stencils of a template need."""

    engine: TemplateEngine
    splitter: Splitter
    adapter: Adapter

    def stencils(self, names: dict[str, str] | None = None) -> Stencils:
        return Stencils(self.engine, self.splitter, names or {}, self.adapter)


@cache
def made(name: str) -> Made:
    engine, splitter = recipe(OWN.get(name) or trl_templates()[name])
    return Made(engine, splitter, Adapter(engine.plain))


TEMPLATES: Final = [
    *OWN, "trl/cohere", "trl/gemma", "trl/llama3", "trl/phi3", "trl/phi3_5", "trl/qwen2_5", "trl/qwen3_instruct_2507",
]  # fmt: skip


def added(draft: Draft, conversations: Sequence[Conversation]) -> Draft:
    for row, conversation in enumerate(conversations):
        draft.add(row, conversation)
    return draft


def check(parts: Made, filled: Filled | None, conversations: Sequence[Conversation]) -> list[int]:
    """The rows that were served, each as the engine and the splitter would have served it."""
    if filled is None:
        return []
    served = [conversations[row] for row in filled.rows]
    regions = parts.engine.render(served)
    segments, errors = parts.splitter.split(served, regions)
    assert not errors and not regions.errors and not segments.notes and not filled.segments.notes
    assert filled.texts == regions.texts
    for field in ("offsets", "ends", "roles", "parts", "messages", "inclusive", "known"):
        own, wanted = getattr(filled.segments, field), getattr(segments, field)
        assert own.dtype == wanted.dtype and own.tolist() == wanted.tolist(), field
    return filled.rows


def served(parts: Made, conversations: Sequence[Conversation], stencils: Stencils | None = None) -> list[int]:
    """Fill stencils for conversations, and compare."""
    adapted = [parts.adapter.adapt(conversation) for conversation in conversations]
    stencils = stencils or parts.stencils()
    return check(parts, stencils.fill(added(stencils.draft(), adapted)), adapted)


def chat(*messages: Message) -> Conversation:
    return Conversation(list(messages))
