"""`--stop next_marker`: the marker after a turn is its stop if the template prints none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import UsageError
from tests.support.splitting import trained_texts

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROW = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho <|user|> no"},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "Bye"},
    ]
}


@pytest.fixture
def model(tokenizer: Path, tmp_path: Path) -> Path:
    """The bundled tokenizer with turn markers as added tokens, one of which is an end-of-sequence id of the model."""
    folder = tmp_path / "model"
    shutil.copytree(tokenizer, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    data = json.loads((folder / "tokenizer.json").read_text())
    first = max(*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])) + 1
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number, marker in enumerate(("<|user|>", "<|assistant|>")):
        data["added_tokens"].append({"id": first + number, "content": marker, **usual})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, first]}))
    return folder


def test_the_marker_after_a_turn_is_trained(model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    rows = write_rows([ROW])
    plain = ps.prepare(rows, tokenizer=str(model), cache=tmp_path / "cache")
    assert trained_texts(plain) == ["Ho <|user|> no", "Bye"]
    for fast in (True, False):
        cache = tmp_path / f"cache-{fast}"
        marked = ps.prepare(rows, tokenizer=str(model), stop="next-marker", cache=cache, fast=fast)
        assert trained_texts(marked) == ["Ho <|user|> no<|user|>", "Bye"]
        assert marked.key != plain.key


@pytest.mark.parametrize("fast", [True, False])
def test_append_ends_the_last_answer_of_a_row(
    fast: bool, model: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    ended = {"messages": [*ROW["messages"], {"role": "user", "content": "?"}]}
    marked = {"messages": [*ROW["messages"][:3], {"role": "assistant", "content": "Bye<|user|>"}]}
    rows = write_rows([ROW, ended, marked])
    options = {"tokenizer": str(model), "cache": tmp_path / "cache", "fast": fast}
    plain = ps.prepare(rows, stop="next_marker", **options)
    ds = ps.prepare(rows, stop="append", **options)
    for number in range(3):
        assert trained_texts(ds, number) == ["Ho <|user|> no<|user|>", "Bye<|user|>"]
    assert [ds.input_ids(k).tolist() == plain.input_ids(k).tolist() for k in range(3)] == [False, True, True]
    assert ds.input_ids(0)[:-1].tolist() == plain.input_ids(0).tolist()
    assert ds.ledger.notes["stop_appended"] == 1 and ds.rows_with("stop_appended").tolist() == [0]
    assert ds.key != plain.key
    with pytest.raises(UsageError, match="turns='faithful' and stop='append' exclude each other"):
        ps.prepare(rows, stop="append", turns="faithful", **options)


def test_append_says_that_there_is_nothing_to_append(
    model: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    ds = ps.prepare(write_rows([ROW]), tokenizer=str(model), stop="append", cache=tmp_path / "cache")
    assert any("none is appended" in warning for warning in ds.ledger.warnings)
    assert "stop_appended" not in ds.ledger.notes


def test_next_marker_requires_the_models_end_ids(model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    (model / "generation_config.json").unlink()
    with pytest.raises(UsageError, match=r"generation_config\.json"):
        ps.prepare(write_rows([ROW]), tokenizer=str(model), stop="next-marker", cache=tmp_path / "cache")
