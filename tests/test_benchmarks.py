"""The benchmarks' own logic: data without usable rows is an error, and tables come from the figures."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.all import RESULTS
from benchmarks.grow import grow, grown, material
from benchmarks.kinds import write_kinds
from benchmarks.page import IMAGES, PAGES, charts, filled

ROOT = Path(__file__).parent.parent


def test_preference_rows_alone_can_not_be_grown(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    with pytest.raises(SystemExit, match=r"pairs\.jsonl: none of 1 rows has a `messages` column"):
        grow([file], 1000, tmp_path / "grown.jsonl")
    assert material([]) == []


def test_no_rows_can_not_be_grown() -> None:
    with pytest.raises(SystemExit, match="no rows to grow"):
        next(grown([], 1000))


def figures(times: float) -> dict[str, Any]:
    part = {
        "times_transformers": {"cpu": times},
        "share_of_gigatoken": {"cpu": times / 100},
        "megabytes_per_second": {"penstock": {"cpu": times}},
        "start_up": {"cpu": 2.0},
        "equal_rows": 10,
        "compared_rows": 10,
    }
    return {"mixed": part, "traces": part}


def test_tables_are_written_between_their_marks() -> None:
    grid = {"qwen3": figures(40), "gpt_oss": figures(30), "gemma3": figures(9)}
    results = {"benchmarks": {f"prepare {name}": {"result": {"models": {name: one}}} for name, one in grid.items()}}
    text = "a\n<!-- grid -->\nold\n<!-- end of grid -->\nb\n<!-- extremes -->\n<!-- end of extremes -->\n"
    for _ in range(2):
        text = filled(text, results)
        lines = text.splitlines()
        assert lines[0] == "a"
        assert "old" not in lines
        assert [line.split(" |")[0] for line in lines if line.endswith("20 of 20 |")] == [
            "| gemma3",
            "| gpt_oss",
            "| qwen3",
        ]
        assert "| × transformers | byte-level BPE | 30.0 (gpt_oss) | 40.0 (qwen3) |" in lines
        assert "| × transformers | SentencePiece | 9.0 (gemma3) | 9.0 (gemma3) |" in lines


def test_the_pages_are_made_of_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    for page in PAGES:
        assert page.read_text() == filled(page.read_text(), results), "run `python -m benchmarks.page`"
    for name, drawn in charts(results).items():
        assert (IMAGES / name).read_text() == drawn, "run `python -m benchmarks.page`"


def test_data_of_three_kinds_is_the_same_every_time(tmp_path: Path) -> None:
    first, again = (write_kinds(tmp_path / name, 50_000) for name in "ab")
    assert {name: file.read_bytes() for name, file in first.items()} == {
        name: file.read_bytes() for name, file in again.items()
    }
    assert '"tool_calls"' in first["traces"].read_text()


@pytest.mark.parametrize("package", ["benchmarks", "tools"])
def test_every_program_can_be_imported(package: str) -> None:
    for path in sorted((ROOT / package).glob("*.py")):
        importlib.import_module(f"{package}.{path.stem}")
