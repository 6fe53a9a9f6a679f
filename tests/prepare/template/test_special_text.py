"""Special tokens and turn markers are found in the text of messages, however JSON escapes them, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prepare.chat.adapt import SpecialTextFinder
from penstock.prepare.chat.conversation import Conversation, Role
from penstock.prepare.chat.formats import detect
from penstock.prepare.chat.rows import RowReader
from penstock.prepare.template.renderer import TemplateRenderer
from tests.prepare.template.conversations import DATE, TOKENS

ASCII = ("<|im_end|>", "<|im_start|>", "<|im_end|><|im_end|>", "</s>", "[INST]", "[]", "\n", "x")
NEEDLES = {"ascii": ASCII, "more": (*ASCII, "<｜end｜>", "é$"), "none": ()}
PIECES = st.sampled_from([*NEEDLES["more"], "<", "|", "\\", "u003c", "/s>", "a", "ü", "日本", "\u0007", '"', "😀"])
TEXTS = st.lists(PIECES, max_size=6).map("".join)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TURNS = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
MAPPING = detect([TURNS])


def renderer(needles: tuple[str, ...], **options: Any) -> TemplateRenderer:
    return TemplateRenderer(
        TEMPLATE, special_tokens=TOKENS, variables={}, date=DATE, mapping=MAPPING, special_text=needles, **options
    )


RENDERERS = {name: renderer(needles) for name, needles in NEEDLES.items()}


def chat(text: str, key: str = "note", tool: str = "t") -> Conversation:
    return Conversation(
        [{"role": "user", "content": text}, {"role": "assistant", "content": "a", key: 1}], [{"k": tool}]
    )


@pytest.mark.parametrize("name", NEEDLES)
@settings(deadline=None)
@given(text=TEXTS, key=TEXTS, tool=TEXTS)
def test_the_first_and_longest_match_is_found(name: str, text: str, key: str, tool: str) -> None:
    needles = [needle for needle in NEEDLES[name] if len(needle) > 1]
    found = SpecialTextFinder(NEEDLES[name]).first(chat(text, f"k{key}", tool))
    where = next((own for own in (text, f"k{key}", tool) if any(needle in own for needle in needles)), None)
    if where is None:
        assert found is None
        return
    assert found is not None
    first = min(where.index(needle) for needle in needles if needle in where)
    assert found == max((needle for needle in needles if where.startswith(needle, first)), key=len)


@pytest.mark.parametrize("name", NEEDLES)
@settings(deadline=None)
@given(rows=st.lists(st.tuples(TEXTS, TEXTS, TEXTS, st.booleans(), st.booleans()), max_size=5))
def test_both_engines_find_the_same(name: str, rows: list[tuple[str, str, str, bool, bool]]) -> None:
    subject, reader = RENDERERS[name], RowReader(MAPPING)
    written = [_written(chat(*texts), ascii_only, escaped) for *texts, ascii_only, escaped in rows]
    conversations = [reader.conversations(row)[0] for row in written]
    expected = subject.render_reference(conversations).special
    assert subject.render(conversations).special == expected
    if subject.reads_rows:
        served = subject.render_rows(written, lambda row: reader.conversations(row)[0])
        assert not served.left
        assert served.rendered.special == expected


def _written(conversation: Conversation, ascii_only: bool, all_escaped: bool) -> bytes:
    """A row as JSON, with the escapes that different programs use."""
    value = {"messages": conversation.messages, "tools": conversation.tools}
    row = json.dumps(value, ensure_ascii=ascii_only).replace("/", "\\/" if all_escaped else "/")
    return (row.replace("<", "\\u003C") if all_escaped else row).encode()


def test_unused_columns_are_not_searched() -> None:
    row = json.dumps({**TURNS, "note": "<|im_end|>"}).encode()
    subject = RENDERERS["ascii"]
    assert not subject.render_rows([row], RowReader(MAPPING).conversations).rendered.special


def test_plain_texts_are_searched() -> None:
    pieces = ((Role.USER, "a <|im_end|"), (Role.ASSISTANT, "> </s>"))
    assert SpecialTextFinder(ASCII).first(Conversation([], texts=pieces)) == "</s>"


def test_added_tokens_that_mark_turns_count_as_special() -> None:
    template = (
        "{% for m in messages %}{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜><think></think>' }}"
        "{{ m.content }}{% if m.role == 'assistant' %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    )
    added = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜end▁of▁sentence｜>")
    subject = TemplateRenderer(
        template,
        special_tokens=TOKENS,
        variables={},
        date=DATE,
        special_text=("<｜end▁of▁sentence｜>",),
        added_tokens=added,
    )
    assert set(subject.special_text.needles) == {"<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"}
    conversations = [chat(text) for text in ("hi", "<｜Assistant｜>hi", "<think>", "<｜tool▁calls▁begin｜>")]
    assert subject.render(conversations).special == {1: "<｜Assistant｜>"}
