"""Which field of an assistant's message printed which text, by the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.template.probes import PROBES
from penstock.prepare.template.reference import Reference
from penstock.prepare.template.renderer import TemplateRenderer
from penstock.prepare.template.turns import MARK_SHIFT, Field, TurnColumn
from tests.prepare.template.conversations import BATTERY, DATE, TEMPLATES, TOKENS
from tests.prepare.template.field_cases import CASES, Sentinels, runs_of, sentinels


def new(template: str) -> Reference:
    return Reference(template, special_tokens=TOKENS, variables={}, date=DATE)


@pytest.mark.parametrize("name", CASES)
def test_a_field_is_known_through_every_operation(name: str) -> None:
    case = CASES[name]
    rendered = new(case.template).render([case.conversation])
    assert rendered.errors == {}
    assert rendered.known.all()
    assert runs_of(rendered) == [case.runs]


# ---- sentinels


def labels_of(reference: Reference, given: Sentinels) -> tuple[str, list[int]] | None:
    """The text and the label of each character; None if the template refuses the conversation."""
    rendered = reference.render([given.conversation])
    if rendered.errors:
        return None
    assert rendered.known.all()
    labels = np.zeros(len(rendered.data), np.int32)
    for _, label, start, end in zip(*(column.tolist() for column in rendered.fields), strict=True):
        labels[start:end] = label
    starts = [k for k, byte in enumerate(rendered.data) if byte & 0xC0 != 0x80]
    return rendered.data.decode(), labels[starts].tolist()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_word_of_a_field_has_its_label(path: Any) -> None:
    reference = new(path.read_text())
    for given_as in ({}, {"as_text": True}, {"in_content": True}):
        words = sentinels(**given_as)
        found = labels_of(reference, words)
        if found is None:
            continue
        text, labels = found
        lost = []
        for field, start, end in words.printed(text):
            by_tool = field is Field.CALL_NAME and not any(labels[start:end])  # a result repeats the name of its call
            if set(labels[start:end]) != {field} and not by_tool:
                lost.append(text[start:end])
        assert lost == []
        for word in ("Szq", "Uzq", "Tzq"):
            assert all(not any(labels[k : k + 5]) for k in range(len(text)) if text.startswith(word, k))


# ---- laws


@pytest.mark.parametrize("path", TEMPLATES[::8], ids=lambda path: path.stem)
def test_runs_are_sorted_and_never_touch_with_equal_labels(path: Any) -> None:
    rendered = new(path.read_text()).render(BATTERY)
    ends = rendered.text_ends.tolist()
    runs = list(zip(*(column.tolist() for column in rendered.fields), strict=True))
    assert runs
    for row, label, start, end in runs:
        assert (ends[row - 1] if row else 0) <= start < end <= ends[row]
        assert 0 < label < len(Field)
    for (row, label, _, end), (other, next_label, start, _) in pairwise(runs):
        assert end <= start
        assert (row, label, end) != (other, next_label, start)


CONTENT = "{% for m in messages %}<{{ m.content }}>{{ m.content[1:] }}|{{ m.content|list|join }}{% endfor %}"
REFERENCE = new(CONTENT)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "é", "\n", "<"])), st.sets(st.integers(0, 24)))
def test_each_character_of_content_keeps_its_label(words: list[str], edges: set[int]) -> None:
    text = "".join(words)
    places = sorted(place for place in edges if place <= len(text))
    marks = tuple(zip(places[::2], places[1::2], strict=False))
    chat = Conversation([{"role": "assistant", "content": text}], spans=(marks,))
    found = labels_of(REFERENCE, Sentinels(chat, {}))
    assert found is not None
    labels = found[1]
    expected = fields_of(text)
    for number, (start, end) in enumerate(marks, 1):
        expected[start:end] = [field | number << MARK_SHIFT for field in expected[start:end]]
    assert labels == [0, *expected, 0, *expected[1:], 0, *expected]


def fields_of(text: str) -> list[int]:
    """The field of each character: the tags are paired by going through them once."""
    fields: list[int] = [Field.CONTENT] * len(text)
    opening, is_first = -1, True
    for k in range(len(text)):
        if text.startswith("<think>", k):
            opening = k
        elif text.startswith("</think>", k):
            if opening >= 0:
                fields[opening : opening + 7] = [Field.THINK_TAG] * 7
                fields[opening + 7 : k] = [Field.THOUGHT] * (k - opening - 7)
            elif is_first:
                fields[:k] = [Field.THOUGHT] * k
            if opening >= 0 or is_first:
                fields[k : k + 8] = [Field.THINK_TAG] * 8
            opening, is_first = -1, False
    return fields


# ---- labels never change a text


def test_values_that_need_their_real_type_lose_only_their_own_labels() -> None:
    call = {"name": "f", "arguments": {"yes": True, "q": "v", "n": 3}}
    chat = Conversation([{"role": "assistant", "content": "c", "tool_calls": [call]}])
    template = (
        "{% for m in messages %}{{ m.content }}{% set a = m.tool_calls[0].arguments %}"
        "{{ a.yes + 1 }}{{ a.q }}{{ a.n }}{% endfor %}"
    )
    rendered = new(template).render([chat])
    assert rendered.data == b"c2v3"
    assert rendered.known.all()
    assert runs_of(rendered) == [[("CONTENT", "c"), ("CALL_ARGUMENTS", "v")]]


@pytest.mark.parametrize("hidden", ["label", "_label", "_budget", "_value", "labels", "spans"])
def test_keys_are_found_under_the_names_of_attributes(hidden: str) -> None:
    chat = Conversation([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {hidden: "v"}}]}])
    template = f"{{% for m in messages %}}{{{{ m.tool_calls[0].arguments.{hidden} }}}}{{% endfor %}}"
    rendered = new(template).render([chat])
    assert rendered.data == b"v"
    assert runs_of(rendered) == [[("CALL_ARGUMENTS", "v")]]


# ---- turns


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "deepseekv3"])
def test_turns_have_the_fields_of_their_kept_text(name: str) -> None:
    template = next(path for path in TEMPLATES if path.stem == name).read_text()
    renderer = TemplateRenderer(template, special_tokens=TOKENS, variables={}, date=DATE, turns=True, fast=False)
    chats = [*PROBES, renderer.adapter.adapt(sentinels().conversation)]
    turns = renderer.render(chats).turns
    assert turns is not None
    runs = turns.fields.tolist()
    assert runs
    sizes = turns.kept[0].tolist()
    columns = (TurnColumn.ROW, TurnColumn.MESSAGE, TurnColumn.CUT)
    for number, (row, message, cut) in enumerate(turns.table[:, columns].tolist()):
        own = [tuple(run[1:]) for run in runs if run[0] == number]
        if not sizes[number]:
            assert own == []
            continue
        fields = renderer.render([chats[row]._replace(messages=chats[row].messages[: message + 1])]).fields
        whole = list(zip(*(column.tolist() for column in fields[1:]), strict=True))
        assert own == [(label, max(start, cut), end) for label, start, end in whole if end > cut]
