"""`--eos`: plain text and completions end with a trained end-of-sequence token, as in TRL."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import UsageError
from tests.regions.splitting import trained_texts

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
    assert dataset.ledger["notes"] == ({"eos_appended": 1} if appended else {}) | (
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
    assert dataset.ledger["notes"] == {"no_eos": 1}
    with pytest.raises(UsageError, match="names no end-of-sequence token"):
        ps.prepare(rows, tokenizer=tmp_path / "bare", eos="always", cache=tmp_path / "cache")


def test_conversations_ignore_the_option(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    rows = write_rows([{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}])
    paths = {ps.prepare(rows, tokenizer=tokenizer, eos=eos, cache=tmp_path / "cache").path for eos in ("auto", "never")}
    assert len(paths) == 1


def test_ids_and_masks_equal_trl(tokenizer: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    rows = [_row(random.Random(number)) for number in range(100)]
    dataset = ps.prepare(write_rows(rows), tokenizer=tokenizer, cache=tmp_path / "cache")
    view = dataset.view(max_length=None)
    ours = [(e.input_ids.tolist(), e.loss_mask.tolist()) for e in (view[k] for k in range(len(rows)))]
    assert ours == prepared_by_trl(rows, tokenizer, tmp_path)


def _row(chance: random.Random) -> dict[str, str]:
    words = ["Count", " to", " ten", "\n", "é", " 日本", "  ", "x = 1", "!", " don't"]
    prompt, completion = ("".join(chance.choices(words, k=chance.randint(1, 9))) for _ in range(2))
    return {"prompt": prompt, "completion": completion + chance.choice(["", "", END])}


def prepared_by_trl(rows: list[dict[str, str]], tokenizer: Path, folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Returns the ids and masks of TRL's SFTTrainer for rows with prompt and completion."""
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    trl = pytest.importorskip("trl")
    own: Any = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
    size: dict[str, int] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=len(own), num_attention_heads=1, num_key_value_heads=1, **size)
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        args=trl.SFTConfig(output_dir=str(folder / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=None),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=own,
    )
    return [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in trainer.train_dataset]
