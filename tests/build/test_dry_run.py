"""`prepare --dry-run` and `ps.estimate`: predictions from a sample, against what `prepare` does."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.build import estimate
from penstock.build.estimate import MEMO_BYTES
from penstock.objects import open_object_store
from penstock.prepare.sources import chunks
from tests.support.command import run
from tests.support.object_servers import Proxy

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOKENIZER = str(ROOT / "examples/tokenizer")


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations that get longer, so that the beginning does not stand for the end."""
    choose = random.Random(seed)
    words = ["water", "turbine", "größe", "灯", "x = 1;", "  "]
    return [
        {
            "messages": [
                {"role": "user", "content": " ".join(choose.choices(words, k=5 + 60 * n // count))},
                {"role": "assistant", "content": " ".join(choose.choices(words, k=5 + 90 * n // count))},
            ]
        }
        for n in range(count)
    ]


def as_lines(found: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, found)) + "\n")
    return file


def as_gzip(found: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(as_lines(found, folder).read_bytes()))
    return file


def as_array(found: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "rows.json"
    file.write_text(json.dumps(found, indent=1))
    return file


def as_parquet(found: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(found), file, row_group_size=500)
    return file


FORMS = [as_lines, as_gzip, as_array, as_parquet]


@pytest.mark.parametrize("form", FORMS)
def test_everything_small_is_counted(form: Callable[..., Path], tmp_path: Path) -> None:
    source, cache = form(rows(300), tmp_path), tmp_path / "cache"
    found = ps.estimate(source, tokenizer=TOKENIZER, cache=cache)
    dataset = ps.prepare(source, tokenizer=TOKENIZER, cache=cache)
    assert (found.rows, found.tokens) == (300, dataset.tokens)
    assert found.trained == dataset.stats().trained
    assert found.error == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_predicts_uneven_data(
    form: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "SAMPLE_BYTES", 1_500_000)
    monkeypatch.setattr(estimate, "BLOCK_BYTES", 10_000)
    source, cache = form(rows(6000), tmp_path), tmp_path / "cache"
    found = ps.estimate(source, tokenizer=TOKENIZER, cache=cache)
    dataset = ps.prepare(source, tokenizer=TOKENIZER, cache=cache)
    assert found.sampled_rows < 3000
    assert found.rows == pytest.approx(6000, rel=0.1)
    assert found.tokens == pytest.approx(dataset.tokens, rel=0.1)
    disk = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert found.disk_bytes == pytest.approx(disk, rel=0.1)


def test_compressed_files_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "SAMPLE_BYTES", 500_000)
    monkeypatch.setattr(estimate, "CUT_BYTES", 1_500_000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4096)
    even = rows(1000)
    random.Random(1).shuffle(even)
    source = as_gzip([*even] * 20, tmp_path)
    found = ps.estimate(source, tokenizer=TOKENIZER, cache=tmp_path / "cache")
    assert found.rows == pytest.approx(20_000, rel=0.1)


def test_rejected_rows_are_counted(tmp_path: Path) -> None:
    source = as_lines(rows(50), tmp_path)
    source.write_text(source.read_text() + '{"messages": \n{"messages": "none"}\n')
    found = ps.estimate(source, tokenizer=TOKENIZER, cache=tmp_path / "cache")
    assert (found.rows, found.rejected) == (52, 2)
    assert sum(found.rejected_kinds.values()) == 2


def test_splits_and_limits_select_the_rows(tmp_path: Path) -> None:
    source = as_lines(rows(100), tmp_path)
    for options, count in (({"split": "train[:10%]"}, 10), ({"limit": 7}, 7), ({"split": "train[-5:]"}, 5)):
        assert ps.estimate(source, tokenizer=TOKENIZER, cache=tmp_path / "cache", **options).rows == count


def test_hits_are_told_and_nothing_is_built(tmp_path: Path) -> None:
    source, cache = as_lines(rows(100), tmp_path), tmp_path / "cache"
    first = ps.estimate(source, tokenizer=TOKENIZER, cache=cache)
    assert first.slices is None
    assert not [*cache.glob("shards/*/*"), *cache.glob("datasets/*")]
    ps.prepare(source, tokenizer=TOKENIZER, cache=cache)
    ps.prepare(source, tokenizer=TOKENIZER, cache=cache)
    again = ps.estimate(source, tokenizer=TOKENIZER, cache=cache)
    assert (again.slices, again.slices_found) in ((1, 1), (None, 0))  # the plan of a very new file is not kept
    assert ps.estimate(source, tokenizer=TOKENIZER, cache=cache, force=True).slices_found == 0


def test_more_workers_and_nodes_take_less_time(tmp_path: Path) -> None:
    source = as_lines(rows(3000), tmp_path)
    one = ps.estimate(source, tokenizer=TOKENIZER, cache=tmp_path / "cache", workers=1)
    many = ps.estimate(source, tokenizer=TOKENIZER, cache=tmp_path / "cache", workers=64, nodes=4)
    assert (many.workers, many.nodes) == (64, 4)
    assert many.memory_bytes > 32 * one.memory_bytes


def test_the_command_prints_the_prediction(tmp_path: Path) -> None:
    source = as_lines(rows(40), tmp_path)
    command = ["prepare", source, "--tokenizer", TOKENIZER, "--cache", tmp_path / "cache", "--dry-run"]
    text = run(*command).stdout
    assert "rows" in text and "tokens" in text and "in the cache" in text
    found = json.loads(run(*command, "--json").stdout)
    assert found["rows"] == 40


@pytest.mark.parametrize("form", [as_lines, as_gzip, as_parquet])
def test_sources_by_url_are_sampled_too(form: Callable[..., Path], tmp_path: Path, s3: Proxy) -> None:
    source = form(rows(300), tmp_path)
    url = f"s3://{s3.bucket}/{source.name}"
    open_object_store(url)[0].put(source.name, source.read_bytes())
    found = ps.estimate(url, tokenizer=TOKENIZER, cache=tmp_path / "cache")
    local = ps.estimate(source, tokenizer=TOKENIZER, cache=tmp_path / "cache")
    assert (found.rows, found.tokens) == (local.rows, local.tokens) == (300, local.tokens)


def test_many_small_files_cost_what_they_cost(tmp_path: Path) -> None:
    """Each compressed file is a slice: the disk is mostly that of shards and plans, whatever the rows are."""
    folder, plain = tmp_path / "many", tmp_path / "plain"
    folder.mkdir()
    plain.mkdir()
    for number, row in enumerate(rows(400)):
        text = json.dumps(row).encode() + b"\n"
        (folder / f"{number:04}.jsonl.gz").write_bytes(gzip.compress(text))
        (plain / f"{number:04}.jsonl").write_bytes(text)
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "cache": tmp_path / "cache", "fast": False}
    found = ps.estimate(folder, **options)
    ps.prepare(folder, **options)
    built = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert 0.8 < found.disk_bytes / (built + 400 * MEMO_BYTES) < 1.25  # the files are too young for plans
    one = ps.estimate(as_lines(rows(400), tmp_path), **options)
    assert found.disk_bytes > 3 * one.disk_bytes
    assert ps.estimate(plain, **options).disk_bytes < 1.1 * one.disk_bytes  # joined
