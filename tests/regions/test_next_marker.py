"""`--stop next-marker`: the marker after a turn is its stop where the template prints none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import UsageError

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
    """The bundled tokenizer with markers of turns as added tokens, one of which ends the model's turns."""
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


def trained(dataset: ps.Dataset) -> list[str]:
    """The trained stretches of the first example, as text."""
    example = dataset.view(max_length=None)[0]
    pieces = dataset.vocabulary.token_bytes
    texts, before = [], False
    for token, mask in zip(example.input_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if mask:
            texts[-1:] = [texts[-1] + pieces[token]] if before else [*texts[-1:], pieces[token]]
        before = mask
    return [text.decode() for text in texts]


def test_the_marker_after_a_turn_is_trained(model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    rows = write_rows([ROW])
    plain = ps.prepare(rows, tokenizer=str(model), cache=tmp_path / "cache")
    assert trained(plain) == ["Ho <|user|> no", "Bye"]
    for fast in (True, False):
        cache = tmp_path / f"cache-{fast}"
        marked = ps.prepare(rows, tokenizer=str(model), stop="next-marker", cache=cache, fast=fast)
        assert trained(marked) == ["Ho <|user|> no<|user|>", "Bye"]
        assert marked.key != plain.key


def test_without_the_models_ids_it_is_refused(model: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    (model / "generation_config.json").unlink()
    with pytest.raises(UsageError, match=r"generation_config\.json"):
        ps.prepare(write_rows([ROW]), tokenizer=str(model), stop="next-marker", cache=tmp_path / "cache")
