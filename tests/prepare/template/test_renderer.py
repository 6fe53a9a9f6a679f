"""The renderer gives the same text as transformers for every template and conversation, with either engine."""

from __future__ import annotations

import numpy as np
import pytest
import transformers.utils.chat_template_utils as hf

from benchmarks.clock import StoppedClock
from penstock.prepare.chat.conversation import Conversation, Role
from penstock.prepare.template import compiler
from penstock.prepare.template.probes import WORD, assistant, rows, user
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.renderer import TemplateRenderer
from tests.prepare.template.conversations import BATTERY, DATE, TOKENS, expected, templates

TEMPLATES = dict(templates())
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def renderer(template: str, fast: bool = True) -> TemplateRenderer:
    return TemplateRenderer(template, special_tokens=TOKENS, variables={}, date=DATE, fast=fast)


def facts(rendered: Rendered) -> list[tuple[int, int, int]]:
    """Row, role and relevant flags of each message, without refused rows."""
    rows = np.repeat(np.arange(len(rendered.text_ends)), np.diff(rendered.message_offsets))
    matters = np.isin(rendered.message_roles, [Role.ASSISTANT, Role.SYSTEM])
    flags = np.where(matters, rendered.message_flags, 0)
    keep = ~np.isin(rows, list(rendered.errors))
    return list(zip(rows[keep].tolist(), rendered.message_roles[keep].tolist(), flags[keep].tolist(), strict=True))


@pytest.mark.slow  # the quick tier compares them in test_machine.py
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_renders_as_in_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "datetime", StoppedClock)
    subject = renderer(TEMPLATES[name])
    assert subject.why_reference == ""
    assert subject.why_unknown == ""
    fast, reference = subject.render(BATTERY), subject.render_reference(BATTERY)
    assert list(rows(fast)) == list(rows(reference))
    assert facts(fast) == facts(reference)
    assert fast.special == reference.special
    assert {row: str(error) for row, error in fast.errors.items()} == {
        row: str(error) for row, error in reference.errors.items()
    }
    for number, (text, known, spans, tags, failed) in enumerate(rows(fast)):
        answer = expected(TEMPLATES[name], BATTERY[number], tags=subject.has_generation)
        assert failed == (answer is None), number
        if answer is None:
            continue
        assert text == answer[0], number
        assert [end for _, _, end in spans[:-1]] <= [start for _, start, _ in spans[1:]]
        if known and subject.has_generation:
            assert tags == answer[1], number
        speakers = [message.get("role") == "assistant" for message in BATTERY[number].messages]
        for word in WORD.finditer(text):
            owner = next((message for message, start, end in spans if start <= word.start() < end), None)
            if known and speakers[int(word[1])] and len(set(map(id, BATTERY[number].messages))) == len(speakers):
                assert owner == int(word[1]), (number, word)


def test_the_result_is_the_same_without_the_fast_engine() -> None:
    for name in list(TEMPLATES)[::12]:
        with_fast, without = renderer(TEMPLATES[name]), renderer(TEMPLATES[name], fast=False)
        assert without.why_reference == "the fast engine is switched off"
        assert list(rows(with_fast.render(BATTERY))) == list(rows(without.render(BATTERY)))


def test_without_a_compiler_the_reference_serves_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "native", None)
    subject = renderer(TEMPLATES["qwen3"])
    assert "without a compiler" in subject.why_reference
    served = subject.render([Conversation([user(0), assistant(1)])])
    assert served.reference == {subject.why_reference: 1}
    assert subject.paths == (0, 0)


def test_a_template_that_the_machine_never_serves_has_a_reason() -> None:
    subject = renderer(CHATML + "{% autoescape true %}{% endautoescape %}")
    assert subject.why_reference.startswith("the template uses ")
    assert subject.render([Conversation([user(0), assistant(1)])]).reference == {subject.why_reference: 1}


def test_rows_that_the_reference_serves_are_counted_by_reason() -> None:
    conversations = [
        Conversation([user(0), assistant(1)]),
        Conversation([user(0), {"role": "assistant", "content": 0.5}]),
        Conversation([user(0), {"role": "assistant", "content": "\x01\x1c\x85"}]),
        Conversation([user(0), {"role": "assistant", "content": 2**70}]),
        Conversation([user(0), {"role": "assistant", "content": {7: 8}}]),
    ]
    served = renderer(CHATML).render(conversations)
    assert served.reference == {"text or keys that JSON can't hold": 1}
    assert list(rows(served)) == list(rows(renderer(CHATML, fast=False).render(conversations)))


def test_paths_are_counted() -> None:
    subject = renderer("{% for m in messages %}{% if m.role == 'user' %}U{% else %}A{% endif %}{% endfor %}")
    none, ways = subject.paths
    assert none == 0
    subject.render([Conversation([user(0)])])
    some, _ = subject.paths
    subject.render([Conversation([assistant(0)])])
    assert 0 < some < subject.paths[0] <= ways
    subject.forget_paths()
    assert subject.paths == (0, ways)
