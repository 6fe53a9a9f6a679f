"""The benchmarks' own logic: data without usable rows is an error, and tables come from the figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.all import RESULTS
from benchmarks.grow import grow, grown, material
from benchmarks.kinds import write_kinds, write_texts
from benchmarks.page import FLOORS, IMAGES, PAGES, _slowest, charts, filled
from benchmarks.page import peers as peers_table
from benchmarks.peers import Comparison
from benchmarks.prepared import PreparedRows, Stopwatch

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
        "share_of_first_pass": {"cpu": times / 100},
        "megabytes_per_second": {"penstock": {"cpu": times}},
        "start_up": {"cpu": 2.0},
        "equal_rows": 10,
        "compared_rows": 10,
    }
    return {"mixed": part, "traces": part}


def test_tables_are_written_between_their_marks() -> None:
    grid = {"qwen3": figures(40), "gpt_oss": figures(30), "gemma3": figures(9)}
    results = {"benchmarks": {f"prepare {name}": {"result": {"models": {name: one}}} for name, one in grid.items()}}
    text = "a\n<!-- extremes -->\nold\n<!-- end of extremes -->\nb\n"
    for _ in range(2):
        text = filled(text, results)
        lines = text.splitlines()
        assert lines[0] == "a"
        assert lines[-1] == "b"
        assert "old" not in lines
        assert "| × transformers | byte-level BPE | 30.0 (gpt_oss) | 40.0 (qwen3) |" in lines
        assert "| × transformers | SentencePiece | 9.0 (gemma3) | 9.0 (gemma3) |" in lines


def test_the_pages_are_made_of_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    for page in PAGES:
        assert page.read_text() == filled(page.read_text(), results), "run `python -m benchmarks.page`"
    for name, drawn in charts(results).items():
        assert (IMAGES / name).read_text() == drawn, "run `python -m benchmarks.page`"


class Letters:
    """Decodes token n to the n-th letter."""

    def decode(self, ids: Any) -> str:
        return "".join(chr(ord("a") + int(token)) for token in ids)


def rows_of(*rows: tuple[list[int], list[int]]) -> PreparedRows:
    ids, masks = ([np.asarray(row[column], kind) for row in rows] for column, kind in ((0, np.uint32), (1, np.bool_)))
    return PreparedRows(1.0, 2.0, ids, masks)


def test_differing_rows_are_counted_and_explained(tmp_path: Path) -> None:
    truth = rows_of(([0, 1, 2, 1], [0, 1, 1, 1]), ([0, 2], [0, 1]))
    structure = rows_of(([0, 1, 2, 1], [0, 0, 1, 0]), ([0, 2], [0, 1]))
    comparison = Comparison(truth, structure, Letters())
    assert comparison.differences(truth) == {"rows": 2, "other_tokens": 0, "other_masks": 0}
    found = comparison.differences(structure)
    assert (found["other_tokens"], found["other_masks"]) == (0, 1)
    assert found["why"] == (
        'does not train `"b"` after `"a"` (1 times) and `"b"` after `"c"` (1 times), which the tags cover; '
        'equals Penstock with `regions="structure"` in 1 of these 1 rows'
    )
    more = comparison.differences(rows_of(([0, 1, 2, 1], [1, 1, 1, 1]), ([0, 2], [0, 1])))
    assert more["why"] == 'also trains `"a"` at the beginning (1 times)'
    other = comparison.differences(rows_of(([0, 1, 2, 1], [0, 1, 1, 1]), ([0, 3, 3], [0, 1, 1])))
    assert (other["other_tokens"], other["other_masks"]) == (1, 1)
    assert other["why"] == "row 1 has 'dd' from token 1 on instead of 'c'"
    assert comparison.differences(rows_of(([0], [0])))["why"] == "1 row is missing"
    truth.write(tmp_path / "rows.npz")
    read = PreparedRows.read(tmp_path / "rows.npz")
    assert (read.seconds, read.cpu) == (1.0, 2.0)
    assert comparison.differences(read) == comparison.differences(truth)


def test_children_count_as_cpu_time() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass"
    with Stopwatch() as watch:
        subprocess.run([sys.executable, "-c", work], check=True)
    assert watch.cpu >= 0.2
    assert watch.seconds >= 0.2


def test_peers_that_are_left_out_are_named() -> None:
    times = dict.fromkeys(("seconds", "cpu_seconds", "penstock_is_faster", "penstock_is_faster_cpu"), 2.0)
    ran = {**times, "rows": 5, "other_tokens": 0, "other_masks": 5, "why": "trains nothing"}
    found = {"SkyRL, 1 process": ran, "SkyRL, 2 processes": ran, "Axolotl": {"left_out": "run `make exits`"}}
    lines = peers_table({"benchmarks": {"peers": {"result": found}}}).splitlines()
    assert lines[2] == "| SkyRL | 0 | 5 | 2.0, 2.0 (2.0 ×) | 2.0, 2.0 (2.0 ×) |"
    assert lines[3:] == ["", "- SkyRL: trains nothing.", "- Axolotl: run `make exits`."]
    for wall, busy in ((2.1, False), (9.0, True)):
        loop = {"transformers, 1 process": {**ran, "seconds": wall}}
        assert ("machine was busy" in peers_table({"benchmarks": {"peers": {"result": loop}}})) is busy


def test_trainers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "EXITS", tmp_path / "python")
    assert set(peers.unavailable("")) == {"Axolotl", "SkyRL", "LLaMA-Factory"}
    assert set(peers.unavailable("").values()) == {"not installed; `make exits` installs it"}
    (tmp_path / "python").touch()
    assert set(peers.unavailable("another template")) == {"LLaMA-Factory"}


@pytest.mark.slow
def test_data_of_three_kinds_is_the_same_every_time(tmp_path: Path) -> None:
    first, again = (write_kinds(tmp_path / name, 50_000) for name in "ab")
    assert {name: file.read_bytes() for name, file in first.items()} == {
        name: file.read_bytes() for name, file in again.items()
    }
    assert '"tool_calls"' in first["traces"].read_text()


@pytest.mark.slow
def test_kinds_of_text_are_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, again = (write_texts(tmp_path / name, 50_000) for name in "ab")
    assert {kind: file.read_bytes() for kind, file in first.items()} == {
        kind: file.read_bytes() for kind, file in again.items()
    }
    unusual = [kind for kind, file in first.items() if not unicodedata.is_normalized("NFC", file.read_text())]
    assert unusual == [
        "an NFD word per message", "30% of vowels decomposed", "Vietnamese, NFD", "Hindi, Marathi, Nepali",
    ]  # fmt: skip


def test_the_slowest_template_is_named() -> None:
    speeds = {"a": {"speed": 0.7}, "b": {"speed": 0.3}, "c": {"refused_rows": 9}}
    line = _slowest({"templates": speeds, "floors": {"templates": 0.4}}, *FLOORS["floor"])
    assert line == "**Templates**, 2: the slowest, b, runs at 0.30 of Qwen2.5's speed; 1 miss 0.4."


@pytest.mark.parametrize("package", ["benchmarks", "tools"])
def test_every_program_can_be_imported(package: str) -> None:
    for path in sorted((ROOT / package).glob("*.py")):
        importlib.import_module(f"{package}.{path.stem}")
