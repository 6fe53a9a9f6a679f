"""Parts of rows that are unused or dropped by a template are counted by name and reported with a remedy."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import RowError
from penstock.prepare.chat.notes import LOSSES, Note, describe_note, reason_and_remedy, rows_to_runs, runs_to_rows
from tests.support.command import run

pytestmark = pytest.mark.slow


def chat(answer: Any = "a", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}], **more}


@pytest.mark.parametrize("fast", [True, False])
def test_reasoning_that_the_template_drops(fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    thinking = chat()
    thinking["messages"][1]["reasoning_content"] = "I think."
    rows = [chat(), thinking, thinking, chat("<think>\nhm\n</think>\n\na")]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ds = ps.prepare(write_rows(rows), tokenizer=tokenizer, template=template, cache=tmp_path / "c", fast=fast)
    assert ds.ledger.notes == {"reasoning_dropped": 2}
    assert describe_note("reasoning_dropped", 2, ds.recipe).endswith("; use one that prints it (--template)")


def test_faithful_turns_are_recommended_only_where_they_help() -> None:
    recipe: dict[str, Any] = {"templates": {"default": "{{ m.reasoning_content }}"}, "turns": "conversation"}
    recipe["mapping"] = {"format": "messages"}
    for changed, recommended in (
        ({}, True),
        ({"turns": "faithful"}, False),
        ({"templates": {"default": "{{ m.content }}"}}, False),
        ({"mapping": {"format": "preference"}}, False),
    ):
        _, remedy = reason_and_remedy(Note.REASONING_DROPPED, {**recipe, **changed})
        assert ("--turns faithful" in remedy) is recommended


@pytest.mark.parametrize("fast", [True, False])
def test_labels_of_kto(fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path / "c", "fast": fast}
    rows = [chat(label=False), chat(label=True), chat(label=False, unusual=1), chat(label=0), chat()]
    assert ps.prepare(write_rows(rows), **options).ledger.notes == {"label_false": 3}
    plain = [{"prompt": "p", "completion": "c", "label": label} for label in (True, False, None)]
    assert ps.prepare(write_rows(plain), **options).ledger.notes == {"label_false": 1, "eos_appended": 3}
    pairs = [{"prompt": "p", "chosen": "c", "rejected": "r", "label": False}]
    assert ps.prepare(write_rows(pairs), **options).ledger.notes == {"label_false": 1, "eos_appended": 1}


@pytest.mark.parametrize("fast", [True, False])
def test_pairs_with_equal_sides(fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path / "c", "fast": fast}
    rows = [{"prompt": "p", "chosen": chosen, "rejected": rejected} for chosen, rejected in ["ab", "aa", "bc", "cc"]]
    ds = ps.prepare(write_rows(rows), **options)
    assert ds.ledger.notes == {"eos_appended": 4, "sides_equal": 2}
    assert ds.rows_with("sides_equal").tolist() == [1, 3]
    sides = [[{"role": "assistant", "content": "a", "reasoning_content": text}] for text in ("good", "bad")]
    template = tmp_path / "t.jinja"
    template.write_text(PLAIN)
    asked = {"prompt": [{"role": "user", "content": "q"}], "chosen": sides[0], "rejected": sides[1]}
    ds = ps.prepare(write_rows([asked]), template=template, **options)  # which drops what differs
    assert ds.ledger.notes == {"reasoning_dropped": 1, "sides_equal": 1}


@pytest.mark.parametrize("key", ["weight", "train", "masked"])
def test_a_weight_of_a_part_is_refused(key: str, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    part = {"type": "text", "text": "a", key: 0}
    with pytest.raises(RowError, match=rf"messages\[1\]\.content\[0\]\.{key}: a part has no weight of its own. Give"):
        ps.prepare(write_rows([chat([part])]), tokenizer=tokenizer, cache=tmp_path / "c")


def test_every_note_is_described_in_one_line() -> None:
    for note in Note:
        line = describe_note(note.value, 1234)
        assert line.startswith("1,234 ") and "\n" not in line and note.value + " " not in line.partition(":")[0]
    assert describe_note("label_false", 1).startswith("1 row: the column 'label' is false")
    assert describe_note("of another version", 2) == "2 rows: of another version"


# ---- what templates drop, by both engines alike

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson if c.function.arguments is mapping else '?' }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}" + PLAIN
WITH_NAMES = PLAIN.replace("{{ m.content }}", "{{ m.name or '' }}: {{ m.content }}")


def tool(name: str, description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


def calling(name: str, arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": [*asked, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]}


def named(role: str, name: str, content: str = "x") -> dict[str, Any]:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return {"messages": [{"role": role, "content": content, "name": name}, *messages]}


ROWS = [
    chat(),
    chat(tools=[tool("weather", "Tells the weather.\nOf a city.")]),
    chat("It calls weather: Tells the weather.", tools=[tool("weather", "Tells the weather.")]),
    {**calling("weather", {"city": "Bern"}), "tools": [tool("weather")]},
    {**calling("weather", '{"city": "Bern"}'), "tools": [tool("weather", "Zürich \"quoted\"")]},
    calling("weather", ""),
    named("user", "Bob"),
    named("user", "Bob", "I am Bob"),
    named("system", "Rules"),
    named("user", ""),
    chat(functions=[{"name": "f"}]),
    chat(functions=[]),
    chat(system_prompt="Be brief.", label=False),
    chat(reasoning=None, weights=""),
    chat(weight=0),
]  # fmt: skip
EXPECTED: dict[str, tuple[str, dict[str, list[int]]]] = {
    "plain": (
        PLAIN,
        {
            "tools_dropped": [1, 3, 4],
            "name_dropped": [6, 7, 8],
            "column_unused": [10, 12, 14],
            "label_false": [12],
            "arguments_parsed": [4, 5],
        },
    ),
    "with tools": (
        WITH_TOOLS,
        {
            "name_dropped": [6, 7, 8],
            "column_unused": [10, 12, 14],
            "label_false": [12],
            "arguments_parsed": [4, 5],
        },
    ),
    "with names": (
        WITH_NAMES,
        {
            "tools_dropped": [1, 3, 4],
            "column_unused": [10, 12, 14],
            "label_false": [12],
            "arguments_parsed": [4, 5],
        },
    ),
}


@pytest.mark.parametrize("case", EXPECTED)
@pytest.mark.parametrize("fast", [True, False])
def test_notes_have_rows(case: str, fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    text, wanted = EXPECTED[case]
    template = tmp_path / "t.jinja"
    template.write_text(text)
    ds = ps.prepare(write_rows(ROWS), tokenizer=tokenizer, template=template, cache=tmp_path / "c", fast=fast)
    found = {note: ds.rows_with(note).tolist() for note in ds.ledger.notes if note != "no_stop"}
    assert found == wanted
    assert {note: ds.ledger.notes[note] for note in wanted} == {note: len(rows) for note, rows in wanted.items()}
    assert ds.ledger.first_noted["column_unused"] == [0, 10]


DROPS = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content if not m.skip }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("fast", [True, False])
def test_notes_on_dropped_parts_have_rows(fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    def said(system: str = "", **more: Any) -> dict[str, Any]:
        before = [{"role": "system", "content": system}] if system else []
        answer = {"role": "assistant", "content": "an answer", **more}
        last = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so."}]
        return {"messages": [*before, {"role": "user", "content": "q"}, answer, *last]}

    rows = [
        said(), said("Be brief."), said(reasoning_content="I think."), said(skip=True), said("No.", thinking="Hm."),
        said(), said(skip=True, reasoning_content="Why?"),
    ]  # fmt: skip
    template = tmp_path / "t.jinja"
    template.write_text(DROPS)
    ds = ps.prepare(write_rows(rows), tokenizer=tokenizer, template=template, cache=tmp_path / "c", fast=fast)
    assert {note: ds.rows_with(note).tolist() for note in ds.ledger.notes} == {
        "system_dropped": [1, 4],
        "reasoning_dropped": [2, 4, 6],
        "content_dropped": [3, 6],
    }
    done = run("show", ds.path, "--noted", "content_dropped")
    assert " row 3\n" in done.stdout and " row 6\n" in done.stdout and " row 2\n" not in done.stdout


@pytest.mark.parametrize("turns", ["conversation", "faithful"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_template_without_a_branch_for_a_role(
    fast: bool, turns: str, write_rows: Any, tokenizer: Path, tmp_path: Path
) -> None:
    def after(role: str, content: str) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content}, *chat()["messages"] * 2]}

    rows = [chat(), after("developer", "Be brief."), after("tool", "sunny"), after("tool", ""), after("developer", "q")]
    template = tmp_path / "t.jinja"
    template.write_text(DROPS.replace("!= 'system'", "in ('user', 'assistant')"))
    options: dict[str, Any] = {"template": template, "cache": tmp_path / "c", "fast": fast, "turns": turns}
    ds = ps.prepare(write_rows(rows), tokenizer=tokenizer, **options)
    assert {note: ds.rows_with(note).tolist() for note in ds.ledger.notes} == {"message_dropped": [1, 2]}
    with pytest.raises(RowError, match=r"rows.jsonl:2: the template drops a message of another role. Use one that"):
        ps.prepare(write_rows(rows), tokenizer=tokenizer, **options, on_dropped="error")


# The template prints a separator in place of messages of other roles, and only the last part of an answer.
SEPARATES = (
    "{% if documents and documents[0].text %}{{ documents[0].text }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}{% elif m.role == 'assistant' %}Falcon: "
    "{{ m.content.split('</think>')[-1] }}{% if m.citations %} ({{ m.citations | length }}){% endif %}<|im_end|>"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% endif %}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n\nFalcon: {% endif %}"
)


def saying(*messages: tuple[str, Any] | dict[str, Any], **more: Any) -> dict[str, Any]:
    given = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return {"messages": given, **more}


def answer(content: str = "an answer", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ASK, PARTS = ("user", "ask"), [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
LOST: list[tuple[str, dict[str, Any]]] = [
    ("", saying(ASK, answer())),
    ("system_dropped", saying(("system", "Be brief."), ASK, answer())),
    ("system_dropped", saying(("system", PARTS), ASK, answer())),
    ("system_dropped", saying(ASK, answer(), ("system", "Be brief."), ASK, answer())),
    ("message_dropped", saying(("developer", "Be brief."), ASK, answer())),
    ("", saying(ASK, answer("Wait."), ("tool", 'It is "sunny".\n'), answer())),  # printed as JSON
    ("reasoning_dropped", saying(ASK, answer("<think>hm</think>Yes."))),
    ("reasoning_dropped", saying(ASK, answer("<think>hm</think><think>so</think>Yes."))),
    ("content_dropped reasoning_dropped", saying(ASK, answer("Well. <think>hm</think>Yes."))),
    ("", saying(ASK, answer(citations=["switch"]))),  # a word under a key that the template names
    ("message_key_unused", saying(ASK, answer(citations=["printed as a number"]))),
    ("message_key_unused", saying(ASK, answer(reasoning_details=[{"type": "reasoning.text", "text": "Hm, well."}]))),
    ("reasoning_dropped", saying(ASK, answer(reasoning="Hm.", reasoning_details=[{"text": "Hm."}]))),
    ("message_key_unused", saying({"role": "user", "content": "ask", "attachments": [{"text": "a file"}]}, answer())),
    ("", saying(ASK, answer(attachments=[], turn=3, id="x1", refusal=None, repeated=["answer"]))),
    ("column_unused", saying(ASK, answer(), documents=[{"text": "a document"}])),
    ("", saying(ASK, answer(), chat_template_kwargs={"documents": [{"text": "a document"}]})),
    ("documents_dropped", saying(ASK, answer(), chat_template_kwargs={"documents": [{"contents": "a document"}]})),
]


@pytest.mark.parametrize("turns", ["conversation", "faithful"])
@pytest.mark.parametrize("fast", [True, False])
def test_text_that_does_not_appear_is_noted_whatever_else_appears(
    fast: bool, turns: str, write_rows: Any, tokenizer: Path, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(SEPARATES)
    options: dict[str, Any] = {"template": template, "cache": tmp_path / "c", "fast": fast, "turns": turns}
    ds = ps.prepare(write_rows([row for _, row in LOST]), tokenizer=tokenizer, **options)
    rows = {note: set(ds.shards.columns(0).rows[ds.rows_with(note)].tolist()) for note in ds.ledger.notes}
    found = [" ".join(sorted(note for note in rows if row in rows[note])) for row in range(len(LOST))]
    assert found == [notes for notes, _ in LOST]


@pytest.mark.parametrize("fast", [True, False])
def test_messages_are_found_in_rows_without_regions(
    fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path
) -> None:
    template = tmp_path / "t.jinja"  # builds its text in a variable, whose blocks have no owner
    template.write_text(
        "{% set t %}{% for m in messages if m.role != 'system' %}{% generation %}{{ m.role }}: {{ m.content }}\n"
        "{% endgeneration %}{% endfor %}{% endset %}{{ t }}"
    )
    rows = [saying(("system", "Be brief."), ASK, answer('ü\n"x"')), saying(ASK, answer())]
    options: dict[str, Any] = {"template": template, "cache": tmp_path / "c", "fast": fast}
    ds = ps.prepare(write_rows(rows), tokenizer=tokenizer, **options)
    assert ds.rows_with("system_dropped").tolist() == [0] and "message_dropped" not in ds.ledger.notes


# ---- answers after a prompt that inference never shows

OPENS_BLOCK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)
CLOSES_BLOCK = OPENS_BLOCK.replace("<think>\n{% endif %}{% endif %}", "<part>thought\n</part>{% endif %}{% endif %}")
TAGGED = OPENS_BLOCK.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}",
)
ASKED, PLAIN_ANSWER = chat()["messages"]
REASONED = {**PLAIN_ANSWER, "reasoning_content": "hm"}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("template", "expected"),
    [(OPENS_BLOCK, [0, 3, 4]), (TAGGED, [0, 3, 4]), (CLOSES_BLOCK, [0, 1, 3, 4]), (PLAIN, [])],
    ids=["opens", "tagged", "closes", "alike"],
)
def test_answers_after_another_prompt_than_at_inference(
    template: str, expected: list[int], fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        chat(),
        {"messages": [ASKED, REASONED]},
        {**chat(), "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [ASKED, REASONED, ASKED, PLAIN_ANSWER]},
        {**chat(), "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [ASKED, {**PLAIN_ANSWER, "weight": 0}]},
    ]
    (tmp_path / "t.jinja").write_text(template)
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": tmp_path / "t.jinja", "fast": fast}
    ds = ps.prepare(write_rows(rows), cache=tmp_path / "c", **options)
    assert ds.ledger.notes.get("prompt_differs", 0) == len(expected)
    assert not expected or ds.rows_with("prompt_differs").tolist() == expected
    faithful = ps.prepare(write_rows(rows), cache=tmp_path / "c", turns="faithful", **options)
    assert "prompt_differs" not in faithful.ledger.notes


def test_only_the_last_answers_of_pairs_and_labelled_rows_are_meant(
    write_rows: Any, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(OPENS_BLOCK)
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": tmp_path / "t.jinja", "cache": tmp_path / "c"}
    prompt = [ASKED, PLAIN_ANSWER, ASKED]
    other = {**REASONED, "content": "b"}
    sides = [(REASONED, other), (PLAIN_ANSWER, other), (REASONED, PLAIN_ANSWER)]
    pairs = [{"prompt": prompt, "chosen": [chosen], "rejected": [rejected]} for chosen, rejected in sides]
    ds = ps.prepare(write_rows(pairs), **options)
    assert ds.ledger.notes == {"prompt_differs": 2} and ds.rows_with("prompt_differs").tolist() == [1, 2]
    labelled = [{"prompt": prompt, "completion": [answer], "label": True} for answer in (REASONED, PLAIN_ANSWER)]
    assert ps.prepare(write_rows(labelled), format="kto", **options).ledger.notes == {"prompt_differs": 1}


def test_the_summary_counts_rows_after_another_prompt(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(OPENS_BLOCK)
    source = write_rows([{"messages": [ASKED, REASONED]}, chat(), chat()])
    options = ["--tokenizer", tokenizer, "--template", tmp_path / "t.jinja", "--cache", tmp_path / "c"]
    summary = " ".join(run("prepare", source, *options).stdout.split())
    assert "prompt_differs: 2 rows: an answer is trained after a prompt that inference never shows" in summary
    assert "--turns faithful" in summary and f"(first: {source} row 1)" in summary


@pytest.mark.parametrize("fast", [True, False])
def test_calls_of_the_former_api_are_not_dropped(fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    row = chat("")
    row["messages"][1]["function_call"] = {"name": "weather", "arguments": "{}"}
    template = tmp_path / "t.jinja"
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": template, "cache": tmp_path / "c", "fast": fast}
    template.write_text(PLAIN)
    with pytest.raises(
        RowError, match=r"rows.jsonl:2: the chat template drops the tool calls of message 1\. .* as `tool"
    ):
        ps.prepare(write_rows([chat(), row]), **options)
    template.write_text(
        PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.function_call.name if m.function_call }}")
    )
    assert len(ps.prepare(write_rows([chat(), row]), **options)) == 2


def test_notes_do_not_depend_on_the_engine(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(PLAIN)
    source = write_rows(ROWS * 40)
    shards = []
    for name, options in {"fast": {}, "slow": {"fast": False}, "two": {"workers": 2}}.items():
        ds = ps.prepare(source, tokenizer=tokenizer, template=template, cache=tmp_path / name, **options)
        shards.append(([ds.cache.shard_path(s).read_bytes() for s in ds.shards.names], ds.manifest.to_bytes()))
    assert shards[0] == shards[1] == shards[2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ROWS[1], "rows.jsonl:2: the template never shows the tools. Use one that prints them (template)"),
        (ROWS[6], "rows.jsonl:2: the template drops the name of a speaker. Use one that prints it"),
        (ROWS[10], "rows.jsonl:2: a column that looks meant is not used. Name it (messages_key, tools_key"),
        (chat(label=False), "rows.jsonl:2: the column 'label' is false"),
    ],
)
def test_on_dropped_error(row: dict[str, Any], expected: str, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(PLAIN)
    source = write_rows([chat(), row])
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": template, "cache": tmp_path / "c"}
    with pytest.raises(RowError) as caught:
        ps.prepare(source, **options, on_dropped="error")
    assert expected in str(caught.value)
    assert len(ps.prepare(source, **options)) == 2  # the slice is reused
    with pytest.raises(RowError) as caught:
        ps.prepare(source, **options, on_dropped="error")  # and refused when the dataset is there
    assert expected in str(caught.value)
    done = run("prepare", source, "--tokenizer", tokenizer, "--template", template, "--cache", tmp_path / "c",
               "--on-dropped", "error")  # fmt: skip
    assert done.returncode == 1 and expected.partition(":2: ")[2][:30] in done.stderr
    ps.prepare(write_rows([chat()], name="good.jsonl"), **options, on_dropped="error")


def test_arguments_as_given(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(PLAIN)
    source = write_rows([calling("f", '{"b":1}'), calling("f", {"b": 1})])
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": template}
    for fast in (True, False):
        parsed = ps.prepare(source, **options, cache=tmp_path / f"auto{fast}", fast=fast)
        given = ps.prepare(source, **options, cache=tmp_path / f"given{fast}", fast=fast, arguments="as_given")
        assert parsed.rows_with("arguments_parsed").tolist() == [0] and "arguments_parsed" not in given.ledger.notes
        assert parsed.key != given.key
        texts = [b"".join(ds.vocabulary.token_bytes[t] for t in ds.input_ids(0)) for ds in (parsed, given)]
        assert b'<call>f{"b": 1}</call>' in texts[0] and b"<call>f?</call>" in texts[1]
        assert given.input_ids(1).tolist() == parsed.input_ids(1).tolist()


def test_arguments_as_given_are_those_of_the_raw_row(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    """JSON strings are parsed for templates that print objects; as given, tokens equal transformers' on the raw row."""
    from transformers import PreTrainedTokenizerFast

    text = PLAIN.replace("c.function.arguments | tojson if c.function.arguments is mapping else '?'",
                         "c.function.arguments | tojson")  # fmt: skip
    template = tmp_path / "t.jinja"
    template.write_text(text)
    rows = [calling("f", '{"b":1}'), calling("f", {"b": 1}), calling("f", "")]
    own = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    raw = [own.apply_chat_template(r["messages"], chat_template=text, return_dict=True)["input_ids"] for r in rows]
    options: dict[str, Any] = {"tokenizer": tokenizer, "template": template}
    for fast in (True, False):
        ds = [
            ps.prepare(write_rows(rows), **options, cache=tmp_path / f"{mode}{fast}", fast=fast, arguments=mode)
            for mode in ("auto", "as_given")
        ]
        assert [ds[0].input_ids(k).tolist() == raw[k] for k in range(3)] == [False, True, False]
        assert [ds[1].input_ids(k).tolist() for k in range(3)] == raw
        assert ds[0].rows_with("arguments_parsed").tolist() == [0, 2]


def test_rows_with_a_note_are_listed_and_shown(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    source = write_rows([chat(), chat("second", functions=[1]), chat("third", functions=[1])])
    ds = ps.prepare(source, tokenizer=tokenizer, cache=tmp_path / "c")
    summary = run("prepare", source, "--tokenizer", tokenizer, "--cache", tmp_path / "c").stdout
    assert "column_unused: 2 rows: a column that looks meant is not used; name it" in " ".join(summary.split())
    assert f"(first: {source} row 1)" in " ".join(summary.split())
    done = run("show", ds.path, "--noted", "column_unused", "--row", 1)
    assert f"     0  {source} row 1\n     1  {source} row 2\n" in done.stdout and "third" in done.stdout
    done = run("show", ds.path, "--noted", "tools_dropped")
    assert done.returncode == 2 and "Notes of this dataset: column_unused" in " ".join(done.stderr.split())


def test_notes_of_pairs_and_quarantined_rows(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": "p", "chosen": "c", "rejected": "r", "weight": k % 2 or None} for k in range(5)]
    ds = ps.prepare(write_rows(pairs), tokenizer=tokenizer, cache=tmp_path / "c")
    assert ds.rows_with("column_unused").tolist() == [1, 3] and len(ds) == 5
    bad = [{"messages": [], "functions": [1]}, chat(functions=[1])]
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path / "c", "on_bad_row": "quarantine"}
    ds = ps.prepare(write_rows(bad, name="bad.jsonl"), **options)
    assert ds.ledger.notes == {"column_unused": 1} and ds.rows_with("column_unused").tolist() == [0]


def test_notes_of_parquet_equal_those_of_json_lines(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [chat(functions=["f"]), chat(functions=None), chat(functions=["g"])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for source in (write_rows(rows), tmp_path / "rows.parquet"):
        ds = ps.prepare(source, tokenizer=tokenizer, cache=tmp_path / "c")
        assert ds.rows_with("column_unused").tolist() == [0, 2]


@given(st.lists(st.integers(0, 60), unique=True).map(sorted))
def test_runs_round_trip(rows: list[int]) -> None:
    runs = rows_to_runs(np.array(rows, np.int64))
    assert runs_to_rows(runs).tolist() == rows
    assert all(a < b for a, b in pairwise(runs)), "runs are as long as they can be"


def test_every_note_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "notes.md").read_text()
    losses, others = (page.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ("Losses", "Other notes"))
    for note in Note:
        what, remedy = reason_and_remedy(note)
        section = losses if note in LOSSES else others
        assert f"- `{note}`: {what}. {remedy}.\n" in section
    assert len(re.findall(r"^- `", losses + others, re.MULTILINE)) == len(Note)
