"""The engine against transformers: the same text for every template and conversation, whichever engine renders."""

from __future__ import annotations

import sys

import pytest
import transformers.utils.chat_template_utils as hf

from penstock.chat.engine import TemplateEngine
from penstock.chat.probes import WORD
from penstock.chat.trial import rows
from tests.chat.engine_probes import BATTERY, DATE, TOKENS, FixedClock, expected, templates

TEMPLATES = dict(templates())


def engine(template: str, fast: bool = True) -> TemplateEngine:
    return TemplateEngine(template, special_tokens=TOKENS, variables={}, date=DATE, fast=fast)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_renders_as_transformers_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "datetime", FixedClock)
    subject = engine(TEMPLATES[name])
    assert subject.why_reference == ""
    assert subject.why_unknown == ""
    fast, reference = subject.render(BATTERY), subject.reference(BATTERY)
    assert list(rows(fast)) == list(rows(reference))
    assert {row: str(error) for row, error in fast.errors.items()} == {
        row: str(error) for row, error in reference.errors.items()
    }
    for number, (text, known, pieces, spans, failed) in enumerate(rows(fast)):
        answer = expected(TEMPLATES[name], BATTERY[number], spans=subject.has_generation)
        assert failed == (answer is None), number
        if answer is None:
            continue
        assert text == answer[0], number
        assert [end for _, _, end in pieces[:-1]] <= [start for _, start, _ in pieces[1:]]
        if known and subject.has_generation:
            assert spans == answer[1], number
        speakers = [message.get("role") == "assistant" for message in BATTERY[number].messages]
        for word in WORD.finditer(text):
            owner = next((message for message, start, end in pieces if start <= word.start() < end), None)
            if known and speakers[int(word[1])] and len(set(map(id, BATTERY[number].messages))) == len(speakers):
                assert owner == int(word[1]), (number, word)


def test_without_the_fast_engine_everything_is_the_same() -> None:
    for name in list(TEMPLATES)[::12]:
        with_fast, without = engine(TEMPLATES[name]), engine(TEMPLATES[name], fast=False)
        assert without.why_reference == "the fast engine is switched off"
        assert list(rows(with_fast.render(BATTERY))) == list(rows(without.render(BATTERY)))


def test_a_missing_minijinja_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minijinja", None)
    monkeypatch.delitem(sys.modules, "penstock.chat.fast", raising=False)
    assert engine(TEMPLATES["qwen3"]).why_reference == "minijinja is not installed"
