"""What is not used of rows, or dropped by a template, is counted by name and told in one line with its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.chat.notes import Note, told
from penstock.errors import RowError


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
    assert ds.ledger["notes"] == {"reasoning_dropped": 2}


@pytest.mark.parametrize("fast", [True, False])
def test_labels_of_kto(fast: bool, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path / "c", "fast": fast}
    rows = [chat(label=False), chat(label=True), chat(label=False, unusual=1), chat(label=0), chat()]
    assert ps.prepare(write_rows(rows), **options).ledger["notes"] == {"label_false": 2}
    plain = [{"prompt": "p", "completion": "c", "label": label} for label in (True, False, None)]
    assert ps.prepare(write_rows(plain), **options).ledger["notes"] == {"label_false": 1, "eos_appended": 3}
    pairs = [{"prompt": "p", "chosen": "c", "rejected": "r", "label": False}]
    assert ps.prepare(write_rows(pairs), **options).ledger["notes"] == {"label_false": 1, "eos_appended": 1}


@pytest.mark.parametrize("key", ["weight", "train", "masked"])
def test_a_weight_of_a_part_is_refused(key: str, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    part = {"type": "text", "text": "a", key: 0}
    with pytest.raises(RowError, match=rf"messages\[1\]\.content\[0\]\.{key}: a part has no weight of its own. Give"):
        ps.prepare(write_rows([chat([part])]), tokenizer=tokenizer, cache=tmp_path / "c")


def test_every_note_is_told_in_one_line() -> None:
    for note in Note:
        line = told(note.value, 1234)
        assert line.startswith("1,234 ") and "\n" not in line and note.value + " " not in line.partition(":")[0]
    assert told("label_false", 1).startswith("1 row: the column 'label' is false")
    assert told("of another version", 2) == "2 rows: of another version"
