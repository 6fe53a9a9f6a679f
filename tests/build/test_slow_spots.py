"""Unusual input that is cheap to write is cheap to read. Limits CPU time, with a margin for slow machines."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock as ps
from penstock.prepare.check import LONG_ROW, SHORT_BYTES, shortened
from penstock.prepare.sources.discover import discover
from penstock.prepare.sources.reading import read_rows
from tests.support.command import run

ROW = b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'


@contextmanager
def within(seconds: float) -> Iterator[None]:
    before = time.process_time()
    yield
    assert time.process_time() - before < seconds


@pytest.mark.parametrize("blank", [b"\n", b" \r\n"])
def test_blank_lines(blank: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW + b"\n" + blank * (10_000_000 // len(blank)) + ROW)
    tracemalloc.start()
    with within(3):  # 10 once, less what tracing costs
        (part,) = discover([path]).slices()
        read = read_rows(part, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read.rows == [ROW, ROW] and read.lines == [1, 2 + 10_000_000 // len(blank)]
    assert peak < 20_000_000


def test_empty_gzip_members(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(ROW + b"\n") + gzip.compress(b"") * 300_000 + b"\0" * 1_000_000 + gzip.compress(ROW))
    with within(1.5):  # 3 once
        (part,) = discover([path]).slices()
    assert part.data is not None and part.data.rows == [ROW, ROW]


def test_many_messages_in_one_row(tmp_path: Path, tokenizer: Path) -> None:
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"w{n}"} for n in range(60_000)]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    ps.prepare(path, tokenizer=tokenizer, cache=tmp_path / "c", split="train[:1]")  # imports, probes
    with within(2.5):  # 6 once
        ps.prepare(path, tokenizer=tokenizer, cache=tmp_path / "c", force=True)


def test_many_turns_that_drop_their_reasoning(tmp_path: Path, tokenizer: Path) -> None:
    """The preview of `--turns faithful` renders every turn of its sample, so it leaves such a row out."""
    asked, path, template = {"role": "user", "content": "q"}, tmp_path / "a.jsonl", tmp_path / "t.jinja"
    turns = [
        m for n in range(3_000) for m in (asked, {"role": "assistant", "content": f"w{n}", "thinking": "Hm. " * 20})
    ]
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.thinking if loop.last }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = {"tokenizer": tokenizer, "template": template, "cache": tmp_path / "c"}
    path.write_text(json.dumps({"messages": turns[:8]}) + "\n")
    short = ps.prepare(path, **options)
    assert "on the first 1 rows" in run("stats", short.path).stdout
    with path.open("a") as file:
        file.write(json.dumps({"messages": turns}) + "\n")
    with within(3):  # 7 once
        long = ps.prepare(path, **options)
    assert long.ledger.notes["reasoning_dropped"] == 2
    assert "on the first 1 rows" in run("stats", long.path).stdout


def test_a_long_row_is_checked_by_a_short_copy() -> None:
    row = {"messages": [{"role": "user", "content": "x" * 50_000}] * 100, "n": 1.5, "x": None}
    short = shortened(json.dumps(row).encode())
    assert len(json.dumps(row)) > LONG_ROW > 2 * SHORT_BYTES > len(short) > SHORT_BYTES / 2
    found = json.loads(short)
    assert found["messages"][0] == {"role": "user", "content": "x" * 20_000} and found["n"] == 1.5
    assert shortened(b"{") == b"{"
    deep = b"[" * 900 + b"]" * 900
    assert shortened(deep) == deep
