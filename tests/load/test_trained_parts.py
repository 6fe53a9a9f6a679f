"""Under each choice of parts, exactly the words of those fields are trained, with every template of trl."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import penstock as ps
from penstock.errors import ViewError
from penstock.prepare.template.turns import Field
from tests.prepare.template.conversations import templates
from tests.prepare.template.field_cases import Sentinels, sentinels

pytestmark = pytest.mark.slow
TRL = dict(templates())
Words = set[tuple[Field, str]]
CHOICES = {
    "reasoning": {Field.REASONING},
    "=reasoning": {Field.REASONING},
    "content": {Field.CONTENT},
    "calls": {Field.CALL_NAME, Field.CALL_ARGUMENTS},
    "call_name": {Field.CALL_NAME},
    "call_arguments": {Field.CALL_ARGUMENTS},
    "call_markup": set[Field](),
    "reasoning_markup": set[Field](),
    "-reasoning": {Field.CONTENT, Field.CALL_NAME, Field.CALL_ARGUMENTS},
    "-calls,-stop": {Field.REASONING, Field.CONTENT},
    "body": {Field.REASONING, Field.CONTENT, Field.CALL_NAME, Field.CALL_ARGUMENTS},
}


def conversations() -> Iterator[Sentinels]:
    yield sentinels()
    yield sentinels(as_text=True)
    given = sentinels()
    talk = [m for m in given.conversation.messages if m["role"] in ("user", "assistant")]
    chat = [{k: v for k, v in talk[k].items() if k != "tool_calls"} for k in (0, 1, 3, 4)]
    yield given._replace(conversation=given.conversation._replace(messages=chat))


@pytest.mark.parametrize(
    ("name", "turns"),
    [*((name, "conversation") for name in TRL), *((name, "faithful") for name in TRL if "training" not in name)],
)
def test_the_words_of_a_part_are_trained(name: str, turns: str, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TRL[name])
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    options: dict[str, Any] = {"template": tmp_path / "own.jinja", "cache": tmp_path / "cache", "workers": 1}
    options["turns"] = turns
    options["template_vars"] = {"bos_token": "<s>", "eos_token": "</s>"}
    cases = list(conversations())
    rows = [{"messages": case.conversation.messages} for case in cases]
    dataset = ps.prepare(rows, tokenizer=tokenizer, on_bad_row="quarantine", progress=False, **options)
    assert dataset.ledger.kept
    assert dataset.ledger.regions_unknown == 0
    for parts, fields in CHOICES.items():
        found = words(dataset, cases, decoder, parts)
        for number, spoken in words(dataset, cases, decoder, "body").items():
            assert found.get(number, set()) == {(field, word) for field, word in spoken if field in fields}, parts


def words(dataset: ps.Dataset, cases: list[Sentinels], decoder: Tokenizer, parts: str) -> dict[int, Words]:
    """The words that are trained in each row, with their fields."""
    try:
        view = dataset.view(parts=parts, max_length=None)
    except ViewError:
        return {}  # no row has any of these parts
    found: dict[int, Words] = {}
    for place, example in zip(view.index.rows.tolist(), view, strict=True):
        number = dataset.locate(place).row
        text = decoder.decode(example.input_ids[example.loss_mask].tolist(), skip_special_tokens=False)
        own = {(field, text[start:end]) for field, start, end in cases[number].printed(text)}
        found.setdefault(number, set()).update(own)
    return found
