"""Adopted data keeps its ids and masks, and exports them unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, normalizers

import penstock as ps
from penstock.errors import PenstockError, RegionsUnknown, SourceError, TokenizerError, UsageError
from penstock.exchange.format import find_format
from penstock.exchange.formats import format_names
from penstock.store.verify import verify_cache
from tests.exchange.readers import read
from tests.support.spm_tokenizers import SPACES, bpe

pytestmark = pytest.mark.slow


@pytest.fixture
def rows(place: Path) -> Path:
    path = place / "rows.jsonl"
    lines = [
        {"input_ids": [10, 11, 12, 13], "loss_mask": [0, 1, 1, 0]},
        {"input_ids": [7], "loss_mask": [0]},
        {"input_ids": [20, 21], "loss_mask": [1, 1]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("to", format_names())
def test_round_trip(dataset: ps.Dataset, tokenizer: Path, place: Path, to: str) -> None:
    view = dataset.view(max_length=120)
    view.export(to, place / "out", part_tokens=4000)
    adopted = ps.adopt(place / "out", tokenizer=tokenizer, cache=place / "cache")
    adopted.view(train_on="customized").export(to, place / "again", part_tokens=4000)
    assert read(to, place / "again") == read(to, place / "out")
    assert adopted.view(train_on="customized")[3].input_ids.tolist() == view[3].input_ids.tolist()
    assert verify_cache(adopted.cache).findings == []
    assert ps.adopt(place / "out", tokenizer=tokenizer, cache=place / "cache").key == adopted.key


@pytest.mark.parametrize("to", [to for to in format_names() if find_format(to).supports.packed])
def test_packed_rows_are_unpacked(dataset: ps.Dataset, tokenizer: Path, place: Path, to: str) -> None:
    dataset.view(max_length=120).export(to, place / "out", capacity=256)
    adopted = ps.adopt(place / "out", tokenizer=tokenizer, cache=place / "cache").view(train_on="customized")
    sequences = [sequence for row in read(to, place / "out") for sequence in row]
    assert [(item.input_ids.tolist(), item.loss_mask.tolist()) for item in adopted] == sequences


@pytest.mark.parametrize("to", ["hf", "jsonl", "parquet", "trl"])
def test_pairs(pairs: ps.Dataset, tokenizer: Path, place: Path, to: str) -> None:
    pairs.view().export(to, place / "out")
    adopted = ps.adopt(place / "out", tokenizer=tokenizer, cache=place / "cache", check_tokenizer="warn")
    assert adopted.is_preference
    adopted.view(train_on="customized").export(to, place / "again")
    assert read(to, place / "again") == read(to, place / "out")


def test_weights(tokenizer: Path, place: Path) -> None:
    table = pa.table({"tokens": [[5, 6, 7, 8]], "loss_weights": [[0.0, 0.5, 1.0, 2.0]]})
    pq.write_table(table, place / "rows.parquet")
    adopted = ps.adopt(place / "rows.parquet", tokenizer=tokenizer, cache=place / "cache", check_tokenizer="warn")
    assert adopted.view(train_on="customized")[0].loss_weights.tolist() == [0.0, 0.5, 1.0, 2.0]


def test_policies_that_need_roles_are_refused(rows: Path, tokenizer: Path, place: Path) -> None:
    adopted = ps.adopt(rows, tokenizer=tokenizer, cache=place / "cache", check_tokenizer="warn")
    with pytest.raises(RegionsUnknown, match="was adopted: .* Use train_on='customized' for the mask"):
        adopted.view(train_on="all_assistant_messages")
    view = adopted.view()
    assert view.settings.train_on == "customized"
    assert ps.mix({"adopted": (adopted, 1.0)})[0].loss_mask.tolist() == view[0].loss_mask.tolist()  # type: ignore[union-attr]
    assert adopted.stats().trained == view.ledger.trained
    assert [item.loss_mask.tolist() for item in view] == [[False, True, True, False], [True, True]]
    assert view.ledger.dropped_rows == {"no_trained_token": 1}
    assert adopted.view(train_on="all_tokens")[1].loss_mask.tolist() == [True]
    with pytest.raises(SourceError, match="it has no source conversations"):
        adopted.conversation(0)
    rows.write_text('{"input_ids": [5, 6]}\n')
    bare = ps.adopt(rows, tokenizer=tokenizer, cache=place / "cache", check_tokenizer="warn")
    assert bare.view(train_on="all_tokens")[0].input_ids.tolist() == [5, 6]
    with pytest.raises(RegionsUnknown, match="1 of 1 rows have unknown regions"):
        bare.view(train_on="customized")


@pytest.mark.parametrize(
    ("line", "options", "kind", "text"),
    [
        ({"messages": []}, {}, SourceError, "no column input_ids or tokens.*penstock prepare"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, {}, SourceError, "rows.jsonl:1: token 1 has the label 2"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, {}, SourceError, "rows.jsonl:1: 2 ids but 1 entries of 'loss_mask'"),
        (
            {"input_ids": [1], "loss_mask": [1], "completion_mask": [1]},
            {},
            UsageError,
            "several masks .* Choose one with mask=",
        ),
        ({"input_ids": [1], "loss_mask": [1]}, {"mask": "labels"}, UsageError, "mask='labels': .* no such column"),
        ({"input_ids": [99_999], "labels": [-100]}, {}, TokenizerError, "rows.jsonl:1: the id 99999 is not one of"),
        ({"input_ids": [86, 75, 79, 71, 85], "labels": [-100] * 5}, {}, TokenizerError, "re-encode to different ids"),
        ({"input_ids": 5}, {}, SourceError, "the column 'input_ids' is int64, not a list per row"),
        ({"input_ids": [1]}, {"tokeniser": "x"}, UsageError, "unknown option 'tokeniser'. Did you mean 'tokenizer'"),
        (
            {"input_ids": [1]},
            {"check_tokenizer": "no"},
            UsageError,
            "check_tokenizer='no' is unknown. Use one of: error",
        ),
    ],
)
def test_errors(
    tokenizer: Path, place: Path, line: Any, options: dict[str, Any], kind: type[PenstockError], text: str
) -> None:
    (place / "rows.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(kind, match=text):
        ps.adopt(place / "rows.jsonl", tokenizer=tokenizer, cache=place / "cache", **options)
    assert not list(place.glob("cache/datasets/*"))


def test_missing_or_empty_source(tokenizer: Path, place: Path) -> None:
    for name, text in (("nowhere", "does not exist"), (".", "contains nothing to adopt")):
        with pytest.raises(SourceError, match=text):
            ps.adopt(place / name, tokenizer=tokenizer, cache=place / "cache")


def test_olmo_files_with_another_dtype(dataset: ps.Dataset, tokenizer: Path, place: Path) -> None:
    dataset.view().export("olmo", place / "out")
    with pytest.raises(SourceError, match="have a different type, pass it with dtype="):
        ps.adopt(place / "out", tokenizer=tokenizer, cache=place / "cache", dtype="uint32")
    (place / "out" / "penstock.json").unlink()  # as other tools write it
    assert len(ps.adopt(place / "out", tokenizer=tokenizer, cache=place / "cache")) == 400


def test_prepended_spaces_and_truncation_are_no_reason_to_doubt_a_tokenizer(place: Path) -> None:
    """Llama 2 and Mistral prepend a space to a text and after added tokens; some files carry truncation and padding."""
    model = Tokenizer.from_str(bpe(normalizers.Sequence([normalizers.Prepend("▁"), SPACES])).decode())
    texts = ["<s>Hello there</s>how are you?</s>", "don't you see 1234 things</s>Hello</s>"]
    lines = [{"input_ids": (ids := model.encode(text).ids), "loss_mask": [1] * len(ids)} for text in texts]
    (place / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model.enable_truncation(4)
    model.enable_padding(length=40)
    model.save(str(place / "tokenizer.json"))
    adopted = ps.adopt(place / "rows.jsonl", tokenizer=place / "tokenizer.json", cache=place / "cache")
    assert [item.input_ids.tolist() for item in adopted.view(train_on="customized")] == [
        line["input_ids"] for line in lines
    ]
