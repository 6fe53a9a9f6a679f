"""Errors of an export state the remedy, and nothing is written."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError, RegionsUnknown, StoreError, UsageError, ViewError
from penstock.exchange import export as exporter
from penstock.exchange import rows as export_rows
from penstock.exchange.export import export
from penstock.exchange.format import find_format
from penstock.exchange.formats import format_names
from penstock.prepare.chat.conversation import Part, Role
from tests.support.feed_data import pair_view, view
from tests.support.forks import Forks
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import answer, chat

pytestmark = pytest.mark.slow

UNKNOWN = [Piece(-1, Role.NONE, Part.GLUE, (1, 2, 3))]


def refused(kind: type[PenstockError], text: str, place: Path, served: Any, to: str, **options: Any) -> None:
    before = sorted(place.rglob("*"))
    with pytest.raises(kind, match=text):
        export(served, to, place / "out", **options)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("to", "options", "text"),
    [
        ("olmoo", {}, "no such format. Did you mean 'olmo'\\? Available: axolotl, hf"),
        ("../olmo", {}, "no such format"),
        ("olmo", {"capacity": 128}, "does not support packed rows: its trainer packs. Omit capacity"),
        ("olmo", {}, "loss weights other than 0 and 1, and olmo only supports a mask. Use hf, .* or weights='mask'"),
        ("hf", {"weights": "maybe"}, "weights='maybe' is unknown. Use one of: error, mask"),
        ("hf", {"part_tokens": 0}, "part_tokens=0 is not possible. Use an integer of 1 or more"),
        ("hf", {"workers": -1}, "workers=-1 is not possible. Use an integer of 1 or more"),
        ("hf", {"capacity": 20}, "more than capacity=20, and packing never splits a row"),
    ],
)
def test_invalid_options(tmp_path: Path, to: str, options: dict[str, Any], text: str) -> None:
    refused(UsageError, text, tmp_path, view(9), to, **options)


@pytest.mark.parametrize("to", format_names())
def test_fractional_weights_of_parts(tmp_path: Path, to: str) -> None:
    rows = [[Piece(0, Role.USER, Part.BODY, (1,)), *answer(1)]] * 2
    served = MemoryDataset.of(rows).view(part_weights={"reasoning": 0.5})
    if find_format(to).supports.weights:
        assert to in ("hf", "jsonl", "parquet")
        export(served, to, tmp_path / "out")
    else:
        refused(UsageError, f"some tokens have loss weights .*, and {to} only supports a mask", tmp_path, served, to)


@pytest.mark.parametrize("to", ["olmo", "megatron", "axolotl", "skyrl", "skyrl_cache", "verl", "torchtune", "nemo"])
def test_format_without_pairs(tmp_path: Path, to: str) -> None:
    refused(UsageError, f"--to {to} does not support preference pairs. Use trl, hf", tmp_path, pair_view(), to)


def test_packed_pairs(tmp_path: Path) -> None:
    refused(UsageError, "pairs can't be packed. Omit capacity", tmp_path, pair_view(), "trl", capacity=500)


def test_rows_without_a_prediction_for_skyrl(tmp_path: Path) -> None:
    rows = MemoryDataset.of([chat((Role.ASSISTANT, 1)), chat((Role.USER, 2), (Role.ASSISTANT, 3))])
    text = "2 rows have a single token, .* SkyRL requires at least one prediction per row. Raise max_length"
    for to in ("skyrl", "skyrl_cache"):
        refused(UsageError, text, tmp_path, rows.view(train_on="all_tokens", max_length=1), to)


def test_pairs_with_untrained_tokens_for_trl(tmp_path: Path) -> None:
    sides = [
        chat((Role.USER, 2), (Role.ASSISTANT, 2), (Role.USER, 2), (Role.ASSISTANT, 2), first_id=first)
        for first in (10, 40)
    ]
    pairs = MemoryDataset.of([*sides, *sides], pairs=True)
    text = "2 of 2 pairs have untrained tokens inside an answer, and TRL's DPO scores every .* --to hf"
    refused(UsageError, text, tmp_path, pairs.view(), "trl")
    export(pairs.view(), "hf", tmp_path / "out")


def test_unknown_regions(tmp_path: Path, forks: Forks, dataset: ps.Dataset) -> None:
    examples = MemoryDataset.of([chat((Role.USER, 2), (Role.ASSISTANT, 2)), UNKNOWN])
    with pytest.raises(RegionsUnknown, match="regions_unknown='drop', or use train_on='all_tokens'"):
        export(examples.view(), "olmo", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export(examples.view(regions_unknown="drop"), "olmo", tmp_path / "out")


def test_empty_view(tmp_path: Path) -> None:
    examples = MemoryDataset.of([chat((Role.USER, 2))])
    refused(ViewError, "nothing to export. See its ledger", tmp_path, examples.view(), "hf")


def test_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused(UsageError, "out contains files but no finished export", tmp_path, view(9), "hf")
    (tmp_path / "out" / "notes.txt").unlink()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    refused(
        UsageError, "out.partial is needed for the unfinished export but contains other files", tmp_path, view(9), "hf"
    )
    (tmp_path / "out.partial" / "notes.txt").unlink()
    export(view(9), "hf", tmp_path / "out")  # empty folders are fine


def test_folder_with_a_different_export(tmp_path: Path) -> None:
    export(view(9), "hf", tmp_path / "out")
    wrong = "out holds a different export"
    refused(UsageError, rf"{wrong} \(to: 'hf' there, 'parquet' here", tmp_path, view(9), "parquet")
    refused(UsageError, rf"{wrong} \(views.0.max_length: 64 there, 30 here\)", tmp_path, view(9, max_length=30), "hf")
    refused(UsageError, rf"{wrong} \(views.0.dataset: 'b3-.*' there, 'b3-.*' here\)", tmp_path, view(10), "hf")
    refused(UsageError, rf"{wrong} \(capacity: None there, 64 here\)", tmp_path, view(9), "hf", capacity=64)


def test_export_with_a_different_digest(tmp_path: Path) -> None:
    export(view(9), "hf", tmp_path / "out")
    path = tmp_path / "out" / "penstock.json"
    manifest = json.loads(path.read_text())
    manifest["export"]["digest"] = "b3-0"
    path.write_text(json.dumps(manifest))
    refused(UsageError, r"out holds a different export \(digest: 'b3-0' there", tmp_path, view(9), "hf")


def test_progress_counts_unfinished_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(export_rows, "BLOCK_TOKENS", 50)
    monkeypatch.setattr(exporter, "PROGRESS_SECONDS", 0.0)
    exported = export(view(400), "jsonl", tmp_path / "out", on_progress=lambda p: seen.append((p.parts_done, p.tokens)))
    assert any(not parts and tokens > 0 for parts, tokens in seen)
    assert seen[-1] == (1, exported.progress.tokens_total)


def test_unfinished_export_of_something_else(place: Path, forks: Forks, dataset: ps.Dataset) -> None:
    command = ("export", dataset.path, "--to", "olmo", "-o", place / "out", "--part-tokens")
    assert forks.run(*command, 900, fault="record.rename:3")[0] == -9
    before = sorted(place.rglob("*"))
    code, said = forks.run(*command, 800)
    assert code == 1
    assert "out.partial holds a different export (part_tokens: 900 there, 800 here)" in said.replace("\n", " ")
    assert sorted(place.rglob("*")) == before


def test_finished_export_with_a_damaged_file(tmp_path: Path) -> None:
    export(view(9), "parquet", tmp_path / "out")
    (path,) = (tmp_path / "out" / "data").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    refused(StoreError, "its size differs from the manifest. Remove .*out and export", tmp_path, view(9), "parquet")


def test_datasets_not_installed(monkeypatch: pytest.MonkeyPatch, dataset: ps.Dataset) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="needs the datasets package. Install it with: pip install 'penstock"):
        dataset.view().to_hf()


def test_command(place: Path, forks: Forks, dataset: ps.Dataset) -> None:
    code, said = forks.run("export", dataset.path, "--to", "hf", "-o", place / "out", "--max-length", "40", "--json")
    assert code == 0, said
    answer = json.loads(said)
    assert answer["statistics"]["documents"] == len(dataset.view(max_length=40))
    assert answer["export"]["views"][0]["dataset"] == dataset.key
    assert answer["statistics"]["sources"]["chats.jsonl"]["tokens"] == answer["statistics"]["tokens"]
    code, said = forks.run("export", f"{dataset.path}@0.5", "--to", "hf", "-o", place / "half", "--json")
    assert json.loads(said)["statistics"]["documents"] == 200
    for wrong in (f"{dataset.path}@many", "--holdout=many"):
        code, said = forks.run("export", dataset.path, wrong, "--to", "hf", "-o", place / "no")
        assert code == 1
        assert "many" in said
    assert sorted(path.name for path in place.iterdir()) == ["half", "out"]


def test_lazy_dataset(dataset: ps.Dataset) -> None:
    view = dataset.view(max_length=50)
    lazy = view.to_hf()
    assert len(lazy) == len(view)
    for row, example in zip(lazy, view, strict=True):
        assert row["input_ids"].tolist() == example.input_ids.tolist()
        assert row["labels"].tolist() == example.labels.tolist()
    packed = ps.mix({"a": (view, 1.0)}).to_hf(capacity=64)
    assert sum(len(row["input_ids"]) for row in packed) == view.ledger.trained + view.ledger.masked
