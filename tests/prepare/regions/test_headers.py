"""Headers that templates print in unusual ways are never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from tests.support.splitting import trained_spans, trained_texts

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


# ---- forms of headers: what can't be told from what the assistant writes is never trained

SPACED = """{%- set ns = namespace(asked=false) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{%- set ns.asked = true %}{{- '<|user|>' + message.content }}{%- endif %}
  {%- if message.role == 'tool' %}{%- set ns.asked = false %}{{- '<|result|>' + message.content }}{%- endif %}
  {%- if message.role == 'assistant' %}
    {%- if ns.asked %}
      {{'<|bot|>'}}
      {{'<|say|>'}}
    {%- endif %}
    {%- set ns.asked = false %}
    {{- message.content }}{% for call in message.tool_calls %}{{ '<|call|>' + call.function.name }}{% endfor %}
    {{- '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}{{ '  <|bot|><|say|>' }}{% endif %}"""
TWO_FORMS = """{%- for message in messages %}
  {%- if 'tool_calls' in message %}
    {{- '\\n<|start|>assistant<|sep|>\\n' + message.content }}
    {%- for call in message.tool_calls %}{{- '{"name": "' + call.function.name + '"}' }}{%- endfor %}{{- '\\n<|end|>' }}
  {%- elif message.role == 'tool' %}{{- '\\n<|start|>tool<|sep|>\\n' + message.content + '\\n<|end|>' }}
  {%- else %}{{- '<|start|>' + message.role + '<|sep|>\\n' + message.content + '\\n<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\\n<|start|>assistant<|sep|>\\n' }}{%- endif %}"""
UNSEEN_FORM = """{%- for message in messages %}
  {{- '<|start|>' + message.role + '\\n' }}
  {%- if message.role == 'assistant' and message.content|length > 20 %}
    {{- 'long<|end|>\\n<|start|>assistant\\n' }}
  {%- endif %}
  {{- message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""
BETWEEN_FIELDS = """{%- for message in messages %}
  {%- if message.reasoning_content %}
    {{- '<|start|>assistant<|think|>' + message.reasoning_content + '<|end|>' }}
  {%- endif %}
  {{- '<|start|>' + message.role + '<|text|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
RESULTS_INSIDE = """{%- for message in messages %}
  {{- '<|turn>' + message.role + '\\n' + (message.content or '') }}
  {%- for call in message.tool_calls %}{{- '<|call>' + call.function.name + '<call|>' }}{%- endfor %}
  {%- for result in message.tool_responses %}{{- '<|result>' + (result.response|tojson) + '<result|>' }}{%- endfor %}
  {{- '<turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>assistant\\n' }}{%- endif %}"""
TOOLS_INSIDE = """{%- for message in messages %}
  {{- '<|start|>' + message.role + '\\n' }}
  {%- if loop.first and tools %}{{- 'Functions that can be called:\\n' + (tools|tojson) + '\\n\\n' }}{%- endif %}
  {{- message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""


def chat(*texts: str, role: str = "user") -> list[dict[str, object]]:
    roles = ["user", "assistant"] if role == "user" else ["assistant", "user"]
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


CALL = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "content": "R"}
CARRIED = CALL | {"tool_responses": [{"name": "f", "response": {"r": "secret"}}]}


@pytest.mark.parametrize("fast", [True, False], ids=["machine", "reference"])
@pytest.mark.parametrize(
    ("template", "rows", "trained"),
    [
        # the prompt and the history differ in white space; calls and answers after a tool have other headers
        (SPACED, [chat("U1", "A1"), [*chat("U1", "A1"), RESULT, {"role": "assistant", "content": "A2"}]], [None, None]),
        (SPACED, [[RESULT, {"role": "assistant", "content": "A1"}]], [["A1<|end|>"]]),
        (TWO_FORMS, [chat("U1", "A1"), [*chat("U1"), CALL]], [None, ['{"name": "f"}\n<|end|>']]),
        # a form that no probe shows is found when it is rendered
        (UNSEEN_FORM, [chat("U1", "A1"), chat("U1", "A" * 30)], [["A1<|end|>"], None]),
        # markers that the message contains are its own words
        (UNSEEN_FORM, [chat("U1", "<|start|>assistant\n")], [["<|start|>assistant\n<|end|>"]]),
        # between the fields of a message, the marker is what the model writes
        (
            BETWEEN_FIELDS,
            [[*chat("U1"), {"role": "assistant", "content": "A1", "reasoning_content": "R1"}], chat("U1", "A1")],
            [["<|think|>R1<|end|><|start|>assistant<|text|>A1<|end|>"], ["<|text|>A1<|end|>"]],
        ),
        # tool results that an assistant message carries are the tool's words
        (
            RESULTS_INSIDE,
            [[*chat("U1"), CARRIED], [*chat("U1"), CALL]],
            [["<|call>f<call|>", "<turn|>"], ["<|call>f<call|><turn|>"]],
        ),
        # nor are the tools, printed before whatever message is the first
        (TOOLS_INSIDE, [chat("A1", "U1", "A2", role="assistant"), chat("U1", "A1")], [None, ["A1<|end|>"]]),
    ],
    ids=["spaced", "after a tool", "two forms", "unseen", "own words", "fields", "results inside", "tools inside"],
)
def test_uncertain_forms_are_unknown(
    template: str,
    rows: list[list[dict[str, object]]],
    trained: list[list[str] | None],
    fast: bool,
    tokenizer: Path,
    write_rows: Callable[..., Path],
    tmp_path: Path,
) -> None:
    (tmp_path / "template.jinja").write_text(template)
    given = [{"messages": messages, **({"tools": [TOOL]} if template is TOOLS_INSIDE else {})} for messages in rows]
    dataset = ps.prepare(
        write_rows(given), tokenizer=str(tokenizer), template=tmp_path / "template.jinja", cache=tmp_path / "cache",
        fast=fast, workers=1,
    )  # fmt: skip
    unknown = dataset.rows_with("header_unknown").tolist() if "header_unknown" in dataset.ledger.notes else []
    assert unknown == [number for number, texts in enumerate(trained) if texts is None]
    if len(unknown) < len(rows):
        view = dataset.view(max_length=None, regions_unknown="drop")
        found = {int(number): trained_spans(dataset, view[k]) for k, number in enumerate(view.index.rows)}
        assert found == {number: texts for number, texts in enumerate(trained) if texts is not None}
