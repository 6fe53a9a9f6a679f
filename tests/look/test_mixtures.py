"""Mixtures and labelled answers (KTO) can be looked at: statistics, report, notebook, `show`, the rows of a batch."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.look.report import report
from tests.look.conftest import chat


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> ps.Dataset:
    folder = tmp_path_factory.mktemp("other")
    rows = [chat(f"question {n}", "long " * 200 if n == 3 else "short") for n in range(6)]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ps.prepare(folder / "other.jsonl", tokenizer=tokenizer, cache=folder / "cache")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> ps.Dataset:
    folder = tmp_path_factory.mktemp("labelled")
    rows = [{"prompt": f"question {n}", "completion": "answer", "label": n != 1} for n in range(5)]
    (folder / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ps.prepare(folder / "kto.jsonl", tokenizer=tokenizer, cache=folder / "cache")


@pytest.fixture(scope="module")
def mixture(dataset: ps.Dataset, other: ps.Dataset) -> ps.Mixture:
    return ps.mix({"chat": (dataset, 1.0), "other": (other, 0.5)})


def test_statistics_of_a_mixture_are_those_of_its_members(
    mixture: ps.Mixture, dataset: ps.Dataset, other: ps.Dataset
) -> None:
    seen, parts = mixture.stats(), [dataset.view().stats(), other.view().stats()]
    for name in ("rows", "sequences", "tokens", "trained", "rows_without_trained_token"):
        assert getattr(seen, name) == sum(getattr(part, name) for part in parts), name
    assert [(member.name, member.per_epoch) for member in seen.members] == [("chat", parts[0].rows), ("other", 3)]
    assert [source.name for source in seen.sources] == ["chat", "other"]
    assert seen.ledger == mixture.ledger and json.dumps(seen.to_json())
    assert seen.longest[0].row == len(dataset) + 3  # counted over both datasets


def test_a_report_on_a_mixture_names_members(mixture: ps.Mixture) -> None:
    text = report(mixture.with_options(max_length=64))
    assert "<h1>Mixture of chat, other</h1>" in text and "other, row 3" in text and "3 of 6 items per epoch" in text


def test_rows_of_a_mixture_name_their_member(mixture: ps.Mixture, dataset: ps.Dataset) -> None:
    batch = mixture.loader(batch_size=400, prefetch=0).batch(0)
    assert [row.member for row in batch.rows] == [mixture.place(item)[0] for item in batch.items]
    assert [mixture[item].row for item in batch.items] == list(batch.rows)
    assert pickle.loads(pickle.dumps(batch)).rows == batch.rows
    assert {row.member for row in dataset.view().loader(batch_size=4, prefetch=0).batch(0).rows} == {""}


def test_notebooks_show_mixtures_and_labels(mixture: ps.Mixture, labelled: ps.Dataset) -> None:
    shown = mixture._repr_html_()
    assert shown is not None and "<b>other</b> · 6 items, 3 of them per epoch" in shown
    assert "other: row 5" in str(mixture[len(mixture) - 1]._repr_html_())
    assert "labelled as bad" in str(labelled.view()[1]._repr_html_())
    assert "4 good, 1 bad" in labelled.stats()._repr_html_()


def test_cells_are_aligned_to_the_left_whatever_the_notebook_does(mixture: ps.Mixture) -> None:
    batch = mixture.loader(batch_size=4, prefetch=0).batch(0)
    for shown in (mixture, mixture[0], batch, mixture.stats()):
        for cell in re.findall(r"<t[hd][^>]*>", str(shown._repr_html_())):
            assert 'style="text-align:left"' in cell, cell


def test_labels_are_counted_and_shown(labelled: ps.Dataset, dataset: ps.Dataset) -> None:
    assert (labelled.stats().desirable, dataset.stats().desirable) == (4, None)
    assert labelled.view().settings.train_on == "last_assistant_message"
    text = report(labelled.view())
    assert "labelled as good" in text and "labelled as bad" in text and "80%" in text
    assert pickle.loads(pickle.dumps(labelled.view()[1])).desirable is False


def test_the_commands_take_mixtures(
    dataset: ps.Dataset,
    other: ps.Dataset,
    labelled: ps.Dataset,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        output = capfd.readouterr()
        assert not ended.value.code, output.err
        return output.out

    mixed = (dataset.path, f"{other.path}@0.5")
    assert f"member {other.key[:11]}" in said("stats", *mixed)
    assert json.loads(said("stats", *mixed, "--json"))["members"][1]["per_epoch"] == 3
    assert said("show", *mixed, "--row", "410").startswith(f"{other.key[:11]}: row ")
    said("report", *mixed, "-o", tmp_path / "report.html")
    assert "Mixture of" in (tmp_path / "report.html").read_text()
    assert "4 good, 1 bad" in said("stats", labelled.path) and "labelled as bad" in said(
        "show", labelled.path, "--row", 1
    )


def test_reprs_are_short(mixture: ps.Mixture, pairs: ps.Dataset, labelled: ps.Dataset) -> None:
    batch = mixture.loader(batch_size=400, prefetch=0).batch(0)
    assert repr(mixture[0]) == (
        f"Example({len(mixture[0]):,} tokens, {mixture[0].loss_mask.sum()} trained, "  # type: ignore[union-attr, arg-type]
        "row=RowLocation(source=0, row=0, member='chat'))"
    )
    assert "desirable=False" in repr(labelled.view()[1])
    for shown in (mixture[0], pairs.view()[0], batch):
        assert len(repr(shown)) < 400 and "array" not in repr(shown)
