"""Rendered: whose text is whose, in templates written to confuse the analysis."""

from __future__ import annotations

import pytest
from penstock.chat.engine import TemplateEngine
from penstock.chat.probes import assistant, system, user
from penstock.chat.trial import rows

from penstock.chat.conversation import Conversation, Role
from penstock.errors import RowError, TemplateError
from penstock.template.rendered import Rendered
from tests.chat.engine_probes import DATE, TOKENS

CHAT = Conversation([system(0), user(1), assistant(2), user(3), assistant(4)])


def engine(template: str) -> TemplateEngine:
    return TemplateEngine(template, special_tokens=TOKENS, variables={}, date=DATE)


def texts(regions: Rendered) -> list[list[tuple[int, str]]]:
    return [
        [(message, text[start:end].decode()) for message, start, end in pieces]
        for text, _, pieces, _, _ in rows(regions)
    ]


LOOPS = {
    "ordered": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "tail": "{% set rest = messages[0:] %}{% for m in rest %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "range": "{% for i in range(messages|length) %}<{{ messages[i].role }}>{{ messages[i].content }}{% endfor %}",
    "filtered": "{% for m in messages if m.role %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "continue": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m %}{% continue %}{% endif %}!{% endfor %}",
    "macro": "{% macro x(l) %}{% for m in l %}<{{ m.role }}>{{ m.content }}{% endfor %}{% endmacro %}{{ x(messages) }}",
    "set block": "{% set x %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% endset %}{{ x }}",
    "namespace": (
        "{% set ns = namespace(out='') %}{% for m in messages %}{% set who = 'assistant' if m.role == 'assistant' else"
        " m.role %}{% set ns.out = ns.out ~ '<' ~ who ~ '>' ~ m.content %}{% endfor %}{{ ns.out }}"
    ),
    "two loops": (
        "{% for m in messages if m.role == 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    "system outside": (
        "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_message_owns_what_it_prints(name: str) -> None:
    subject = engine(LOOPS[name])
    assert subject.why_unknown == ""
    expected = [(n, f"<{m['role']}>{m['content']}") for n, m in enumerate(CHAT.messages)]
    assert texts(subject.render([CHAT]))[0] == expected


def test_captured_text_that_is_changed_keeps_its_bytes_and_loses_its_regions() -> None:
    template = "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x | length }}{{ x | trim }}"
    regions = engine(template).render([CHAT])
    assert regions.data == b"30" + b"".join(m["content"].encode() for m in CHAT.messages)
    assert not regions.known.any()
    assert len(regions.piece_rows) == 0


def test_text_of_another_message_inside_a_turn_is_not_the_assistants() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
        "{% else %}{% set first = '' %}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + first + m.content }}{% endfor %}"
    )
    subject = engine(template)
    assert subject.why_unknown == ""
    found = texts(subject.render([Conversation([system(0), user(1), assistant(2)])]))[0]
    assert [text for message, text in found if message == 2] == ["<assistant>", "Azq2k."]
    assert [text for message, text in found if message == 1] == ["<user>", "Uzq1k?"]


def test_an_assistant_printed_where_it_cannot_be_followed_makes_all_regions_unknown() -> None:
    template = "{% set x %}{{ messages[-1].content }}{% endset %}{{ x }}"
    subject = engine(template)
    assert "outside of the messages" in subject.why_unknown
    assert not subject.render([CHAT]).known.any()


def test_a_row_full_of_marks_is_never_confused() -> None:
    marks = "".join(map(chr, [*range(1, 8), *range(14, 27)]))
    chat = Conversation([user(0), {"role": "assistant", "content": marks}, {"role": "user", "content": marks}])
    regions = engine(LOOPS["ordered"]).render([chat, CHAT])
    assert texts(regions)[0] == [(0, "<user>Uzq0k?"), (1, f"<assistant>{marks}"), (2, f"<user>{marks}")]
    assert regions.known.all()
    both = Conversation([user(0), {"role": "assistant", "content": marks + "\U0010ff00"}])
    regions = engine(LOOPS["ordered"]).render([both, CHAT])
    assert regions.known.tolist() == [False, True]
    assert regions.data.startswith(f"<user>Uzq0k?<assistant>{marks}\U0010ff00".encode())


def test_a_template_that_contains_marks_uses_others() -> None:
    subject = engine("\x01\x06{% for m in messages %}<{{ m.role }}>\x0e{{ m.content }}{% endfor %}")
    assert texts(subject.render([CHAT]))[0][0] == (0, "<system>\x0eSzq0k.")


def test_pieces_need_no_template() -> None:
    row = Conversation([], pieces=((Role.USER, "Frage: "), (Role.ASSISTANT, ""), (Role.ASSISTANT, "Änderung")))
    regions = engine(LOOPS["ordered"]).render([CHAT, row, CHAT])
    assert texts(regions)[1] == [(0, "Frage: "), (2, "Änderung")]


def test_a_refused_row_has_the_templates_own_words_and_no_text() -> None:
    subject = engine(
        "{% if messages|length > 2 %}{{ raise_exception('Too long!') }}{% endif %}{{ messages[0].content + '' }}"
    )
    regions = subject.render([CHAT, Conversation([user(0)]), Conversation([{"role": "user", "content": None}])])
    assert regions.errors[0].reason == "the chat template refused the conversation: Too long!"
    assert regions.errors[0].kind == "template"
    assert "TypeError" in regions.errors[2].reason
    assert regions.data == b"Uzq0k?"
    with pytest.raises(RowError, match="Too long"):
        subject.plain(CHAT.messages)


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'x' * 100000000000 }}",
        "{{ 2 ** 100000000 }}",
        "{% for i in range(90000) %}{{ 'xxxxxxxxxxxxxxxxxxxx' * 1000 }}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    ],
)
def test_work_is_bounded(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.chat.sandbox.MAX_STEPS", 200_000)
    subject = engine("{% if messages[0].role == 'bomb' %}" + bomb + "{% endif %}ok")
    regions = subject.render([Conversation([{"role": "bomb"}]), Conversation([user(0)])])
    assert "refused the conversation" in str(regions.errors[0])
    assert regions.data == b"ok"


def test_a_template_that_does_not_parse_is_named() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        engine("{{ a }}\n{% if %}")


def test_rows_that_share_or_repeat_objects_are_told_apart_and_unchanged() -> None:
    message = {"role": "user", "content": ["a"]}
    chat = Conversation([message, assistant(1), message])
    subject = engine(LOOPS["two loops"].replace("m.content", "(m.content | string)"))
    assert [m for m, _ in texts(subject.render([chat]))[0]] == [0, 1, 2]
    assert chat.messages[0] is chat.messages[2]
    assert message == {"role": "user", "content": ["a"]}


def test_a_lone_surrogate_is_that_rows_error() -> None:
    broken = Conversation([user(0), {"role": "assistant", "content": "a\ud800b"}])
    regions = engine(LOOPS["ordered"]).render([CHAT, broken, CHAT])
    assert list(regions.errors) == [1]
    assert "UnicodeEncodeError" in regions.errors[1].reason
    assert [len(pieces) for pieces in texts(regions)] == [5, 0, 5]


def test_which_rows_the_reference_served_is_counted_by_reason() -> None:
    rows_ = [
        CHAT,
        Conversation([user(0), assistant(1)], has_float=True),
        Conversation([user(0), {"role": "assistant", "content": "\x01"}]),
        Conversation([user(0), {"role": "assistant", "content": "\x85"}]),
        Conversation([user(0), {"role": "assistant", "content": "\x1c"}]),
        Conversation([user(0), {"role": "assistant", "content": 2**70}]),
    ]
    assert engine(LOOPS["ordered"]).render(rows_).reference == {
        "floats": 1,
        "control characters": 1,
        "white space that engines disagree about": 2,
        "integers beyond 64 bits": 1,
    }


@pytest.mark.parametrize("where", ["messages", "tools", "variables"])
def test_marks_of_the_second_alphabet_where_the_template_has_those_of_the_first(where: str) -> None:
    """No marks are left, so that regions are unknown; the text is whole."""
    subject = engine("\x01{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}{{ more }}")
    assert subject.locality is None
    odd = "\U0010ff00"
    messages = [user(0), assistant(1) | ({"content": odd} if where == "messages" else {})]
    tools, variables = [{"name": odd}] if where == "tools" else None, {"more": odd} if where == "variables" else None
    regions = subject.render(
        [Conversation(messages, tools, variables=variables), Conversation([user(0), assistant(1)])]
    )
    assert regions.texts[0].decode() == subject.plain(messages, tools, variables)
    assert odd in regions.texts[0].decode()
    assert regions.known.tolist() == [False, True]
