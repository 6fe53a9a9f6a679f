"""The bodies of answers are divided into reasoning, content, calls and what the template prints around them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prepare.chat.conversation import BODY_PARTS, Conversation, Message, Part, Role
from penstock.prepare.modes import ReasoningInContent, RegionsMode
from penstock.prepare.regions.markup import Gap, Kind, Markup
from penstock.prepare.regions.parts import parts_of_text
from penstock.prepare.regions.segments import TOOL, Segments
from penstock.prepare.regions.splitter import Splitter, spans_of
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.turns import Field
from tests.prepare.template.conversations import templates
from tests.prepare.template.field_cases import Sentinels, sentinels
from tests.support.splitting import Recipe, Split, assistant, calls, recipe, returns, trl_recipe, user

TRL = dict(templates())
OF_FIELD = {
    Field.REASONING: (Part.REASONING,),
    Field.CONTENT: (Part.CONTENT,),
    Field.CALL_NAME: (Part.CALL_NAME,),
    Field.CALL_ARGUMENTS: (Part.CALL_ARGUMENTS,),
    Field.THOUGHT: (Part.REASONING, Part.CONTENT),  # it depends on who prints the tags
}
MODES = (RegionsMode.STRUCTURE, RegionsMode.AUTO)


def divided(split: Split, message: int) -> list[tuple[str, str]]:
    """The parts of a message's body in order, and its other runs of a tool."""
    return [
        ("TOOL" if run.role is Role.TOOL else run.part.name, run.text)
        for run in split.runs
        if run.message == message and (run.role is Role.TOOL or run.part in BODY_PARTS)
    ]


# ---- every template of trl


def cases() -> Iterator[Sentinels]:
    for shape in ({}, {"as_text": True}, {"in_content": True}, {"in_content": True, "as_text": True}):
        yield sentinels(**shape)
    for shape in ({}, {"in_content": True}):  # for templates that refuse calls, or turns that don't alternate
        given = sentinels(**shape)
        spoken = [m for m in given.conversation.messages if m["role"] in ("user", "assistant")]
        talk = [{k: v for k, v in spoken[k].items() if k != "tool_calls"} for k in (0, 1, 3, 4)]
        yield given._replace(conversation=Conversation(talk))


def part_of_bytes(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.diff(segments.ends, prepend=0)
    return np.repeat(segments.parts, sizes), np.repeat(segments.roles, sizes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TRL)
def test_every_word_of_an_answer_is_in_the_part_of_its_field(name: str, mode: RegionsMode) -> None:
    used = recipe(TRL[name], mode)
    served = 0
    for case in cases():
        conversation = used.renderer.adapter.adapt(case.conversation)
        for render in (used.renderer.render, used.renderer.render_reference):
            rendered = render([conversation])
            segments, errors = used.splitter.split(rendered)
            if rendered.errors or errors:
                continue
            served += 1
            assert segments.known.all()
            parts, roles = part_of_bytes(segments)
            assert not ((parts == Part.BODY) & (roles == Role.ASSISTANT)).any()
            text = rendered.data.decode()
            places = np.cumsum([0, *(len(character.encode()) for character in text)])
            for field, first, last in case.printed(text):
                start, end = places[first], places[last]
                if (roles[start:end] == Role.ASSISTANT).all():
                    assert set(parts[start:end].tolist()) <= set(OF_FIELD[field]), text[first:last]
            check_union(used.splitter, rendered, segments)
    assert served >= 2


def check_union(splitter: Splitter, rendered: Rendered, segments: Segments) -> None:
    """Bodies keep their bounds, and tokens that cross these belong where they did."""
    whole = splitter.cut(rendered, spans_of(rendered), splitter.finder)
    body = (segments.roles == Role.ASSISTANT) & np.isin(segments.parts, BODY_PARTS) | (segments.roles == Role.TOOL)
    before, after = (np.repeat(s.parts, np.diff(s.ends, prepend=0)) for s in (whole, segments))
    assert (np.where(np.isin(after, BODY_PARTS), Part.BODY, after) == before).all()
    assert set(whole.ends.tolist()) <= set(segments.ends.tolist())
    kept = np.isin(segments.ends, whole.ends)
    assert (segments.crossing[kept] == whole.crossing).all()
    assert body[~kept].all()


# ---- examples


def test_reasoning_and_calls_of_qwen3() -> None:
    split = trl_recipe("qwen3").split(
        [user("q"), calls("get_weather", text="Hm.") | {"reasoning_content": "r"}, returns("t"), assistant("a")]
    )
    assert divided(split, 1) == [
        ("REASONING_MARKUP", "<think>\n"),
        ("REASONING", "r"),
        ("REASONING_MARKUP", "\n</think>\n\n"),
        ("CONTENT", "Hm."),
        ("CALL_MARKUP", '\n<tool_call>\n{"name": "'),
        ("CALL_NAME", "get_weather"),
        ("CALL_MARKUP", '", "arguments": '),
        ("CALL_ARGUMENTS", '{"city": "Zürich"}'),
        ("CALL_MARKUP", "}\n</tool_call>"),
    ]
    assert divided(split, 3) == [
        ("EMPTY_REASONING", "<think>\n\n</think>\n\n"),
        ("CONTENT", "a"),
    ]


def test_arguments_that_the_template_prints_one_by_one() -> None:
    """Quotes, braces and booleans that a template spells are arguments, tags around a key are not."""
    call: Message = calls("f")
    call["tool_calls"][0]["function"]["arguments"] = {"on": True, "where": "Rom"}
    messages = [user("q"), call, returns("t"), assistant("a")]
    gemma = divided(trl_recipe("gemma4").split(messages), 1)
    assert ("CALL_ARGUMENTS", '{on:true,where:<|"|>Rom<|"|>}') in gemma
    glm = divided(trl_recipe("glm4moe").split(messages), 1)
    assert [text for part, text in glm if part == "CALL_ARGUMENTS"] == ["on", "true", "where", "Rom"]
    muse = divided(trl_recipe("muse_glimmer").split(messages), 1)
    assert [text for part, text in muse if part == "CALL_ARGUMENTS"] == ["on", "true", "where", "Rom"]


RESULTS = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.stray %}<|result|>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}<|done|>{% endfor %}"
    "{% for r in m.tool_responses or [] %}<|result|>{{ r.response }}<|done|>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def test_results_that_an_answer_carries_are_the_tools() -> None:
    carried = calls("f") | {"tool_responses": [{"name": "f", "response": "secret"}]}
    split = recipe(RESULTS).split([user("q"), carried, user("q"), assistant("a")])
    assert split.known
    assert [text for part, text in divided(split, 1) if part == "TOOL"] == ["<|result|>secret<|done|>"]
    stray = recipe(RESULTS).split([user("q"), carried, user("q"), assistant("a", stray=True)])
    assert not stray.known  # the result of another message explains no marker


def test_channels_are_markup() -> None:
    split = trl_recipe("gptoss").split([user("q"), assistant("a", thinking="r")])
    assert divided(split, 1) == [
        ("REASONING_MARKUP", "<|channel|>analysis<|message|>"),
        ("REASONING", "r"),
        ("REASONING_MARKUP", "<|end|><|start|>assistant"),
        ("MARKUP", "<|channel|>final<|message|>"),
        ("CONTENT", "a"),
    ]


def test_headers_in_tags_are_markup() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>{{ m.content }}<|end|>"
        "{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    split = recipe(template, RegionsMode.AUTO).split([user("q"), assistant("a")])
    assert divided(split, 1) == [("MARKUP", "<|assistant|>"), ("CONTENT", "a")]


IN_CONTENT = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = f"{{% for m in messages %}}{IN_CONTENT}{{% endfor %}}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("mode", ReasoningInContent)
def test_reasoning_inside_of_content(mode: ReasoningInContent) -> None:
    used = recipe(CHATML)
    splitter = Splitter(
        used.renderer,
        special_tokens=frozenset(("<|im_start|>", "<|im_end|>")),
        eos_token="<|im_end|>",
        mode=RegionsMode.STRUCTURE,
        reasoning_in_content=mode,
    )
    text = "<think>\nr\n</think>\n\na"
    messages = [user("q"), assistant(text), user("q"), assistant("<think>\n\n</think>b")]
    split = Recipe(used.renderer, splitter).split(messages)
    if mode is ReasoningInContent.AUTO:
        assert divided(split, 1) == [("CONTENT", text)]
        assert parts_of_text(text, mode) == [(len(text), Part.CONTENT)]
        return
    assert divided(split, 1) == [
        ("REASONING_MARKUP", "<think>"),
        ("REASONING", "\nr\n"),
        ("REASONING_MARKUP", "</think>"),
        ("CONTENT", "\n\na"),
    ]
    assert divided(split, 3) == [("EMPTY_REASONING", "<think>\n\n</think>"), ("CONTENT", "b")]
    assert parts_of_text(text, mode) == [
        (7, Part.REASONING_MARKUP), (3, Part.REASONING), (8, Part.REASONING_MARKUP), (3, Part.CONTENT),
    ]  # fmt: skip
    assert parts_of_text("<think> </think>é", mode) == [(16, Part.EMPTY_REASONING), (2, Part.CONTENT)]
    assert parts_of_text("\n</think>a<think>b", mode) == [(9, Part.EMPTY_REASONING), (9, Part.CONTENT)]


# ---- gaps

HEADER = b"<|assistant|>"
TAGS = Markup(
    [
        Gap(b"<think>\n", Kind.EDGE, Kind.REASONING, True),
        Gap(b"\n</think>\n\n", Kind.REASONING, Kind.CONTENT, False),
        Gap(b"\n<call>", Kind.CONTENT, Kind.CALL, False),
        Gap(b"<call>", Kind.EDGE, Kind.CALL, True),
        Gap(b"</call>", Kind.ARGUMENTS, Kind.EDGE, False),
    ],
    lambda text: HEADER if text.startswith(HEADER) else b"",
)


RM, CM, ER, ARGS = Part.REASONING_MARKUP, Part.CALL_MARKUP, Part.EMPTY_REASONING, Part.CALL_ARGUMENTS


@pytest.mark.parametrize(
    ("text", "before", "after", "is_first", "expected"),
    [
        (b"\n</think>\n\n<call>", Kind.REASONING, Kind.CALL, False, [(11, RM), (6, CM)]),
        (HEADER + b"<think>\n", Kind.EDGE, Kind.REASONING, True, [(13, Part.MARKUP), (8, RM)]),
        (b"<think></think>\n", Kind.EDGE, Kind.CONTENT, True, [(16, ER)]),
        (b"</think>\n", Kind.EDGE, Kind.CONTENT, True, [(9, ER)]),
        (b"</think>\n", Kind.CONTENT, Kind.CONTENT, False, [(9, Part.MARKUP)]),
        (b"</call><tool>", Kind.ARGUMENTS, Kind.TOOL, False, [(7, CM), (6, TOOL)]),
        (b"</tool>\n<call>", Kind.TOOL, Kind.CALL, False, [(8, TOOL), (6, CM)]),
        (b', "', Kind.ARGUMENTS, Kind.ARGUMENTS, False, [(3, ARGS)]),
        (b', "b": ', Kind.ARGUMENTS, Kind.ARGUMENTS, False, [(7, CM)]),
        (b"</v><v>true</v><v>", Kind.ARGUMENTS, Kind.ARGUMENTS, False, [(7, CM), (4, ARGS), (7, CM)]),
    ],
)
def test_gaps(text: bytes, before: Kind, after: Kind, is_first: bool, expected: list[tuple[int, int]]) -> None:
    assert TAGS.divide(Gap(text, before, after, is_first)) == tuple(expected)


TEXTS = st.lists(
    st.sampled_from([b"<think>", b"</think>", b"\n", b"<call>", b"</call>", b"{", b'"', b"true", HEADER, b"x"])
)


@given(TEXTS, st.sampled_from(Kind), st.sampled_from(Kind), st.booleans())
def test_a_gap_is_divided_completely(text: list[bytes], before: Kind, after: Kind, is_first: bool) -> None:
    gap = Gap(b"".join(text), before, after, is_first)
    found = TAGS.divide(gap)
    assert sum(size for size, _ in found) == len(gap.text)
    assert all(size > 0 for size, _ in found)
    assert all(one != other for (_, one), (_, other) in pairwise(found))
    assert {part for _, part in found} <= {*BODY_PARTS[1:], TOOL}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_divided_alike_in_any_batch(data: st.DataObject) -> None:
    used = trl_recipe("qwen3")
    reasoned = {"reasoning_content": "r"}
    turns = st.sampled_from(
        [assistant("a"), assistant("", **reasoned), calls("f", "g", text="c"), calls("f") | reasoned]
    )
    chats = data.draw(st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=4))
    made = [Conversation([m for turn in chat for m in (user("q"), turn)]) for chat in chats]
    for conversation, split in zip(made, used.split_all(made), strict=True):
        assert split == used.split_all([conversation])[0]


def test_a_batch_without_answers() -> None:
    used = recipe(CHATML)
    for chats in ([], [Conversation([user("q")])]):
        segments, errors = used.splitter.split(used.renderer.render(chats))
        assert not errors
        assert len(segments.offsets) == len(chats) + 1
