"""Statistics compared with numbers counted by hand and with the ledger."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import penstock as ps
from penstock.cli import app
from penstock.look.packing_fill import Fill, Limit
from penstock.look.statistics import Bin, Copies, Flagged, Named, SourceCounts, Spread, stats
from penstock.look.terminal import stats_table
from penstock.prepare.chat.conversation import Part, Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import answer, chat, pairs, rows

SHORT = chat((Role.USER, 3), (Role.ASSISTANT, 2))  # 3 + 2 + 2 + 1 + 1 = 9
LONG = chat((Role.SYSTEM, 4), (Role.USER, 6), (Role.ASSISTANT, 16))  # 30
SILENT = chat((Role.USER, 2))
UNKNOWN = [Piece(-1, Role.NONE, Part.GLUE, (1, 2, 3, 4))]
DATASET = MemoryDataset.of([SHORT, LONG, SHORT, SILENT, UNKNOWN], shard_rows=2)


def test_all_rows_of_a_dataset_are_counted() -> None:
    seen = stats(DATASET)
    assert (seen.rows, seen.sequences, seen.tokens, seen.trained) == (5, 5, 54, 23)
    assert seen.trained_share == 23 / 54
    assert seen.lengths == Spread(10.8, 9, 30, 30, 30)
    assert seen.messages == Spread(2.0, 2, 3, 3, 3)
    assert seen.histogram == (Bin(2, 4, 1), Bin(4, 8, 1), Bin(8, 16, 2), Bin(16, 32, 1))
    assert seen.tokens_by_role == {"none": 4, "system": 4, "user": 14, "assistant": 32}
    assert seen.trained_by_role == {"assistant": 23}
    assert seen.message_histogram == (Bin(0, 1, 0), Bin(1, 2, 1), Bin(2, 3, 2), Bin(3, 4, 1))
    assert (seen.rows_without_trained_token, seen.rows_with_unknown_regions, seen.duplicate_rows) == (1, 1, 1)
    assert seen.copies == (Copies(row=0, copies=2),)
    assert seen.longest[0] == Named(row=1, tokens=30, trained=17)
    assert [named.row for named in seen.emptiest[:2]] == [3, 4]
    assert seen.flags == {"nothing_trained": Flagged(2, (3, 4)), "regions_unknown": Flagged(1, (4,))}
    assert seen.sources == (SourceCounts(0, "source 0", 5, 54, 23),)
    assert seen.limits[0] == Limit(32, 0, 0, 0.0)
    assert seen.packing[0] == Fill(32, 2, 54, 1 - 54 / 64, 0)


def test_tokens_are_counted_by_part() -> None:
    view = MemoryDataset.of([answer(0), SHORT]).view(parts="body", part_weights={"body": 0.5})
    seen = stats(view)
    assert seen.ledger.by_part["reasoning_markup"] == (4, 4)
    assert (seen.ledger.by_part["body"], seen.ledger.by_part["stop"]) == ((5, 2), (3, 0))
    assert sum(tokens for tokens, _ in seen.ledger.by_part.values()) == seen.tokens
    assert sum(trained for _, trained in seen.ledger.by_part.values()) == seen.trained
    assert "no_stop" not in seen.flags, "it is left out on purpose"
    with Console(width=100, file=io.StringIO(), record=True) as console:
        console.print(stats_table(seen))
    assert re.search(r"call_arguments +2 of 2 \(100.0%\)", console.export_text())
    assert "<td" in seen._repr_html_() and "call_arguments" in seen._repr_html_()


def test_rows_with_problems_are_flagged() -> None:
    bare = [Piece(0, Role.USER, Part.BODY, (1, 2)), Piece(1, Role.ASSISTANT, Part.BODY, (3, 4, 5))]
    dataset = MemoryDataset.of([SHORT, bare, LONG], shard_rows=2)
    assert stats(dataset).flags == {"no_stop": Flagged(1, (1,))}
    cut = stats(dataset.view(max_length=14)).flags
    assert cut == {"no_stop": Flagged(1, (1,)), "cut_answer": Flagged(1, (2,))}
    assert "cut_answer" not in stats(dataset.view(max_length=14, overlong="split")).flags
    assert stats(dataset.view(max_length=4)).flags["cut_answer"].first == (1,)


def test_a_view_is_counted_as_it_serves() -> None:
    seen = stats(DATASET.view(max_length=14, regions_unknown="drop"))
    assert (seen.rows, seen.tokens, seen.trained) == (3, 9 + 14 + 9, 3 + 2 + 3)
    assert seen.tokens_by_role == {"system": 4, "user": 12, "assistant": 16}
    assert (seen.rows_without_trained_token, seen.rows_with_unknown_regions, seen.duplicate_rows) == (1, 1, 1)
    split = stats(DATASET.view(max_length=10, overlong="split", regions_unknown="drop"))
    assert (split.rows, split.sequences) == (3, 4)


@settings(max_examples=30, deadline=None)
@given(singles=st.lists(rows(), max_size=6), paired=st.lists(pairs(), max_size=4), limit=st.integers(1, 12))
def test_statistics_agree_with_the_ledger(
    singles: list[list[Piece]], paired: list[list[list[Piece]]], limit: int
) -> None:
    flat = [side for pair in paired for side in pair]
    for dataset in (MemoryDataset.of(singles, shard_rows=2), MemoryDataset.of(flat, shard_rows=2, pairs=True)):
        view = dataset.view(max_length=limit, regions_unknown="drop")
        seen = stats(view)
        assert (seen.rows, seen.tokens) == (view.ledger.kept, view.ledger.trained + view.ledger.masked)
        assert sum(seen.tokens_by_role.values()) == seen.tokens
        assert sum(seen.trained_by_role.values()) == sum(source.trained for source in seen.sources) == seen.trained
        assert sum(source.rows for source in seen.sources) == seen.rows
        assert seen.ledger.adds_up
        for histogram in (seen.histogram, seen.fine_histogram):
            assert sum(bar.sequences for bar in histogram) == seen.sequences == view.lengths.size
        whole = stats(dataset)
        assert (whole.rows, whole.tokens) == (len(dataset), view.ledger.tokens)
        assert sum(whole.tokens_by_role.values()) == whole.tokens


def test_json_and_table() -> None:
    seen = stats(DATASET)
    plain = orjson.loads(orjson.dumps(seen.to_json()))
    assert plain["lengths"]["p99"] == 30
    assert plain["histogram"][0] == {"low": 2, "high": 4, "sequences": 1}
    out = io.StringIO()
    Console(file=out, width=120).print(stats_table(seen))
    text = out.getvalue()
    assert "23 (42.6%)" in text and "mean 10.8 · p50 9 · p90 30 · p99 30 · max 30" in text
    assert "8 to 15" in text and "█" * 40 in text


def test_an_empty_dataset_has_statistics() -> None:
    seen = stats(MemoryDataset.of([]))
    assert (seen.rows, seen.tokens, seen.trained_share, seen.histogram) == (0, 0, 0.0, ())
    Console(file=io.StringIO()).print(stats_table(seen))


REASONED = [
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
        {"role": "user", "content": "3 + 3?"},
        {"role": "assistant", "content": "6", "reasoning_content": "three and three"},
    ]
] * 3


@pytest.mark.parametrize("turns", ["conversation", "faithful"])
def test_stats_show_both_modes_of_turns(tokenizer: Path, tmp_path: Path, turns: str) -> None:
    from tests.support.faithful_chats import QWEN

    (tmp_path / "template.jinja").write_text(QWEN)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in REASONED))
    options = {"tokenizer": str(tokenizer), "template": str(tmp_path / "template.jinja"), "workers": "1"}
    found = {
        mode: ps.prepare(source, cache=tmp_path / "cache", turns=mode, **options)
        for mode in ("conversation", "faithful")
    }
    command = ["stats", str(found[turns].path)]
    counted = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["turns"]
    assert counted["rows"] == 3
    for mode, ds in found.items():
        stored = sum(int(ds.shards.columns(shard).id_offsets[-1]) for shard in range(len(ds.shards)))
        trained = ds.view().ledger.trained
        assert counted[mode] == {"examples": ds.shards.total, "tokens": ds.tokens, "stored": stored, "trained": trained}
    assert counted["faithful"]["trained"] > counted["conversation"]["trained"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "120"}).stdout
    assert "--turns, on the first 3 rows" in shown and f"{counted['faithful']['trained']:,}" in shown
    source.unlink()
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "are not compared" in shown.output and "on the first" not in shown.output


def test_stats_of_rows_without_reasoning_compare_nothing(tokenizer: Path, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": [{k: m[k] for k in ("role", "content")} for m in REASONED[0]]}) + "\n")
    ds = ps.prepare(source, tokenizer=str(tokenizer), cache=tmp_path / "cache", workers="1")
    assert json.loads(CliRunner().invoke(app, ["stats", str(ds.path), "--json"]).stdout)["turns"] is None
