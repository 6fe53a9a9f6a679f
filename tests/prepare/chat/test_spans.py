"""Marked spans are read from rows, stay with their text, and never change what a template prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import RowError
from penstock.native import native
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import FormatOptions, detect
from penstock.prepare.chat.rows import RowReader
from penstock.prepare.template.renderer import TemplateRenderer
from penstock.prepare.template.turns import MARK_SHIFT
from tests.prepare.template.conversations import DATE, TOKENS, templates

HI = {"role": "user", "content": "Hi"}
SPAN = 'A span is {"start": 0, "end": 5, "weight": 0}'
DETAIL = 'An entry of train_detail is {"begin_offset": 0, "end_offset": 4, "train": false}'
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
TRL = dict(templates())


def bot(content: object = "Hello", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def span(start: int, end: int, weight: float = 0) -> dict[str, Any]:
    return {"start": start, "end": end, "weight": weight}


def detail(begin: int, end: int, train: bool) -> dict[str, Any]:
    return {"begin_offset": begin, "end_offset": end, "train": train}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def read(row: dict[str, Any], **options: Any) -> tuple[Conversation, ...]:
    return RowReader(detect([row], FormatOptions(**options))).conversations(json.dumps(row).encode())


def only(*messages: dict[str, Any]) -> Conversation:
    (conversation,) = read({"messages": list(messages)})
    return conversation


# ---- what is read


def test_spans_are_sorted_with_their_weights() -> None:
    found = only(HI, bot(spans=[span(3, 5, 0.5), {"start": 1, "end": 2, "weight": None}, span(0, 1)]))
    assert found == Conversation(
        [HI, bot()], spans=(None, ((0, 1), (1, 2), (3, 5))), span_weights=(None, (0.0, 1.0, 0.5))
    )


@pytest.mark.parametrize(
    "given", [{"spans": []}, {"spans": None}, {"train_detail": None}, {"spans": [], "weight": None}]
)
def test_no_spans_are_none(given: dict[str, Any]) -> None:
    assert only({**HI, **given}, bot(**given)) == Conversation([HI, bot()])
    parts = [part("He", spans=None), part("llo", spans=[])]
    assert only(HI, bot(parts)) == Conversation([HI, bot([part("He"), part("llo")])])


def test_parts_have_spans_of_their_own() -> None:
    parts = [part("He", spans=[span(1, 2), span(0, 1, 2)]), part("l"), part("lo", spans=[span(0, 2)])]
    found = only(HI, bot(parts))
    assert found.messages == [HI, bot([part("He"), part("l"), part("lo")])]
    assert found.spans == (None, (((0, 1), (1, 2)), (), ((0, 2),)))
    assert found.span_weights == (None, (2.0, 0.0, 0.0))


def test_positions_are_code_points_of_the_given_text() -> None:
    text = " \x00e\u0301👩‍👩‍👧\r\n "
    marked = [span(place, place + 1, place) for place in range(len(text))]
    assert only(HI, bot(text, spans=marked)).spans == (None, tuple((place, place + 1) for place in range(len(text))))


def test_spans_and_weights_of_messages_are_apart() -> None:
    found = only(HI, bot(spans=[span(0, 1, 0.5)], weight=2), HI, bot())
    assert found.weights == (None, 2.0, None, None)
    assert found.span_weights == (None, (0.5,), None, None)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, bot(spans=[span(0, 2)])], "system": "S"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "spans": [span(0, 2)]}]},
        {"prompt": [HI], "completion": [bot(spans=[span(0, 2)])]},
        {"prompt": [HI, bot(spans=[span(0, 2)]), HI], "completion": "Ho"},
        {"prompt": [HI], "completion": [bot(spans=[span(0, 2)])], "label": True},
    ],
)
def test_spans_stay_with_their_message(row: dict[str, Any]) -> None:
    (found,) = read(row)
    assert found.spans is not None and found.span_weights is not None
    assert len(found.spans) == len(found.span_weights) == len(found.messages)
    place = next(k for k, message in enumerate(found.messages) if message["role"] == "assistant")
    assert {k: own for k, own in enumerate(found.spans) if own is not None} == {place: ((0, 2),)}
    assert found.span_weights[place] == (0.0,)


def test_both_sides_of_a_pair_have_spans() -> None:
    sides = [bot(spans=[span(0, 2)])], [bot(spans=[span(1, 2)])]
    chosen, rejected = read({"prompt": [HI], "chosen": sides[0], "rejected": sides[1]})
    assert (chosen.spans, rejected.spans) == ((None, ((0, 2),)), (None, ((1, 2),)))


def test_a_repeated_prompt_repeats_its_spans() -> None:
    said, plain = bot(spans=[span(0, 2)]), bot()
    row = {"prompt": [HI, said], "chosen": [HI, said, bot("a")], "rejected": [HI, said, bot("b")]}
    chosen, rejected = read(row)
    assert chosen.spans == rejected.spans == (None, ((0, 2),), None)
    system = {"role": "system", "content": "S"}
    chosen, _ = read({**row, "chosen": [system, HI, said, bot("a")]})
    assert chosen.spans == (None, None, ((0, 2),), None)
    with pytest.raises(RowError) as caught:
        read({**row, "rejected": [HI, plain, bot("b")]})
    assert (caught.value.kind, str(caught.value)) == (
        "bad_span",
        "rejected repeats the prompt, but not its spans. Give the same spans in both, or only the answer there",
    )


# ---- Axolotl's train_detail


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ([detail(0, 4, True)], [(0, 5, 1)]),
        ([detail(0, 4, False)], [(0, 5, 0)]),
        ([detail(1, 2, True)], [(0, 1, 0), (1, 3, 1), (3, 5, 0)]),
        ([detail(3, 3, True), detail(0, 1, True)], [(0, 2, 1), (2, 3, 0), (3, 4, 1), (4, 5, 0)]),
        ([detail(0, 1, True), detail(2, 4, True)], [(0, 5, 1)]),
        ([detail(0, 4, False), detail(1, 3, True), detail(2, 2, False)], [(0, 1, 0), (1, 4, 1), (4, 5, 0)]),
        ([detail(0, 3, True), detail(1, 2, True)], [(0, 4, 1), (4, 5, 0)]),
        ([detail(2, 5, True)], [(0, 2, 0), (2, 5, 1)]),
        ([{**detail(2, 4, True), "text": "llo"}], [(0, 2, 0), (2, 5, 1)]),
    ],
)
def test_train_detail_trains_what_its_entries_train(details: list[Any], expected: list[tuple[int, int, int]]) -> None:
    found = only(HI, bot(train_detail=details))
    assert found.messages == [HI, bot()]
    assert found.spans == (None, tuple((start, end) for start, end, _ in expected))
    assert found.span_weights == (None, tuple(weight for *_, weight in expected))


def test_an_empty_train_detail_trains_nothing_unless_the_message_has_a_weight() -> None:
    found = only({**HI, "train_detail": []}, bot(train_detail=[]), bot(train_detail=[], train=True))
    assert (found.weights, found.spans) == ((0.0, 0.0, 1.0), None)


def axolotl_trains(details: list[dict[str, Any]], bounds: list[int]) -> list[bool]:
    """The tokens that Axolotl 0.19 trains (`get_offsets_for_train_detail`); tokens are the texts between bounds."""
    tokens = [(start, end - 1) for start, end in pairwise(bounds)]
    trained = [False] * len(tokens)
    for own in details:
        begin, end = own["begin_offset"], own["end_offset"]
        first = next((k for k, token in enumerate(tokens) if token[0] >= begin), len(tokens))
        if first > 0 and tokens[first - 1][1] > begin:
            first -= 1
        last = next((k for k in reversed(range(len(tokens))) if tokens[k][1] <= end), -1)
        if last < len(tokens) - 1 and tokens[last + 1][0] < end:
            last += 1
        for k in range(first, last + 1):
            trained[k] |= own["train"]
    return trained


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_whole_tokens_are_trained_as_in_axolotl(sizes: list[int], data: st.DataObject) -> None:
    bounds = [0, *np.cumsum(sizes).tolist()]
    tokens = st.integers(0, len(sizes) - 1)
    drawn = data.draw(st.lists(st.tuples(tokens, tokens, st.booleans()), min_size=1, max_size=4))
    details = [detail(bounds[min(a, b)], bounds[max(a, b) + 1] - 1, train) for a, b, train in drawn]
    found = only(HI, bot("x" * bounds[-1], train_detail=details))
    assert found.spans is not None and found.span_weights is not None
    places, weights = found.spans[1], found.span_weights[1]
    assert places is not None and weights is not None
    ours = [weight for (start, end), weight in zip(places, weights, strict=True) for _ in range(start, end)]
    theirs = axolotl_trains(details, bounds)
    assert ours == [float(own) for own, size in zip(theirs, sizes, strict=True) for _ in range(size)]


# ---- what is refused


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (bot(spans={"start": 0, "end": 1}), f"messages[1].spans is an object, not a list. {SPAN}"),
        (bot(spans="[]"), f"messages[1].spans is a string, not a list. {SPAN}"),
        (bot(spans=[[0, 1]]), f"messages[1].spans[0] is a list, not an object. {SPAN}"),
        (bot(spans=[{"end": 1}]), f"messages[1].spans[0].start is null; expected an integer. {SPAN}"),
        (
            bot(spans=[{"start": True, "end": 2}]),
            f"messages[1].spans[0].start is a boolean; expected an integer. {SPAN}",
        ),
        (bot(spans=[{"start": 0, "end": 1.0}]), f"messages[1].spans[0].end is 1.0; expected an integer. {SPAN}"),
        (bot(spans=[{**span(0, 1), "wieght": 0}]), f"messages[1].spans[0] has an unknown key 'wieght'. {SPAN}"),
        (
            bot(spans=[span(0, 1), span(2, 6)]),
            "messages[1].spans[1] is from 2 to 6; expected 0 <= start < end <= 5, the length of its text. "
            "Count code points, as Python's len does",
        ),
        (
            bot(spans=[span(2, 2)]),
            "messages[1].spans[0] is from 2 to 2; expected 0 <= start < end <= 5, the length of its text. "
            "Count code points, as Python's len does",
        ),
        (
            bot(spans=[span(-1, 2)]),
            "messages[1].spans[0] is from -1 to 2; expected 0 <= start < end <= 5, the length of its text. "
            "Count code points, as Python's len does",
        ),
        (
            bot(spans=[span(2, 4), span(0, 3)]),
            "messages[1].spans has overlapping spans, 0 to 3 and 2 to 4. "
            "Keep one of them, or split them where they overlap",
        ),
        (
            bot(spans=[span(0, 1, -1)]),
            "messages[1].spans[0].weight is -1; expected true, false or a number from 0 to 3.4e+38",
        ),
        (
            bot(spans=[span(0, 1, 1e39)]),
            "messages[1].spans[0].weight is 1e+39; expected true, false or a number from 0 to 3.4e+38",
        ),
        (
            bot(spans=[{**span(0, 1), "weight": "high"}]),
            "messages[1].spans[0].weight is 'high'; expected true, false or a number from 0 to 3.4e+38",
        ),
        (
            bot(None, tool_calls=[CALL], spans=[span(0, 1)]),
            "messages[1].spans: the content has no text. Remove the spans, or give it text",
        ),
        (
            bot([part("Hello")], spans=[span(0, 1)]),
            "messages[1].spans: the content is a list. Give each part its own spans",
        ),
        (
            bot([part("Hello")], train_detail=[detail(0, 1, True)]),
            "messages[1].train_detail: the content is a list. Give each part its own spans",
        ),
        (
            bot([part("Hello"), part("a", spans=[span(0, 2)])]),
            "messages[1].content[1].spans[0] is from 0 to 2; expected 0 <= start < end <= 1, the length of its text. "
            "Count code points, as Python's len does",
        ),
        (
            {**HI, "spans": [span(0, 1)]},
            "messages[1] has spans, and its role is user; only answers have spans. "
            "Remove them, or give the whole message a weight",
        ),
        (bot(spans=[], train_detail=[]), "messages[1] has both spans and train_detail. Keep one"),
        (bot(train_detail={}), f"messages[1].train_detail is an object, not a list. {DETAIL}"),
        (
            bot(train_detail=[{"end_offset": 1, "train": True}]),
            f"messages[1].train_detail[0].begin_offset is null; expected an integer. {DETAIL}",
        ),
        (
            bot(train_detail=[{"begin_offset": 0, "end_offset": 1}]),
            "messages[1].train_detail[0].train is null; expected true or false",
        ),
        (
            bot(train_detail=[detail(2, 1, True)]),
            "messages[1].train_detail[0] is from 2 to 1; expected 0 <= begin_offset <= end_offset <= 4, the last "
            "character of its text. Count code points, as Python's len does",
        ),
        (
            bot(train_detail=[detail(0, 6, True)]),
            "messages[1].train_detail[0] is from 0 to 6; expected 0 <= begin_offset <= end_offset <= 4, the last "
            "character of its text. Count code points, as Python's len does",
        ),
    ],
)
def test_bad_spans(message: dict[str, Any], text: str) -> None:
    with pytest.raises(RowError) as caught:
        only(HI, message, bot())
    assert (caught.value.kind, str(caught.value)) == ("bad_span", text)


def test_a_call_that_is_given_as_text_has_no_spans() -> None:
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "spans": [span(0, 2)]}
    with pytest.raises(RowError) as caught:
        read({"conversations": [*said, call]})
    assert caught.value.kind == "bad_span"
    assert str(caught.value).startswith("conversations[2].spans: the content has no text")


def test_columns_of_spans_are_noted(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    rows = write_rows([{"instruction": "q", "output": "a", "spans": [span(0, 1)]}])
    dataset = ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path / "cache")
    assert dataset.ledger.notes == {"column_unused": 1}


# ---- templates


def marked(rendered: Any) -> list[tuple[int, str]]:
    """The numbers of marked spans and what they printed, in order."""
    labels, starts, ends = (
        column.tolist() for column in (rendered.fields.labels, rendered.fields.starts, rendered.fields.ends)
    )
    found = zip(labels, starts, ends, strict=True)
    return [
        (label >> MARK_SHIFT, rendered.data[start:end].decode()) for label, start, end in found if label >> MARK_SHIFT
    ]


@pytest.mark.skipif(native is None, reason="installed without a compiler")
@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("qwen3", bot("eins zwei drei", spans=[span(0, 4), span(5, 9)])),
        ("qwen3", bot([part("eins "), part("zwei drei", spans=[span(0, 4)])])),
        ("qwen3", bot([part("x eins", spans=[span(2, 6)]), part(""), part(" zwei drei", spans=[span(1, 5)])])),
        ("llama3_1", bot([part("eins", spans=[span(0, 4)]), part(" zwei", spans=[span(1, 5)])])),
        ("llava_next", bot("ä eins zwei drei", spans=[span(2, 6), span(7, 11)])),
        ("llava_next", bot([part("eins", spans=[span(0, 4)]), part(" zwei", spans=[span(1, 5)])])),
    ],
)
def test_spans_follow_content_into_the_form_of_the_template(
    name: str, content: dict[str, Any], by_reference: bool
) -> None:
    renderer = TemplateRenderer(TRL[name], special_tokens=TOKENS, variables={}, date=DATE)
    given = only(HI, content)
    adapted = renderer.adapter.adapt(given)
    rendered = (renderer.render_reference if by_reference else renderer.render)([adapted])
    words = ["eins", "zwei"][-len((given.span_weights or ())[1] or ()) :]
    assert marked(rendered) == list(enumerate(words, 1))
    assert adapted.span_weights == given.span_weights


@pytest.mark.parametrize("turns", ["conversation", "faithful"])
@pytest.mark.parametrize("printed", ["m.content", "m|tojson"])
def test_spans_change_no_token(
    printed: str, turns: str, tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ " + printed + " }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    givens = [bot(), bot(spans=[span(0, 2)]), bot(train_detail=[detail(0, 1, True)]), bot(spans=[])]
    rows = write_rows([{"messages": [HI, message]} for message in givens])
    dataset = ps.prepare(rows, tokenizer=tokenizer, template=template, turns=turns, cache=tmp_path / "cache")
    ids = [example.input_ids.tolist() for example in dataset.view(train_on="all_tokens")]
    assert ids == [ids[0]] * len(givens)
    assert dataset.ledger.notes == {}


def test_other_spans_are_another_dataset(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    sources = [write_rows([{"messages": [HI, bot(spans=[span(0, 2, w)])]}], f"{w}.jsonl") for w in (0, 1)]
    paths = {ps.prepare(source, tokenizer=tokenizer, cache=tmp_path / "cache").path for source in sources}
    assert len(paths) == 2
