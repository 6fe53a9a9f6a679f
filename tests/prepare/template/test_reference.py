"""What the reference renderer returns: texts, owners, generation blocks, roles and flags."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.errors import RowError
from penstock.prepare.chat.conversation import Conversation, Message, Role
from penstock.prepare.template.printed import MessageFlag
from penstock.prepare.template.probes import PROBES, WORD, assistant, calling, result, system, user
from penstock.prepare.template.reference import Reference
from penstock.prepare.template.rendered import Rendered
from tests.prepare.template.conversations import BATTERY, DATE, TOKENS, expected, templates

pytestmark = pytest.mark.slow

CHAT = Conversation([system(0), user(1), assistant(2), user(3), assistant(4)])
NONE, CALLS, PRINTED, CONTENT = 0, MessageFlag.HAS_CALLS, MessageFlag.CALLS_PRINTED, MessageFlag.CONTENT_PRINTED
THINKS, THOUGHT = MessageFlag.HAS_REASONING, MessageFlag.REASONING_PRINTED


def new(template: str) -> Reference:
    return Reference(template, special_tokens=TOKENS, variables={}, date=DATE)


def spans(rendered: Rendered, row: int = 0) -> list[tuple[int, str]]:
    """The spans of a row, as (message, text)."""
    own = np.flatnonzero(rendered.span_rows == row).tolist()
    starts, ends = rendered.span_starts.tolist(), rendered.span_ends.tolist()
    return [(int(rendered.span_messages[k]), rendered.data[starts[k] : ends[k]].decode()) for k in own]


def owned(template: str, *messages: Message) -> list[tuple[int, str]]:
    rendered = new(template).render([Conversation(list(messages)) if messages else CHAT])
    assert rendered.known.all()
    return spans(rendered)


TURNS = [(n, f"<{m['role']}>{m['content']}") for n, m in enumerate(CHAT.messages)]
BODY = "<{{ m.role }}>{{ m.content }}"
LOOPS = {
    "items": f"{{% for m in messages %}}{BODY}{{% endfor %}}",
    "range": "{% for i in range(messages|length) %}{% set m = messages[i] %}" + BODY + "{% endfor %}",
    "range, printed first": "{% for i in range(5) %}<{{ messages[i].role }}>{{ messages[i].content }}{% endfor %}",
    "tuple target": f"{{% for k in range(5) %}}{{% for m in [messages[k]] %}}{BODY}{{% endfor %}}{{% endfor %}}",
    "break": f"{{% for m in messages %}}{BODY}{{% if loop.last %}}{{% break %}}{{% endif %}}{{% endfor %}}",
    "recursive": f"{{% for m in messages recursive %}}{BODY}{{% endfor %}}",
    "captured": f"{{% set x %}}{{% for m in messages %}}{BODY}{{% endfor %}}{{% endset %}}{{{{ x }}}}",
    "macro": f"{{% macro p(m) %}}{BODY}{{% endmacro %}}{{% for m in messages %}}{{{{ p(m) }}}}{{% endfor %}}",
    "caller": "{% macro p() %}{{ caller() }}{% endmacro %}{% call p() %}{% for m in messages %}"
    + BODY
    + "{% endfor %}{% endcall %}",
    "filter block": f"{{% filter trim %}}{{% for m in messages %}}{BODY}{{% endfor %}}{{% endfilter %}}",
    "set inside": f"{{% for m in messages %}}{{% set x %}}{BODY}{{% endset %}}{{{{ x }}}}{{% endfor %}}",
    "generation": f"{{% for m in messages %}}{{% generation %}}{BODY}{{% endgeneration %}}{{% endfor %}}",
    "block": f"{{% block a %}}{{% for m in messages %}}{BODY}{{% endfor %}}{{% endblock %}}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_an_iteration_owns_what_it_prints(name: str) -> None:
    assert owned(LOOPS[name]) == TURNS


def test_upper_case_text_still_belongs_to_its_iteration() -> None:
    found = owned("{% for m in messages %}{{ m.content|upper }}{{ m|tojson|length }};{% endfor %}")
    assert [message for message, _ in found] == [0, 1, 2, 3, 4]
    assert found[2][1].startswith("AZQ2K.")


def test_an_integer_is_matched_by_value_in_the_innermost_loop_only() -> None:
    inner = "{% for i in range(2) %}{% for j in [7] %}<{{ messages[i].content }}>{% endfor %}{% endfor %}"
    assert owned(inner) == [(0, "Szq0k."), (1, "Uzq1k?")]
    other = "{% for i in range(2) %}<{{ messages[i + 1].content }}>{% endfor %}"
    assert owned(other) == [(1, "Uzq1k?"), (2, "Azq2k.")]


def test_a_system_prompt_outside_the_loop_owns_its_statement() -> None:
    loop = "{% for m in messages[1:] %}" + BODY + "{% endfor %}"
    assert owned("<s>{{ messages[0].content }}</s>" + loop)[0] == (0, "Szq0k.")
    assert owned("{{ '<s>' + messages[0].content|trim ~ '</s>' }}" + loop)[0] == (0, "<s>Szq0k.</s>")
    assert owned("{% set s = '<s>' ~ messages[0]['content'] %}{{ s }}" + loop)[0] == (0, "<s>Szq0k.")
    both = owned("{{ messages[0].content ~ '+' ~ messages[1].content }}")
    assert both == [(0, "Szq0k."), (1, "Uzq1k?")]


def test_a_statement_in_a_macro_owns_only_the_text_of_the_message() -> None:
    assert (
        owned(
            "{% macro p(t) %}[{{ '<' ~ t }}]{% endmacro %}{% set x = p(messages[0].content) %}a{% if x %}b{% endif %}"
        )
        == []
    )
    captured = "{% set x %}[{{ '<' ~ messages[1].content }}]{% endset %}{% set y = x.split('<') %}{{ y[0] }}|{{ y[1] }}"
    assert owned(captured) == [(1, "Uzq1k?]")]


def test_text_of_other_messages_inside_a_turn_keeps_its_owner_unless_an_assistants() -> None:
    quoting = "{% for m in messages %}<{{ messages[1].content }}|{{ m.content }}>{% endfor %}"
    assert owned(quoting, user(0), user(1), assistant(2))[-3:] == [(2, "<"), (1, "Uzq1k?"), (2, "|Azq2k.>")]
    found = owned(quoting, user(0), assistant(1), user(2))
    assert found == [(0, "<Azq1k.|Uzq0k?>"), (1, "<Azq1k.|Azq1k.>"), (2, "<Azq1k.|Uzq2k?>")]


def test_tool_results_printed_by_a_nested_loop_keep_their_owner() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content }}"
        "{% for r in messages if r.role == 'tool' %}[{{ r.content }}]{% endfor %}</a>"
        "{% elif m.role == 'user' %}<u>{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = [user(0), assistant(1), {"role": "tool", "content": "T2"}]
    assert owned(template, *chat) == [(0, "<u>Uzq0k?"), (1, "<a>Azq1k."), (2, "[T2]"), (1, "</a>")]


def test_assistant_text_repeated_outside_the_loop_has_no_owner() -> None:
    loop = "{% for m in messages %}" + BODY + "{% endfor %}"
    assert owned("Title: {{ messages[2].content }}\n" + loop) == TURNS
    assert owned(loop + "{{ messages[-1].content }}!") == TURNS
    assert owned("{{ 'A: ' ~ messages[2].content }}") == [(2, "A: Azq2k.")]


def test_a_repeated_message_object_counts_as_two_messages() -> None:
    same = assistant(1)
    found = owned(
        "{% for m in messages %}{{ m.content }}{{ '.' if m == messages[-1] }}|{% endfor %}", same, user(1), same
    )
    assert found == [(0, "Azq1k..|"), (1, "Uzq1k?|"), (2, "Azq1k..|")]


def test_aliased_reasoning_belongs_to_its_message() -> None:
    found = owned(
        "{{ messages[1].reasoning_content }}|{{ messages[0].thinking }}",
        user(0, reasoning="R0"),
        assistant(1, thinking="R1"),
    )
    assert found == [(1, "R1"), (0, "R0")]


def test_positions_are_bytes() -> None:
    chat = [user(0, content="é"), assistant(1, content="中😀"), user(2, content="")]
    rendered = new("ü{% for m in messages %}<{{ m.content }}»{% endfor %}").render(
        [Conversation(chat), Conversation(chat)]
    )
    assert spans(rendered, 0) == spans(rendered, 1) == [(0, "<é»"), (1, "<中😀»"), (2, "<»")]
    assert rendered.span_starts[3] == rendered.text_ends[0] + 2


# ---- generation blocks

TAGGED = "{% for m in messages %}<é>{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"


def test_generation_blocks_are_tags() -> None:
    reference = new(TAGGED)
    assert reference.has_generation
    assert not new("{% call f() %}{% endcall %}").has_generation
    rendered = reference.render([CHAT, CHAT])
    tags = zip(rendered.tag_starts.tolist(), rendered.tag_ends.tolist(), strict=True)
    assert [rendered.data[start:end] for start, end in tags] == [m["content"].encode() for m in CHAT.messages] * 2
    assert rendered.tag_rows.tolist() == [0] * 5 + [1] * 5


@pytest.mark.parametrize(
    "template",
    [
        "{% set x %}" + TAGGED + "{% endset %}{{ x }}",
        "{% macro f() %}" + TAGGED + "{% endmacro %}{{ f() }}",
        "{% filter trim %}" + TAGGED + "{% endfilter %}",
    ],
)
def test_a_captured_generation_block_makes_the_row_unknown(template: str) -> None:
    rendered = new(template).render([CHAT])
    assert not rendered.known.any()
    assert len(rendered.span_rows) == len(rendered.tag_rows) == 0
    assert rendered.data == new(TAGGED).render([CHAT]).data


@pytest.mark.parametrize(("name", "template"), [pair for pair in templates() if "endgeneration" in pair[1]])
def test_tags_match_transformers(name: str, template: str) -> None:
    rendered = new(template).render(PROBES)
    ends = [0, *rendered.text_ends.tolist()]
    for row, chat in enumerate(PROBES):
        wanted = expected(template, chat, tags=True)
        assert (wanted is None) == (row in rendered.errors)
        if wanted is not None and rendered.known[row]:
            own = rendered.tag_rows == row
            starts, stops = rendered.tag_starts[own] - ends[row], rendered.tag_ends[own] - ends[row]
            assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == wanted[1]


# ---- real templates


@pytest.mark.parametrize(("name", "template"), list(templates()))
def test_every_marker_word_belongs_to_its_own_message(name: str, template: str) -> None:
    rendered = new(template).render(BATTERY)
    assert rendered.known.all()
    for row in range(len(PROBES)):
        for message, text in spans(rendered, row):
            said = {int(number) for number in WORD.findall(text.encode())}
            assert said <= {message}, (row, text)


# ---- the record


def test_spans_are_sorted_and_disjoint_and_offsets_add_up() -> None:
    refused = Conversation([user(0), "x"])  # type: ignore[list-item]
    plain = Conversation([], texts=((Role.USER, "Frage: "), (Role.ASSISTANT, ""), (Role.ASSISTANT, "Ä")))
    rendered = new(LOOPS["items"]).render([CHAT, refused, plain, Conversation([])], "testing")
    places = np.stack((rendered.span_starts, rendered.span_ends), 1).ravel().tolist()
    assert all(before <= after for before, after in pairwise(places))
    assert rendered.message_offsets.tolist() == [0, 5, 7, 10, 10]
    assert rendered.message_roles.tolist() == [1, 2, 3, 2, 3, 2, 5, 2, 3, 3]
    assert rendered.message_flags.tolist() == [CONTENT] * 5 + [NONE] * 2 + [CONTENT] * 3
    assert rendered.texts[1:] == [b"", "Frage: Ä".encode(), b""]
    assert spans(rendered, 2) == [(0, "Frage: "), (2, "Ä")]
    assert list(rendered.errors) == [1]
    assert rendered.reference == {"testing": 2}
    assert rendered.conversation(2) is plain
    kinds = (rendered.text_ends, rendered.span_rows, rendered.message_roles, rendered.known)
    assert [array.dtype.name for array in kinds] == ["int64", "int32", "uint8", "bool"]


def flags(template: str, *messages: Message) -> list[int]:
    return new(template).render([Conversation(list(messages))]).message_flags.tolist()


def test_flags_report_whether_calls_and_content_are_printed() -> None:
    silent = "{% for m in messages %}{{ m.role }};{% endfor %}"
    loud = "{% for m in messages %}{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }};{% endfor %}"
    twice = calling(1, True, content="A")
    twice["tool_calls"] *= 2
    once = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0]|tojson if m.tool_calls }};{% endfor %}"
    chat = [user(0), calling(1, True, content="A"), result(2)]
    assert flags(silent, *chat) == [NONE, CALLS, NONE]
    assert flags(loud, *chat) == [CONTENT, CALLS | PRINTED | CONTENT, CONTENT]
    assert flags(once, user(0), twice) == [CONTENT, CALLS | CONTENT]
    assert flags(silent, user(0, content=None), assistant(1, content=""), user(2, content=["x"])) == [
        CONTENT,
        CONTENT,
        NONE,
    ]


def test_content_is_compared_without_its_reasoning() -> None:
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert flags(template, assistant(0, content="<think>R</think>\n A ")) == [CONTENT | THINKS]
    assert flags(template, assistant(0, content="R</think>", reasoning_content=" S ")) == [CONTENT | THINKS]
    printing = "{% for m in messages %}{{ m.thinking }}{{ m.content }}{% endfor %}"
    assert flags(printing, assistant(0, reasoning=" R ")) == [CONTENT | THINKS | THOUGHT]
    assert flags(printing, assistant(0, content="<think>a<think> R </think>A")) == [CONTENT | THINKS | THOUGHT]
    for no_reasoning in ("<think> </think>A", "R<think></think>A", "A", None):
        assert flags(printing, assistant(0, content=no_reasoning)) == [CONTENT]
    assert flags(printing, user(0, content="<think>R</think>A", thinking="R")) == [CONTENT]


def test_a_system_prompt_is_searched_in_the_whole_row() -> None:
    moved = (
        "{% for m in messages if m.role == 'user' %}{{ messages[0].content|upper|lower }}{{ m.content }}{% endfor %}"
    )
    assert flags(moved, {"role": "system", "content": "be kind"}, user(1)) == [CONTENT, CONTENT]
    assert flags(moved, {"role": "system", "content": "Be kind"}, user(1)) == [NONE, CONTENT]
    assert flags(moved, user(0), assistant(1)) == [CONTENT, NONE]


def test_flags_of_a_row_without_regions_are_read_from_the_whole_text() -> None:
    template = "{% set x %}" + TAGGED + "{% endset %}{{ x }}"
    assert flags(template, user(0), assistant(1)) == [CONTENT, CONTENT]


UNTRACEABLE = "{% for m in messages %}{{ m.content is sameas messages[0].content }}{{ m.content }}{% endfor %}"


def test_regions_are_unknown_if_tracing_changes_the_text() -> None:
    same = user(0)
    rendered = new(UNTRACEABLE).render([Conversation([same, assistant(1), same]), CHAT])
    assert rendered.known.tolist() == [False, True]
    assert rendered.texts[0] == b"TrueUzq0k?FalseAzq1k.TrueUzq0k?"
    assert set(rendered.span_rows.tolist()) == {1}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (["x"], "TypeError: Chat messages should be dicts"),
        ([{"role": "user", "content": "a\ud800"}], "UnicodeEncodeError"),
        ([{"role": "user", "content": None}], "can only concatenate"),
        ([{"role": "bad", "content": ""}], "conversation: No bots!"),
    ],
)
def test_refusals_state_the_reason(messages: list[Any], words: str) -> None:
    template = (
        "{% for m in messages %}{{ '' + m.content }}{{ raise_exception('No bots!') if m.role == 'bad' }}{% endfor %}"
    )
    rendered = new(template).render([Conversation(messages), CHAT])
    assert words in rendered.errors[0].reason
    assert rendered.errors[0].kind == "template"
    assert rendered.texts[0] == b""
    assert rendered.texts[1]


def test_row_variables_override_and_the_prompt_is_optional() -> None:
    reference = Reference(
        "{{ bos_token }}{{ a }}{{ b }}{{ documents }}{{ tools }}{{ 'prompt' if add_generation_prompt }}",
        special_tokens=TOKENS,
        variables={"a": 1, "b": 1},
        date=DATE,
    )
    assert reference.plain([user(0)], variables={"b": 2}) == "<s>12NoneNone"
    assert reference.plain([user(0)], [{}], add_generation_prompt=True) == "<s>11None[{}]prompt"
    with pytest.raises(RowError, match="Tools should be JSON schemas"):
        reference.plain([user(0)], [1])
