"""Text has the right owner in templates written to confuse the machine and the tracer, and both agree."""

from __future__ import annotations

import pytest

from penstock.errors import RowError, TemplateError
from penstock.prepare.chat.conversation import Conversation, Role
from penstock.prepare.template.probes import assistant, rows, system, user
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.renderer import TemplateRenderer
from tests.prepare.template.conversations import DATE, TOKENS

CHAT = Conversation([system(0), user(1), assistant(2), user(3), assistant(4)])


def renderer(template: str) -> TemplateRenderer:
    return TemplateRenderer(template, special_tokens=TOKENS, variables={}, date=DATE)


def texts(regions: Rendered) -> list[list[tuple[int, str]]]:
    return [
        [(message, text[start:end].decode()) for message, start, end in spans] for text, _, spans, _, _ in rows(regions)
    ]


LOOPS = {
    "ordered": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "tail": "{% set rest = messages[0:] %}{% for m in rest %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "range": "{% for i in range(messages|length) %}<{{ messages[i].role }}>{{ messages[i].content }}{% endfor %}",
    "filtered": "{% for m in messages if m.role %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "continue": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m %}{% continue %}{% endif %}!{% endfor %}",
    "macro": "{% macro x(l) %}{% for m in l %}<{{ m.role }}>{{ m.content }}{% endfor %}{% endmacro %}{{ x(messages) }}",
    "set block": "{% set x %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% endset %}{{ x }}",
    "two loops": (
        "{% for m in messages if m.role == 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_message_owns_what_it_prints(name: str) -> None:
    subject = renderer(LOOPS[name])
    assert subject.why_unknown == ""
    expected = [(n, f"<{m['role']}>{m['content']}") for n, m in enumerate(CHAT.messages)]
    assert texts(subject.render([CHAT]))[0] == expected


NAMESPACE = (
    "{% set ns = namespace(out='') %}{% for m in messages %}{% set text = m.content if m.content is string else '' %}"
    "{% set ns.out = ns.out ~ '<' ~ m.role ~ '>' ~ text %}{% endfor %}{{ ns.out }}"
)
SYSTEM_OUTSIDE = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_text_collected_before_printing_keeps_its_owners() -> None:
    subject = renderer(NAMESPACE)
    assert subject.why_unknown == ""
    assert texts(subject.render([CHAT]))[0] == [(n, m["content"]) for n, m in enumerate(CHAT.messages)]


def test_literal_text_outside_the_loop_has_no_owner() -> None:
    subject = renderer(SYSTEM_OUTSIDE)
    assert subject.why_unknown == ""
    found = texts(subject.render([CHAT]))[0]
    assert found[:2] == [(0, "Szq0k."), (1, "<user>Uzq1k?")]
    joined = renderer(SYSTEM_OUTSIDE.replace("<system>{{ m", "{{ '<system>' + m"))
    assert texts(joined.render([CHAT]))[0][0] == (0, "<system>Szq0k.")


CAPTURED = "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}"


def test_slices_of_captured_text_keep_their_owners() -> None:
    regions = renderer(CAPTURED + "{{ x | length }}{{ x | trim }}").render([CHAT])
    assert regions.data == b"30" + b"".join(m["content"].encode() for m in CHAT.messages)
    assert texts(regions)[0] == [(n, m["content"]) for n, m in enumerate(CHAT.messages)]


def test_rewritten_captured_text_loses_its_owners() -> None:
    regions = renderer(CAPTURED + "{{ x | upper }}").render([CHAT])
    assert regions.data == b"".join(m["content"].encode().upper() for m in CHAT.messages)
    assert texts(regions)[0] == []


def test_text_of_another_message_inside_an_assistant_turn_keeps_its_owner() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
        "{% else %}{% set first = '' %}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + first + m.content }}{% endfor %}"
    )
    subject = renderer(template)
    assert subject.why_unknown == ""
    found = texts(subject.render([Conversation([system(0), user(1), assistant(2)])]))[0]
    assert [text for message, text in found if message == 2] == ["<assistant>", "Azq2k."]
    assert [text for message, text in found if message == 1] == ["<user>", "Uzq1k?"]


def test_untraceable_assistant_text_makes_all_regions_unknown() -> None:
    template = "{% set x %}{{ messages[-1].content }}{% endset %}{{ x }}"
    subject = renderer(template)
    assert "outside of the messages" in subject.why_unknown
    assert not subject.render([CHAT]).known.any()


def test_control_characters_do_not_affect_ownership() -> None:
    marks = "".join(map(chr, [*range(1, 8), *range(14, 27)])) + "\U0010ff00\U0010fe00"
    chat = Conversation([user(0), {"role": "assistant", "content": marks}, {"role": "user", "content": marks}])
    regions = renderer(LOOPS["ordered"]).render([chat, CHAT])
    assert texts(regions)[0] == [(0, "<user>Uzq0k?"), (1, f"<assistant>{marks}"), (2, f"<user>{marks}")]
    assert regions.known.all()
    subject = renderer("\x01\x06{% for m in messages %}<{{ m.role }}>\x0e{{ m.content }}{% endfor %}")
    assert texts(subject.render([CHAT]))[0][0] == (0, "<system>\x0eSzq0k.")


def test_conversations_of_texts_need_no_template() -> None:
    row = Conversation([], texts=((Role.USER, "Frage: "), (Role.ASSISTANT, ""), (Role.ASSISTANT, "Änderung")))
    regions = renderer(LOOPS["ordered"]).render([CHAT, row, CHAT])
    assert texts(regions)[1] == [(0, "Frage: "), (2, "Änderung")]


def test_a_refused_row_quotes_the_template_and_has_no_text() -> None:
    subject = renderer(
        "{% if messages|length > 2 %}{{ raise_exception('Too long!') }}{% endif %}{{ messages[0].content + '' }}"
    )
    regions = subject.render([CHAT, Conversation([user(0)]), Conversation([{"role": "user", "content": None}])])
    assert regions.errors[0].reason == "the chat template refused the conversation: Too long!"
    assert regions.errors[0].kind == "template"
    assert "TypeError" in regions.errors[2].reason
    assert regions.data == b"Uzq0k?"
    with pytest.raises(RowError, match="Too long"):
        subject.plain(CHAT.messages)


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        renderer("{{ a }}\n{% if %}")


def test_shared_or_repeated_objects_are_distinguished_and_not_modified() -> None:
    message = {"role": "user", "content": ["a"]}
    chat = Conversation([message, assistant(1), message])
    subject = renderer(LOOPS["two loops"].replace("m.content", "(m.content | string)"))
    assert [m for m, _ in texts(subject.render([chat]))[0]] == [0, 1, 2]
    assert chat.messages[0] is chat.messages[2]
    assert message == {"role": "user", "content": ["a"]}


def test_a_lone_surrogate_is_an_error_of_its_row() -> None:
    broken = Conversation([user(0), {"role": "assistant", "content": "a\ud800b"}])
    regions = renderer(LOOPS["ordered"]).render([CHAT, broken, CHAT])
    assert list(regions.errors) == [1]
    assert "UnicodeEncodeError" in regions.errors[1].reason
    assert [len(spans) for spans in texts(regions)] == [5, 0, 5]
