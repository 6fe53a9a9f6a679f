"""`--stop next-marker`: the marker after a turn is its stop if the template prints none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import UsageError
from tests.regions.splitting import trained_texts

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


def test_next_marker_requires_the_models_end_ids(model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    (model / "generation_config.json").unlink()
    with pytest.raises(UsageError, match=r"generation_config\.json"):
        ps.prepare(write_rows([ROW]), tokenizer=str(model), stop="next-marker", cache=tmp_path / "cache")
