"""Forms of a conversation that real templates accept, and those that must be adapted."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from benchmarks.clock import DATE, StoppedClock
from penstock.errors import RowError
from penstock.prepare.chat.adapt import Adapter, Needs
from penstock.prepare.chat.conversation import Conversation, Role
from penstock.prepare.chat.formats import detect
from penstock.prepare.chat.rows import RowReader
from penstock.prepare.template.renderer import TemplateRenderer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.submodule_search_locations is not None
FOLDER = Path(next(iter(SPEC.submodule_search_locations)), "chat_templates")
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def transformers_of(template: str) -> Callable[..., str]:
    def plain(messages: Any, tools: Any = None, variables: Any = None, add_generation_prompt: bool = False) -> str:
        try:
            rendered, _ = render_jinja_template(
                [messages],
                tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **TOKENS,
                **(variables or {}),
            )
        except Exception as error:
            raise RowError("template", str(error)) from error
        return str(rendered[0])

    return plain


@cache
def plain_of(name: str) -> Callable[..., str]:
    return transformers_of((FOLDER / f"{name}.jinja").read_text())


@cache
def adapter_of(name: str) -> Adapter:
    return Adapter(plain_of(name))


def render(name: str, conversation: Conversation) -> str | None:
    try:
        return plain_of(name)(conversation.messages, conversation.tools)
    except RowError:
        return None


ARGUMENTS = {"city": 'Zürich "x" <b>', "days": 3, "near": [{"lat": None, "on": True}]}
FUNCTION = {
    "name": "look_up",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CANONICAL = Conversation(
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": ARGUMENTS}}
            ],
        },
        {"role": "tool", "content": "", "tool_call_id": "call00001", "name": "look_up"},
        {"role": "assistant", "content": "Fine."},
    ],
    [{"type": "function", "function": FUNCTION}],
)


def changed(
    change: Callable[[list[dict[str, Any]]], object], tools: list[Any] | None = CANONICAL.tools
) -> Conversation:
    messages = copy.deepcopy(CANONICAL.messages)
    change(messages)
    return Conversation(messages, tools)


def function_of(messages: list[dict[str, Any]]) -> dict[str, Any]:
    function: dict[str, Any] = messages[2]["tool_calls"][0]["function"]
    return function


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def give_parts(messages: list[dict[str, Any]], count: int) -> None:
    for message in messages:
        text = message["content"]
        if text:
            message["content"] = [part(text)] if count == 1 else [part(text[:3]), part(text[3:])]


FORMS = {
    "argument string": changed(lambda m: function_of(m).update(arguments=json.dumps(ARGUMENTS, ensure_ascii=False))),
    "bare call": changed(lambda m: m[2].update(tool_calls=[function_of(m)])),
    "call without type": changed(lambda m: m[2]["tool_calls"][0].pop("type")),
    "bare tool": changed(lambda m: None, [FUNCTION]),
    "null content": changed(lambda m: m[2].update(content=None)),
    "missing content": changed(lambda m: m[2].pop("content")),
    "null result": changed(lambda m: m[3].update(content=None)),
    "one part": changed(lambda m: give_parts(m, 1)),
    "two parts": changed(lambda m: give_parts(m, 2)),
    "no parts": changed(lambda m: m[2].update(content=[])),
    "null calls": changed(lambda m: m[4].update(tool_calls=None)),
    "no calls": changed(lambda m: m[4].update(tool_calls=[])),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_is_accepted_as_given_or_after_adapting(name: str) -> None:
    adapter = adapter_of(name)
    expected = render(name, adapter.adapt(CANONICAL))
    for form, conversation in FORMS.items():
        before = copy.deepcopy(conversation)
        adapted = adapter.adapt(conversation)
        assert conversation == before, form  # never changed in place
        assert adapter.adapt(adapted) is adapted, form
        if expected is None:
            continue  # the template accepts no system prompt, or no tools
        text = render(name, adapted)
        assert text is not None, form
        if adapted is not conversation:
            assert text == expected, form


@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_messages_are_never_copied(name: str) -> None:
    adapter = adapter_of(name)
    plain = Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}])
    assert (adapter.adapt(plain) is plain) == (not adapter.needs.no_text)
    pieces = Conversation([], texts=((Role.ASSISTANT, "text"),))
    assert adapter.adapt(pieces) is pieces


def arguments_of(name: str, arguments: object) -> object:
    conversation = adapter_of(name).adapt(changed(lambda m: function_of(m).update(arguments=arguments)))
    return function_of(conversation.messages)["arguments"]


def test_arguments_are_adapted_to_the_template() -> None:
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    for name in ("qwen2_5", "qwen3_5_think", "llama3_1", "gptoss"):  # double-encode strings, or fail on them
        assert (arguments_of(name, text), arguments_of(name, ARGUMENTS)) == (ARGUMENTS, ARGUMENTS)
        assert arguments_of(name, " ") == {}
    for name in ("deepseekv3", "deepseek_r1_distill"):  # fail on objects
        assert (arguments_of(name, text), arguments_of(name, ARGUMENTS)) == (text, text)
    for name in ("qwen3", "qwen2_5_vl", "llama3"):  # accept both, or print neither
        assert (arguments_of(name, text), arguments_of(name, ARGUMENTS)) == (text, ARGUMENTS)


def test_a_string_that_is_not_an_object_stays_if_the_template_accepts_it() -> None:
    kept = changed(lambda m: function_of(m).update(arguments="[1]"))
    assert adapter_of("qwen2_5").adapt(kept) is kept
    with pytest.raises(RowError) as caught:
        arguments_of("qwen3_5_think", "not JSON")
    assert caught.value.kind == "bad_tool_calls"
    assert str(caught.value) == (
        "the arguments of messages[2].tool_calls[0] (look_up) are a string that is not a JSON object, and the template "
        'takes only objects. Give them as an object, or as a string such as {"city": "Bern"}'
    )


def test_parsed_arguments_keep_their_numbers() -> None:
    given = changed(lambda m: function_of(m).update(arguments=f'{{"x": 0.5, "n": {2**70}}}'))
    adapted = adapter_of("qwen2_5").adapt(given)
    assert function_of(adapted.messages)["arguments"] == {"x": 0.5, "n": 2**70}


def test_calls_that_need_null_content() -> None:
    adapted = adapter_of("deepseek_r1_distill").adapt(CANONICAL)
    assert adapted.messages[2]["content"] is None
    assert "look_up" in (render("deepseek_r1_distill", adapted) or "")
    assert "look_up" not in (render("deepseek_r1_distill", CANONICAL) or "")


def test_templates_that_require_lists() -> None:
    adapted = adapter_of("llava_next").adapt(Conversation(CANONICAL.messages[:2] + CANONICAL.messages[4:]))
    assert [message["content"] for message in adapted.messages] == [
        [part("Be kind.")],
        [part("Weather?")],
        [part("Fine.")],
    ]
    two = Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [part("a"), part("b")]}])
    assert adapter_of("llava_next").adapt(two).messages[1]["content"] == [part("ab")]


def test_a_list_of_one_part_stays_if_only_longer_lists_fail() -> None:
    assert adapter_of("gemma3").needs.no_parts == {"system"}
    assert adapter_of("gemma3").needs.no_part == frozenset()


@pytest.mark.parametrize(
    ("template", "needs"),
    [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            Needs(no_part=ROLES, no_parts=ROLES, text_for_null=frozenset({"assistant", "calls", "tool"})),
        ),
        ("{{ raise_exception('never') }}", Needs()),
        ("fixed", Needs()),
        (
            "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{{ c.function.arguments }}{% endfor %}{% endfor %}",
            Needs(string_arguments=True, wrapped_calls=True, no_part=ROLES, no_parts=ROLES),
        ),
        (
            "{% for m in messages %}{{ m.content or '' }}{% endfor %}{% for t in tools or [] %}{{ t.name "
            "}}{{ t.description }}{% endfor %}",
            Needs(bare_tools=True, no_part=ROLES, no_parts=ROLES),
        ),
    ],
)
def test_needs_are_found_by_probing(template: str, needs: Needs) -> None:
    assert Adapter(transformers_of(template)).needs == needs


ROWS: list[dict[str, Any]] = [
    {"messages": conversation.messages, "tools": conversation.tools} for conversation in (CANONICAL, *FORMS.values())
]
ROWS += [
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"},
        ]
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "thinking": "Hm"}]},
    {
        "messages": CANONICAL.messages,
        "tools": json.dumps(CANONICAL.tools),
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3_1", "deepseekv3", "gptoss", "gemma4", "glm4moe", "llava_next"]
)
def test_adapted_rows_render_as_in_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", StoppedClock)
    template = (FOLDER / f"{name}.jinja").read_text()
    renderer = TemplateRenderer(template, special_tokens=TOKENS, variables={}, date=DATE)
    adapter = renderer.adapter
    assert adapter.needs == adapter_of(name).needs
    for row in ROWS:
        reader = RowReader(detect([row]))
        (conversation,) = map(adapter.adapt, reader.conversations(json.dumps(row).encode()))
        given = conversation.messages, conversation.tools, conversation.variables
        try:
            expected = plain_of(name)(*given)
        except RowError as error:
            with pytest.raises(RowError):
                renderer.plain(*given)
            assert name == "llava_next", error  # has no tools
        else:
            assert renderer.plain(*given) == expected
            assert not re.search(r"\{'\w+':", expected)
