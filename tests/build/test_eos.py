"""`--eos`: plain text and completions end with a trained end-of-sequence token, as in TRL."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from benchmarks.completions import prepared, prepared_by_trl
from penstock.errors import UsageError
from tests.support.splitting import trained_texts

END = "<|im_end|>"  # of the bundled tokenizer


@pytest.mark.parametrize(
    ("eos", "text", "trained"),
    [
        ("auto", "Plain.", f"Plain.{END}"),
        ("auto", f"Ended.{END}", f"Ended.{END}"),
        ("always", f"Ended.{END}", f"Ended.{END}{END}"),
        ("never", "Plain.", "Plain."),
    ],
)
def test_text_ends_as_the_option_says(
    eos: str, text: str, trained: str, tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    dataset = ps.prepare(write_rows([{"text": text}]), tokenizer=tokenizer, eos=eos, cache=tmp_path / "cache")
    assert trained_texts(dataset) == [trained]
    appended = int(trained != text)
    assert dataset.ledger.notes == ({"eos_appended": 1} if appended else {}) | (
        {"special_tokens_in_text": 1} if END in text else {}
    )


def test_both_answers_of_a_pair_get_an_end_token(
    tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    rows = write_rows([{"prompt": "Best?", "chosen": " This.", "rejected": " That."}])
    dataset = ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path / "cache")
    pair = dataset.view()[0]
    pieces = dataset.vocabulary.token_bytes
    ends = [b"".join(pieces[t] for t in side.input_ids.tolist()) for side in (pair.chosen, pair.rejected)]
    assert ends == [b"Best? This.<|im_end|>", b"Best? That.<|im_end|>"]


def test_without_an_end_token(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(tokenizer / "tokenizer.json", tmp_path / "bare")
    rows = write_rows([{"text": "Plain."}])
    dataset = ps.prepare(rows, tokenizer=tmp_path / "bare", cache=tmp_path / "cache")
    assert trained_texts(dataset) == ["Plain."]
    assert dataset.ledger.notes == {"no_eos": 1}
    with pytest.raises(UsageError, match="names no end-of-sequence token"):
        ps.prepare(rows, tokenizer=tmp_path / "bare", eos="always", cache=tmp_path / "cache")


def test_conversations_ignore_the_option(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    rows = write_rows([{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}])
    paths = {ps.prepare(rows, tokenizer=tokenizer, eos=eos, cache=tmp_path / "cache").path for eos in ("auto", "never")}
    assert len(paths) == 1


def test_ids_and_masks_equal_trl(tokenizer: Path, tmp_path: Path) -> None:
    rows = [_row(random.Random(number)) for number in range(100)]
    assert prepared(rows, tokenizer, tmp_path) == prepared_by_trl(rows, tokenizer, tmp_path)


def _row(chance: random.Random) -> dict[str, str]:
    words = ["Count", " to", " ten", "\n", "é", " 日本", "  ", "x = 1", "!", " don't"]
    prompt, completion = ("".join(chance.choices(words, k=chance.randint(1, 9))) for _ in range(2))
    return {"prompt": prompt, "completion": completion + chance.choice(["", "", END])}


def test_spaces_at_the_end_of_a_prompt_are_not_trained(tokenizer: Path, tmp_path: Path) -> None:
    """The one difference from TRL, which trains from the first token on that the prompt by itself would not have.

    The prompt by itself ends in one token for two spaces. With the completion, the second space belongs to its first
    token, and the first one is a token of its own, which has no character of the completion.
    """
    model = with_double_spaces(tokenizer, tmp_path / "model")
    rows = [{"prompt": "Count  ", "completion": "is"}, {"prompt": "Count ", "completion": "is"}]
    (ours, same), (theirs, also_same) = prepared(rows, model, tmp_path), prepared_by_trl(rows, model, tmp_path)
    assert same == also_same
    assert ours[0] == theirs[0]
    pieces = ps.open(next((tmp_path / "cache" / "datasets").iterdir())).vocabulary.token_bytes
    assert [pieces[t] for t, trained in zip(*ours, strict=True) if trained] == [b" is", END.encode()]
    assert [pieces[t] for t, trained in zip(*theirs, strict=True) if trained] == [b" ", b" is", END.encode()]


def with_double_spaces(tokenizer: Path, target: Path) -> Path:
    """The tokenizer with a token for two spaces, as those of most models have."""
    shutil.copytree(tokenizer, target)
    file = target / "tokenizer.json"
    value = json.loads(file.read_text())
    model, added = value["model"], value["added_tokens"]
    model["vocab"]["ĠĠ"] = 1 + max(*model["vocab"].values(), *(token["id"] for token in added))
    model["merges"].append(["Ġ", "Ġ"] if isinstance(model["merges"][0], list) else "Ġ Ġ")
    file.write_text(json.dumps(value))
    return target
