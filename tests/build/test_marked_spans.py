"""Marked spans of answers become weights of tokens, in every form of turns and whatever the tokens are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import penstock as ps

ASK = {"role": "user", "content": "Which river?"}
TEXT = "The Rhine flows through Cologne."
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Prepared = Callable[..., ps.Dataset]


@pytest.fixture
def prepared(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> Prepared:
    (tmp_path / "own.jinja").write_text(TEMPLATE)

    def prepared(*messages: list[dict[str, Any]], **options: Any) -> ps.Dataset:
        rows = write_rows([{"messages": list(chat)} for chat in messages])
        chosen = {"template": tmp_path / "own.jinja", "cache": tmp_path / "cache", **options}
        return ps.prepare(rows, tokenizer=tokenizer, **chosen)

    return prepared


def answer(content: Any = TEXT, **more: Any) -> list[dict[str, Any]]:
    return [ASK, {"role": "assistant", "content": content, **more}]


def span(text: str, weight: float | None = 0, inside: str = TEXT) -> dict[str, Any]:
    start = inside.index(text)
    return {"start": start, "end": start + len(text), **({} if weight is None else {"weight": weight})}


def weighted(dataset: ps.Dataset, tokenizer: Path, number: int = 0) -> dict[float, str]:
    """The text of the tokens with each weight that is not zero by default."""
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    example = dataset.view(max_length=None)[number]
    return {
        float(weight): decoder.decode(example.input_ids[example.loss_weights == weight].tolist())
        for weight in np.unique(example.loss_weights)
        if weight > 0
    }


@pytest.mark.parametrize("turns", ["conversation", "faithful"])
@pytest.mark.parametrize("fast", [True, False])
def test_weights_of_spans(prepared: Prepared, tokenizer: Path, turns: str, fast: bool) -> None:
    dataset = prepared(
        answer(spans=[span(" Rhine"), span(" Cologne", 0.5)]),
        answer(spans=[span(" Rhine", 0.5)], weight=2.0),
        answer(TEXT, train_detail=[{"begin_offset": 3, "end_offset": 8, "train": True}]),
        answer([{"type": "text", "text": TEXT, "spans": [span(" flows", 3)]}]),
        turns=turns,
        fast=fast,
    )  # fmt: skip
    assert weighted(dataset, tokenizer) == {1.0: "The flows through.", 0.5: " Cologne"}
    assert weighted(dataset, tokenizer, 1) == {1.0: " Rhine", 2.0: "The flows through Cologne."}
    assert weighted(dataset, tokenizer, 2) == {1.0: " Rhine"}
    assert weighted(dataset, tokenizer, 3) == {1.0: "The Rhine through Cologne.", 3.0: " flows"}
    assert dataset.ledger.crossings == {}


def test_spans_of_pairs_and_labelled_answers(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    marked, plain = answer(spans=[span(" Rhine")]), answer("The Spree.")
    options = {"tokenizer": tokenizer, "template": tmp_path / "own.jinja", "cache": tmp_path / "cache"}
    pairs = ps.prepare(write_rows([{"chosen": marked, "rejected": plain}], "pairs.jsonl"), **options)
    labelled = ps.prepare(write_rows([{"messages": marked, "label": True}], "kto.jsonl"), format="kto", **options)
    for dataset in (pairs, labelled):
        decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        found = dataset.view(max_length=None)[0]
        example = found.chosen if dataset is pairs else found
        trained = decoder.decode(example.input_ids[example.loss_weights > 0].tolist())
        assert trained == "The flows through Cologne."


@pytest.mark.parametrize("straddle", ["inside", "touch", "error"])
def test_tokens_across_the_border_of_a_span(prepared: Prepared, tokenizer: Path, straddle: str) -> None:
    """The span ends within a token."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    start, end = next((a, b) for a, b in encoder.encode(TEXT).offsets if a and b - a > 1)
    marked = answer(spans=[{"start": 0, "end": start + 1, "weight": 0}])
    dataset = prepared(marked, answer(), straddle=straddle, on_bad_row="quarantine")
    if straddle == "error":
        assert dataset.ledger.rejected == {"straddled_span": 1}
        assert weighted(dataset, tokenizer) == {1.0: TEXT}
        return
    assert weighted(dataset, tokenizer) == {1.0: TEXT[start:] if straddle == "inside" else TEXT[end:]}
    assert dataset.ledger.crossings == {"span": 1}


def test_spans_that_touch(prepared: Prepared, tokenizer: Path) -> None:
    dataset = prepared(answer(spans=[span("The Rhine", 0), span(" flows through", 0.5), span(" Cologne.", 2)]))
    assert weighted(dataset, tokenizer) == {0.5: " flows through", 1.0: "", 2.0: " Cologne."}


def test_spans_without_a_place_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    """A template without a generation prompt doesn't tell headers from what the model writes."""
    (tmp_path / "flat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    dataset = prepared(
        answer(spans=[span(" Rhine")]), answer(), template=tmp_path / "flat.jinja", on_bad_row="quarantine"
    )  # fmt: skip
    assert dataset.ledger.rejected == {"bad_span": 1}
    assert dataset.ledger.regions_unknown == 1


def test_crossings_are_counted_by_border(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    """The token ` {"` of a call belongs to the arguments."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Bern"}}}
    rows = [{"messages": answer("", tool_calls=[call])} for _ in range(3)]
    (tmp_path / "calls.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments|tojson }}}{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = {"tokenizer": tokenizer, "template": tmp_path / "calls.jinja", "cache": tmp_path / "cache"}
    dataset = ps.prepare(write_rows(rows), **options)
    crossings = dataset.ledger.crossings
    assert crossings
    assert all(count == 3 for count in crossings.values())
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for parts, text in (("call_name", "look"), ("call_arguments", '{"city": "Bern"}')):
        example = dataset.view(parts=parts, max_length=None)[0]
        trained = decoder.decode(example.input_ids[example.loss_mask].tolist())
        assert text in trained
        assert len(trained) <= len(text) + 2
