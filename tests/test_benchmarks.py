"""The benchmarks' own logic: data without usable rows is an error, and tables come from the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grow import grow, grown, material
from benchmarks.prepare import write_tables


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


def test_tables_are_written_between_their_marks(tmp_path: Path) -> None:
    saved, page = tmp_path / "grid.json", tmp_path / "page.md"
    saved.write_text(json.dumps({"models": {"qwen3": figures(40), "gpt_oss": figures(30), "t5": figures(9)}}))
    page.write_text("a\n<!-- grid -->\nold\n<!-- end of grid -->\nb\n<!-- extremes -->\n<!-- end of extremes -->\n")
    for _ in range(2):
        write_tables([saved], [page])
        lines = page.read_text().splitlines()
        assert lines[0] == "a"
        assert "old" not in lines
        assert [line.split(" |")[0] for line in lines if line.endswith("20 of 20 |")] == [
            "| t5",
            "| gpt_oss",
            "| qwen3",
        ]
        assert "| × transformers | byte-level BPE | 30.0 (gpt_oss) | 40.0 (qwen3) |" in lines
        assert "| × transformers | SentencePiece and others | 9.0 (t5) | 9.0 (t5) |" in lines
