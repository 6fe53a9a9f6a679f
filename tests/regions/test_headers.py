"""Headers that templates print in unusual ways are never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from tests.regions.splitting import trained_texts

PROMPT = "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
TOOLS_FIRST = """
{%- if tools %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start|>user<|end|>\n\n' -}}
    {{- 'Answer with the name of a function.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- first_user_message + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' not in message and message.role != 'tool' %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n' }}
        {%- if message['content'] is string %}{{- message['content'] }}{%- endif %}
        {{- '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start|>assistant<|end|>\n\n' -}}
        {{- message['content'] }}
        {%- for call in message.tool_calls %}{{- '{"name": "' + call.function.name + '"}' }}{%- endfor %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- '<|start|>ipython<|end|>\n\n' }}{{- message.content | tojson }}{{- '<|eom|>' }}
    {%- endif %}
{%- endfor %}"""
ANOTHER_NAME = """
{%- for message in messages %}
{%- set text = message['content'] %}
{{- 'Turn: ' }}
{%- set body = '<|start|>' + message['role'] + '<|end|>\n\n' + text + '<|eot|>' %}
{{- body }}
{%- endfor %}"""
PLAIN = [("user", "U1"), ("assistant", "A1"), ("user", "U2"), ("assistant", "A2")]
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("template", [TOOLS_FIRST, ANOTHER_NAME], ids=["tools first", "another name"])
def test_headers_are_not_trained(
    template: str, tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "template.jinja").write_text(template + PROMPT)
    plain = {"messages": [{"role": role, "content": content} for role, content in PLAIN]}
    agent = {"messages": [*plain["messages"][:2], {"role": "tool", "content": "R"}, plain["messages"][3]]}
    agent = {"messages": [{**m, **({"tool_calls": CALLS} if m["content"] == "A1" else {})} for m in agent["messages"]]}
    rows = [plain, {**agent, "tools": [TOOL]}] if template is TOOLS_FIRST else [plain]
    dataset = ps.prepare(
        write_rows(rows), tokenizer=str(tokenizer), template=tmp_path / "template.jinja", cache=tmp_path / "cache"
    )
    answers = [["A1<|eot|>", "A2<|eot|>"], ['A1{"name": "f"}<|eot|>', "A2<|eot|>"]]
    assert [trained_texts(dataset, k) for k in range(len(rows))] == answers[: len(rows)]
