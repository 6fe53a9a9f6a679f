"""Small templates that exercise the ownership of printed text, and unusual conversations."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

from typing import Final

from penstock.prepare.chat.conversation import Conversation

_TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"

PRINTING: Final = (
    _TURN,
    # text of a message inside and outside its turn
    "{{ messages[0].content }}" + _TURN,
    "{{ messages[-1].content }}" + _TURN,
    "{{ messages[1].content ~ messages[0].content }}" + _TURN,
    "a{{ messages[0].content ~ 'b' }}c{{ 'd' + messages[0].content }}e",
    "a{{ 'b' ~ messages[0].content ~ messages[1].content }}c",
    "{% for m in messages %}{{ loop.previtem.content if loop.previtem }}<{{ m.content }}>{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{{ messages[0].content }}{{ m.content }}{{ messages[1].content }}</s>{% endfor %}",
    "{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{{ messages[0].content }}",
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "{% for m in messages|reverse %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "{% for m in messages|selectattr('role', 'equalto', 'user') %}<{{ m.content }}>{% endfor %}" + _TURN,
    "{% for a in messages %}<{{ a.content }}{% for b in messages %}[{{ b.content }}]{% endfor %}>{% endfor %}",
    "{% for a in messages %}{% if a.role == 'user' %}<{{ a.content }}{% for b in messages[1:2] %}{{ b.content }}{% endfor %}>"
    "{% endif %}{% endfor %}",
    "{% for i in range(messages|length) %}<{{ messages[i].role }}>{{ messages[i].content }}</s>{% endfor %}",
    "{% for i in range(messages|length) %}a{% set m = messages[i] %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "{% for i in range(1, messages|length) %}{{ messages[i - 1].content }}<{{ messages[i].content }}>{% endfor %}",
    "{% set d = {0: messages[0], 1: messages[1]} %}{% for i in range(2) %}<{{ d[i].content }}>{% endfor %}",
    "{% for i in [true, 1] %}<{{ messages[i].content }}>{% endfor %}",
    "{% for pair in messages|batch(2) %}{{ pair[0].content }}{% endfor %}",
    "{% for m in messages %}{% for k, x in m.items() %}{{ k }}={{ x }};{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for k in messages[0] %}{{ k }} {% endfor %}{{ m.content }}{% endfor %}",
    # operations that keep the origin of text, and operations that lose it
    "{% for m in messages %}{{ messages[1].content.strip() }}|{{ m.content }}|{% endfor %}",
    "{% for m in messages %}{{ messages[1].content|trim }}|{{ messages[1].content[1:3] }}|{{ m.role }}|{% endfor %}",
    "{% for m in messages %}{{ messages[0].content.split('k')[0] }}|{{ messages[0].content.split()|join('+') }}|{% endfor %}",
    "{% for m in messages %}{{ messages[0].content.replace('z', messages[1].content) }}|{{ m.role }}{% endfor %}",
    "{% for m in messages %}{{ messages[0].content|replace('z', '-') }}|{{ 'a-b'|replace('-', messages[0].content) }}{% endfor %}",
    "{% for m in messages %}{{ messages[0].content|upper }}|{{ messages[0].content.lower() }}|{{ messages[0].content|capitalize }}"
    "{% endfor %}",
    "{% for m in messages %}{{ [messages[0].content, m.content]|join(', ') }}|{{ messages[0].content.join(['a', 'b']) }}{% endfor %}",
    "{% for m in messages %}{{ messages[0].content|tojson }}|{{ messages[0].content|indent(2) }}|{{ messages[0].content * 2 }}{% endfor %}",
    "{% for m in messages %}{{ '{} {}'.format(messages[0].content, 1) }}|{{ messages[0].content|safe }}|{{ [messages[0].content] }}"
    "{% endfor %}",
    "{% for m in messages %}{{ messages[0].content|list|join }}|{{ messages[0].content|first }}{{ messages[0].content|last }}{% endfor %}",
    "{% for m in messages %}{{ messages[0].content.removeprefix('U').removesuffix('?') }}|{{ messages[0].content[:-1] }}{% endfor %}",
    "{% for m in messages %}{{ (messages[0].content ~ m.content)[2:9] }}|{{ messages[0].content + '' + m.content }}{% endfor %}",
    "{% set l = messages|map(attribute='content')|list %}{{ l|join('-') }}{% for x in l %}<{{ x }}>{% endfor %}",
    "{% for m in messages %}{{ messages[0].content|string|default('x') }}|{{ messages[0].content or m.content }}{% endfor %}",
    # captures and macros
    "{% set x %}<{{ messages[0].content }}>{% endset %}{{ x }}|{{ x|trim }}|{{ x|upper }}" + _TURN,
    "{% for m in messages %}{% set x %}<{{ m.content }}{{ messages[0].content }}>{% endset %}{{ x }}{% endfor %}{{ x }}",
    "{% set x %}" + _TURN + "{% endset %}[{{ x }}]",
    "{% set x %}{{ messages[0].content }}" + _TURN + "{% endset %}{{ x }}",
    "{% set x %}{{ messages[1].content }}" + _TURN + "{% endset %}{{ x ~ messages[0].content }}",
    "{% set x %}" + _TURN + "{% endset %}{{ x[3:] }}{{ x }}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}</s>{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}</s>{% endmacro %}{{ turn(messages[0]) }}{{ turn(messages[1]) ~ 'x' }}",
    "{% macro all() %}" + _TURN + "{% endmacro %}{{ all() }}{% set x = all() %}{{ x }}",
    "{% macro two(a, b) %}{{ a.content }}{{ b.content }}{% endmacro %}{{ two(messages[0], messages[1]) }}{{ two(messages[0], {}) }}",
    "{% macro deep(n) %}{{ messages[n].content }}{% if n %}{{ deep(n - 1) }}{% endif %}{% endmacro %}{{ deep(1) }}",
    "{% filter replace('z', 'q') %}<{{ messages[0].content }}>{% endfilter %}{% filter trim %}"
    + _TURN
    + "{% endfilter %}",
    "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% filter trim %} {{ messages[0].content }}{% endfilter %}"
    "{% endfor %}",
    "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ '<' ~ m.content ~ '>' %}{% endfor %}{{ ns.t }}",
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}{% endif %}{% endfor %}"
    "{{ 'sys: ' + ns.s }}" + _TURN,
    "{% for m in messages %}{% set x %}a{{ m.content }}{% if loop.first %}{% continue %}{% endif %}{% endset %}{{ x }}{% endfor %}",
    "{% for m in messages %}<{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}>{% endfor %}{{ messages[0].content }}",
    # generation blocks
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}"
    "<u>{{ m.content }}</s>{% endif %}{% endfor %}",
    "{% generation %}{{ messages[0].content }}{% generation %}é{% endgeneration %}{% endgeneration %}",
    "{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}{{ x }}",
    "{% macro g(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{% for m in messages %}{{ g(m) }}{% endfor %}",
    "é{% generation %}{% endgeneration %}{% for m in messages %}é{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    # calls, parts, reasoning, refusals
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments|tojson if c.function.arguments is mapping else c.function.arguments }}{% endfor %}</s>{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{{ p.type }}{% endfor %}{% endif %}</s>{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.thinking }}{{ m.reasoning }}{{ m|length }}</s>{% endfor %}",
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no role ' ~ m.role) }}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "{{ tools|length if tools else 'none' }}{{ enable_thinking }}{% for t in tools or [] %}{{ t|tojson }}{% endfor %}"
    + _TURN,
    "{{ messages }}{{ messages|tojson }}" + _TURN,
)

_USER, _SAID = {"role": "user", "content": "Uzq é?"}, {"role": "assistant", "content": " Azk.\n"}
CHATS: Final = (
    Conversation([_USER, _SAID, _USER, _SAID]),
    Conversation(
        [{"role": "system", "content": "Szq"}, _USER, _SAID, {"role": "tool", "content": 'T\\u00e9"\n'}, _SAID]
    ),
    Conversation([_SAID, _USER]),
    Conversation([_SAID, _SAID, _SAID]),
    Conversation([{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, _USER]),
    Conversation(
        [
            {"role": "user", "content": "zzz"},
            {"role": "assistant", "content": "zqzk k"},
            {"role": "user", "content": "k"},
        ]
    ),
    Conversation([{"role": "tool", "content": "日本語 z\u2028"}, {"role": "critic", "content": "\u00a0no "}, _SAID]),
    Conversation(
        [_USER, {"role": "assistant", "content": None, "reasoning": "Rz"}, _USER, {**_SAID, "thinking": "Rk"}]
    ),
    Conversation(
        [{**_USER, "reasoning_content": "Ru", "x": {"k": ["v"]}}, {**_SAID, "thinking": None, "reasoning": "z"}]
    ),
    Conversation(
        [{"role": "user", "content": [{"type": "text", "text": "Uz"}, {"type": "text", "text": "k"}]}, _SAID],
        variables={"enable_thinking": True},
    ),
    Conversation([_USER, {**_SAID, "tool_calls": [{"function": {"name": "f", "arguments": {"q": "Cz"}}}]}], tools=[]),
    Conversation(
        [_USER, {**_SAID, "tool_calls": [{"function": {"name": 'f"é', "arguments": "{}"}}] * 2}], tools=[{"a": "é"}]
    ),
    Conversation([{"content": "no role"}, _SAID, {"role": 5, "content": 5}]),
    Conversation(
        [{"role": "assistant", "content": "<think>a</think>zqk"}, _USER, {"role": "system", "content": "S"}, _SAID]
    ),
)
