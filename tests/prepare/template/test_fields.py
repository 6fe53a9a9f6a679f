"""The machine knows which field of an assistant's message printed which bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.native import RowStatus, native
from penstock.prepare.chat.adapt import Needs
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import detect
from penstock.prepare.template.compiler import CompiledTemplate, conversation_layout, encoded, row_layout
from penstock.prepare.template.reference import Reference
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.renderer import TemplateRenderer
from penstock.prepare.template.turns import Field, FieldColumn, TurnColumn
from tests.prepare.template.conversations import DATE, TOKENS, templates
from tests.prepare.template.field_cases import CASES, Runs, Sentinels, each, named, runs_of, sentinels

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

TRL = dict(templates())
SPELLED = ("diffusion_gemma", "gemma4", "muse_glimmer")  # they print 'true' or 'false' themselves, by a condition
BASE = {"documents": None, "add_generation_prompt": False, **TOKENS}


def machine(template: str) -> CompiledTemplate:
    reference = Reference(template, special_tokens=TOKENS, variables={}, date=DATE)
    return CompiledTemplate(reference.parse(template), BASE, DATE, conversation_layout(()))


def runs_by(program: CompiledTemplate, conversations: list[Conversation]) -> list[tuple[str, Runs]]:
    """The text and the runs of each conversation."""
    batch = program.render([encoded(conversation) or b"" for conversation in conversations])
    assert not any(batch.status), batch.reasons
    found: list[Runs] = [[] for _ in conversations]
    for row, label, start, end in np.frombuffer(batch.fields, np.int32).reshape(-1, len(FieldColumn)).tolist():
        found[row].append((named(label), batch.texts[row][start:end].decode()))
    return [(text.decode(), runs) for text, runs in zip(batch.texts, found, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_a_field_is_known_wherever_it_is_printed(name: str) -> None:
    case = CASES[name]
    text, runs = runs_by(machine(case.template), [case.conversation])[0]
    assert runs == case.runs
    reference = Reference(case.template, special_tokens=TOKENS, variables={}, date=DATE)
    assert text == reference.plain(case.conversation.messages)


# ---- sentinels in the templates of trl


def accepted(
    renderer: TemplateRenderer, *, chat_only: bool = False, **shape: bool
) -> tuple[Sentinels, Rendered] | None:
    given = sentinels(**shape)
    if chat_only:
        spoken = [m for m in given.conversation.messages if m["role"] != "tool" and "Szq" not in m["content"]]
        talk = [spoken[0], spoken[2], spoken[3], spoken[5]]
        given = given._replace(conversation=Conversation(talk))
    given = given._replace(conversation=renderer.adapter.adapt(given.conversation))
    rendered = renderer.render([given.conversation])
    assert not rendered.reference
    return None if rendered.errors else (given, rendered)


def wrong_words(given: Sentinels, rendered: Rendered) -> Iterator[str]:
    """The words in the text of assistants whose bytes don't all have their field, or that are missing."""
    labels = np.zeros(len(rendered.data), np.int32)
    spoken = np.zeros(len(rendered.data), np.bool_)
    for _, label, start, end in zip(*(column.tolist() for column in rendered.fields), strict=True):
        labels[start:end] = label
    for message, start, end in zip(rendered.span_messages, rendered.span_starts, rendered.span_ends, strict=True):
        spoken[start:end] = given.conversation.messages[message]["role"] == "assistant"
    text = rendered.data.decode()
    places = np.cumsum([0, *(len(character.encode()) for character in text)])
    for field, first, last in given.printed(text):
        start, end = places[first], places[last]
        if spoken[start:end].all() and set(labels[start:end].tolist()) != {field.value}:
            yield text[first:last]


@pytest.mark.parametrize("name", TRL)
def test_every_template_prints_its_fields_as_such(name: str) -> None:
    renderer = TemplateRenderer(TRL[name], special_tokens=TOKENS, variables={}, date=DATE)
    assert not renderer.why_reference
    found = 0
    for shape in ({}, {"as_text": True}, {"in_content": True}, {"chat_only": True}):
        if (served := accepted(renderer, **shape)) is None:
            continue
        found += 1
        assert not list(wrong_words(*served)), shape
        assert Field.CONTENT in served[1].fields.labels
    assert found
    assert flag_labels(renderer) in (None, [] if name.startswith(SPELLED) else [Field.CALL_ARGUMENTS])


def flag_labels(renderer: TemplateRenderer) -> list[int] | None:
    """The label of what a boolean changes in the text; None if no arguments are printed."""
    both = [accepted(renderer, flag=flag) for flag in (True, False)]
    if both[0] is None or both[1] is None:
        return None
    one, other = both[0][1], both[1][1]
    place = next((k for k, (a, b) in enumerate(zip(one.data, other.data, strict=False)) if a != b), None)
    if place is None:
        return None
    labels: list[int] = one.fields.labels[(one.fields.starts <= place) & (place < one.fields.ends)].tolist()
    return labels


# ---- laws

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "think>", "a", "é日", "😀", "\n", '"', "\\"]), max_size=12
)
CONTENT = PIECES.map("".join)


def fields_of(content: str) -> list[Field]:
    """The field of each character."""
    found = [Field.CONTENT] * len(content)
    begin = 0
    while (close := content.find("</think>", begin)) >= 0:
        opening = content.rfind("<think>", begin, close)
        if opening >= 0:
            found[opening : opening + 7] = [Field.THINK_TAG] * 7
        if opening >= 0 or begin == 0:
            start = opening + 7 if opening >= 0 else 0
            found[start:close] = [Field.THOUGHT] * (close - start)
            found[close : close + 8] = [Field.THINK_TAG] * 8
        begin = close + 8
    return found


@given(
    st.lists(st.tuples(CONTENT, st.lists(st.integers(0, 30), max_size=6), CONTENT), min_size=1, max_size=4),
    st.sampled_from(
        [
            "{{ m.content }}",
            "<{{ m.content[1:] ~ m.thinking }}>",
            "{{ m.content.split('</think>')[-1]|trim }}{{ m.content }}",
            "{{ m|tojson }}",
            "{% for x in m.content %}{{ x }}{{ '|' if loop.last }}{% endfor %}",
            "{% set x %}{{ m.content }}{{ m.thinking }}{% endset %}{{ x|upper }}{{ x.replace('a', 'b') }}{{ x }}",
        ]
    ),
)
def test_runs_are_sorted_and_disjoint_and_change_nothing(chats: list[tuple[str, list[int], str]], body: str) -> None:
    template = each(body)
    reference = Reference(template, special_tokens=TOKENS, variables={}, date=DATE)
    conversations = []
    for content, places, thinking in chats:
        bounds = sorted({place for place in places if place <= len(content)})
        marks = tuple(zip(bounds[::2], bounds[1::2], strict=False))
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "thinking": thinking},
        ]
        conversations.append(Conversation(messages, spans=(None, marks)))
    program = machine(template)
    batch = program.render([encoded(conversation) or b"" for conversation in conversations])
    runs = np.frombuffer(batch.fields, np.int32).reshape(-1, len(FieldColumn))
    for row, conversation in enumerate(conversations):
        text = batch.texts[row]
        assert text.decode() == reference.plain(conversation.messages)
        own = runs[runs[:, FieldColumn.ROW] == row]
        starts, ends = own[:, FieldColumn.START], own[:, FieldColumn.END]
        assert (starts < ends).all()
        assert (starts[1:] >= ends[:-1]).all()
        joined = (starts[1:] == ends[:-1]) & (own[1:, FieldColumn.LABEL] == own[:-1, FieldColumn.LABEL])
        assert not joined.any()
        assert not len(own) or (starts[0] >= 0 and ends[-1] <= len(text))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            text[start:end].decode()  # whole characters
    assert (np.diff(runs[:, FieldColumn.ROW]) >= 0).all()


@given(CONTENT)
def test_thoughts_end_with_their_tags(content: str) -> None:
    message = {"role": "assistant", "content": content}
    _, runs = runs_by(machine(each("{{ m.content }}")), [Conversation([message])])[0]
    assert [name for name, text in runs for _ in text] == [field.name for field in fields_of(content)]


# ---- turns and rows


def test_turns_have_the_fields_of_their_own_text() -> None:
    """A template that drops earlier reasoning prints turns that the row doesn't have."""
    renderer = TemplateRenderer(TRL["qwen3"], special_tokens=TOKENS, variables={}, date=DATE, turns=True)
    conversation = renderer.adapter.adapt(sentinels().conversation)
    turns = renderer.render([conversation]).turns
    assert turns is not None
    at = 0
    for number, (turn, size) in enumerate(zip(turns.table, turns.kept[0].tolist(), strict=True)):
        if not size:
            continue
        part = conversation._replace(messages=conversation.messages[: turn[TurnColumn.MESSAGE] + 1])
        whole = renderer.render([part])
        cut = int(turn[TurnColumn.CUT])
        kept = turns.data[at : at + size]
        assert whole.data[cut:] == kept
        expected = [
            (label, max(start, cut), end)
            for _, label, start, end in zip(*(column.tolist() for column in whole.fields), strict=True)
            if end > cut
        ]
        own = turns.fields[turns.fields[:, FieldColumn.ROW] == number]
        assert [tuple(run) for run in own[:, 1:].tolist()] == expected
        assert expected
        at += size


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseekv3", "gptoss", "glm4moe", "lfm2_v2"])
def test_rows_have_the_fields_of_their_conversations(name: str) -> None:
    """Whatever the machine changes for a template keeps its field: parsed arguments, joined parts, names of keys."""
    given = [sentinels(), sentinels(as_text=True), sentinels(in_content=True)]
    rows = [{"messages": each.conversation.messages} for each in given]
    parts = json.loads(json.dumps(rows[0]))
    for message in parts["messages"]:
        message["content"] = [{"type": "text", "text": message["content"][:2]}, {"type": "text", "text": "zq"}]
    rows.append(parts)
    mapping = detect(rows)
    renderer = TemplateRenderer(TRL[name], special_tokens=TOKENS, variables={}, date=DATE, mapping=mapping)
    raw = renderer.render_rows([json.dumps(row).encode() for row in rows], lambda _: given[0].conversation)
    read = renderer.render([renderer.adapter.adapt(Conversation(row["messages"])) for row in rows])
    kept = [runs for number, runs in enumerate(runs_of(read)) if number in raw.rows]
    assert raw.rows
    assert runs_of(raw.rendered) == kept


def test_pairs_of_columns_have_fields() -> None:
    row = {"instruction": "q", "input": "", "output": "a</think>b\n", "history": [["h", "i"]]}
    reference = Reference(each("{{ m.content }}"), special_tokens=TOKENS, variables={}, date=DATE)
    layout = row_layout(detect([row]), Needs(), ())
    program = CompiledTemplate(reference.parse(each("{{ m.content }};")), BASE, DATE, layout)
    batch = program.render([json.dumps(row).encode()])
    runs = np.frombuffer(batch.fields, np.int32).reshape(-1, len(FieldColumn))[:, 1:].tolist()
    found = [(Field(label).name, batch.data[start:end]) for label, start, end in runs]
    assert found == [("CONTENT", b"i"), ("THOUGHT", b"a"), ("THINK_TAG", b"</think>"), ("CONTENT", b"b\n")]


@pytest.mark.parametrize("key", ["spans", "train_detail"])
def test_rows_with_marks_are_read_in_python(key: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]} for _ in range(3)]
    rows[0]["messages"][1][key] = []  # type: ignore[assignment]
    rows[1]["messages"][1]["content"] = [{"type": "text", "text": "a", key: []}]  # type: ignore[assignment]
    template = each("{{ m.content }}")
    reference = Reference(template, special_tokens=TOKENS, variables={}, date=DATE)
    layout = row_layout(detect(rows), Needs(), ())
    batch = CompiledTemplate(reference.parse(template), BASE, DATE, layout).render(
        [json.dumps(r).encode() for r in rows]
    )
    wanted = [RowStatus.UNREAD, RowStatus.UNREAD if key == "spans" else RowStatus.RENDERED, RowStatus.RENDERED]
    assert list(batch.status) == wanted


def test_bad_marks_are_refused() -> None:
    program = machine(each("{{ m.content }}"))
    for spans in ([[[1]]], [[5]], [[[2, 1]]], [[[0, 2], [1, 3]]], [[[-1, 2]]], ["x"], [[["a", 1]]]):
        row = {"messages": [{"role": "assistant", "content": "abc"}], "tools": None, "variables": None, "spans": spans}
        assert program.render([json.dumps(row).encode()]).status == bytes([RowStatus.UNREAD])
    row["spans"] = [[[1, 90]]]
    batch = program.render([json.dumps(row).encode()])
    assert np.frombuffer(batch.fields, np.int32).reshape(-1, 4)[:, 1:].tolist() == [[2, 0, 1], [258, 1, 3]]
