"""Decompression bombs and long rows: memory stays bounded, and the other rows are prepared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import EncoderPanic, RowError, SourceError
from penstock.prepare.encode import encoder as encoders
from penstock.prepare.encode.encoder import PIECE_BYTES, Encoder
from penstock.prepare.sources import parquet
from penstock.prepare.sources.arrow import batch_header, unpacked_size
from penstock.prepare.sources.discover import discover
from penstock.prepare.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

CHILD = """
import dataclasses, json, resource, sys
import penstock as ps
source, options = sys.argv[1], json.loads(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ds = ps.prepare(source, on_bad_row="quarantine", workers=1, **options)
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([dataclasses.asdict(ds.ledger), more // 1000]))
"""


def prepared(source: Path, **options: Any) -> tuple[dict[str, Any], int]:
    """Builds in a new process; returns the ledger and the growth of the process in megabytes."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), json.dumps({k: str(v) for k, v in options.items()})],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=True,
    )
    ledger, grown = json.loads(child.stdout.splitlines()[-1])
    return ledger, grown


def repeated(text: str, count: int, *more: str) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays([0] * count + list(range(1, 1 + len(more))), [text, *more])


def test_rows_over_the_limit_are_never_decoded(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": repeated("x" * 40_000_000, 20, "a", "b")}), source, compression="zstd")
    assert source.stat().st_size < 10_000
    ledger, grown = prepared(source, tokenizer=tokenizer, cache=tmp_path / "c")
    assert ledger["kept"] == 2 and ledger["rejected"] == {"row_too_large": 20}
    assert grown < 400  # the dictionary is in memory twice: encoded and decoded


def test_unused_columns_are_not_read(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["a"] * 20, "blob": repeated("x" * 40_000_000, 20)}), source, compression="zstd")
    ledger, grown = prepared(source, tokenizer=tokenizer, cache=tmp_path / "c", max_row_bytes=1000)
    assert ledger["kept"] == 20
    assert grown < 150


def test_rows_of_lists_are_measured_before_they_are_decoded(tmp_path: Path, tokenizer: Path) -> None:
    turns = [{"role": "user", "content": "x" * 20_000}, {"role": "assistant", "content": "y"}]
    table = pa.table({"messages": [turns * n for n in (1, 100, 2)]})
    pq.write_table(table, tmp_path / "a.parquet")
    ds = ps.prepare(
        tmp_path / "a.parquet",
        tokenizer=tokenizer,
        cache=tmp_path / "c",
        max_row_bytes=100_000,
        on_bad_row="quarantine",
    )
    assert ds.ledger.rejected == {"row_too_large": 1} and len(ds) == 2


def test_a_column_that_decompresses_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_UNPACKED_BYTES", 1 << 20)
    pq.write_table(pa.table({"text": ["x" * 4_000_000]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(SourceError, match=r"a\.parquet: text in row group 0 unpacks from .* to 4,000,052 bytes"):
        discover([tmp_path / "a.parquet"]).peek()


def test_strings_that_share_prefixes_are_decoded_a_few_at_a_time(tmp_path: Path, tokenizer: Path) -> None:
    table = pa.table({"text": ["x" * 500_000] * 600 + ["a", "b"]})
    encoding = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", **encoding)
    assert (tmp_path / "bomb.parquet").stat().st_size < 20_000
    options = {"tokenizer": tokenizer, "cache": tmp_path / "c", "max_row_bytes": 100_000}
    ledger, grown = prepared(tmp_path / "bomb.parquet", **options)
    assert ledger["kept"] == 2 and ledger["rejected"] == {"row_too_large": 600}
    assert grown < 200


def write_arrow(path: Path, table: pa.Table, compression: str | None = "zstd", rows: int | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table, rows)


def test_a_batch_that_decompresses_to_too_much_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    table = pa.table({"text": ["x" * 40_000_000] * 10})
    write_arrow(tmp_path / "bomb.arrow", table)
    with pytest.raises(SourceError, match=r"batch unpacks from .* to 400,\d+,\d+ bytes. Write .* smaller record"):
        ps.prepare(tmp_path / "bomb.arrow", tokenizer=tokenizer, cache=tmp_path / "c")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_equal_uncompressed_ones(tmp_path: Path, tokenizer: Path, compression: str) -> None:
    rows = [{"text": f"{'word ' * n}{n}", "blob": b"x" * n, "n": n or None} for n in range(300)]
    for name, codec in (("plain", None), ("packed", compression)):
        write_arrow(tmp_path / f"{name}.arrow", pa.Table.from_pylist(rows), codec, rows=40)
    sources = [tmp_path / "plain.arrow", tmp_path / "packed.arrow"]
    plain, packed = (ps.prepare(source, tokenizer=tokenizer, cache=tmp_path / "c").view() for source in sources)
    assert [item.input_ids.tolist() for item in packed] == [item.input_ids.tolist() for item in plain]


def test_sizes_in_the_header_of_an_arrow_message(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 100_000, None], "numbers": [[1, 2], []]})
    write_arrow(tmp_path / "a.arrow", table)
    with pa.memory_map(str(tmp_path / "a.arrow")) as file:
        schema = pa.ipc.read_message(file)
        message = pa.ipc.read_message(file)
    batch = pa.ipc.read_record_batch(message, table.schema)
    assert batch_header(message).rows == 2 and batch_header(message).compressed
    assert batch.nbytes <= unpacked_size(message) < batch.nbytes + 500
    with pytest.raises(pa.ArrowInvalid, match="expected a record batch"):
        batch_header(schema)


def test_run_end_encoded_columns_are_refused(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([20], pa.int32()), pa.array(["x" * 1000]))
    write_arrow(tmp_path / "bomb.arrow", pa.table({"text": runs}))
    with pytest.raises(SourceError, match=r"arrow: column 'text' is run-end-encoded, .* Write it as a plain column"):
        discover([tmp_path / "bomb.arrow"]).peek()


def test_unread_columns_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "blob": [b"x"], 'ü"': [1]}), tmp_path / "a.parquet")
    rows = discover([tmp_path / "a.parquet"]).peek(columns=frozenset(["text"]))
    assert [json.loads(row) for row in rows] == [{"text": "a", "blob": True, 'ü"': True}]
    rows = discover([tmp_path / "a.parquet"]).peek(columns=frozenset(["no"]))
    assert [json.loads(row) for row in rows] == [{"text": True, "blob": True, 'ü"': True}]


def test_a_first_row_over_the_limit_is_skipped_by_detection(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    source = write_rows([{"unlike": "x" * 5000}, good])
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path / "c", "on_bad_row": "quarantine"}
    assert len(ps.prepare(source, max_row_bytes=1000, **options)) == 1
    with pytest.raises(SourceError, match="no rows of up to 10 bytes"):
        ps.prepare(source, max_row_bytes=10, **options)


# -- long texts ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tokenizer: Path) -> Encoder:
    data = (tokenizer / "tokenizer.json").read_bytes()
    return Encoder(data, Vocabulary(data), fast=False)


def test_long_texts_are_encoded_in_pieces_to_the_same_tokens(encoder: Encoder) -> None:
    text = ("Well, it's 5 o'clock  somewhere\n\n — привет мир, 中文，中文 。한국어 é . " * 9000).encode()
    assert len(text) > 2 * PIECE_BYTES
    pieces = encoder.pieces(text)
    assert b"".join(pieces) == text
    assert PIECE_BYTES < max(map(len, pieces)) < PIECE_BYTES + 100
    whole = encoder._by_reference([text])[0]
    assert encoder.reference([text, b"x", text]).ids.tolist() == [*whole, *encoder._by_reference([b"x"])[0], *whole]


def test_memory_of_a_long_row_is_bounded(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "some words " * 700_000}, {"role": "assistant", "content": "a"}]
    ledger, grown = prepared(write_rows([{"messages": turns}]), tokenizer=tokenizer, cache=tmp_path / "c")
    assert ledger["kept"] == 1
    assert grown < 100 + 40 * 7.7  # megabytes; 190 times its bytes were needed once


@pytest.mark.parametrize("text", ["x" * 4_100_000, " " * 4_100_000, "<|im_end|>" + "é" * 2_100_000])
def test_long_text_without_a_safe_cut_is_refused(text: str, write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": "a"}]} for c in ("q", text)]
    for fast in (True, False):
        with pytest.raises(RowError, match=r"rows\.jsonl:2: 4,\d+,\d+ bytes of the text have no place where") as caught:
            ps.prepare(write_rows(rows), tokenizer=tokenizer, cache=tmp_path / str(fast), fast=fast)
        assert caught.value.kind == "unbroken_text"
    with pytest.raises(RowError, match=r"rows\.jsonl:2: "):
        ps.prepare(write_rows([{"text": "a"}, {"text": text}]), tokenizer=tokenizer, cache=tmp_path / "plain")


def test_a_panic_rejects_only_its_row(
    write_rows: Any, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oniguruma gives up on a run of 12 million spaces, and tokenizers panics."""
    monkeypatch.setattr(encoders, "MAX_PIECE_BYTES", 20_000_000)
    bare = json.loads((tokenizer / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": r"\s+(?!\S)|\s+|\S+"}, "behavior": "Isolated", "invert": False}
    bare["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bare["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(bare))
    source = write_rows([{"text": "a b"}, {"text": " " * 12_000_000 + "x"}, {"text": "c"}])
    options: dict[str, Any] = {"tokenizer": tmp_path / "tokenizer.json", "cache": tmp_path / "c", "workers": 1}
    ds = ps.prepare(source, on_bad_row="quarantine", fast=False, **options)
    assert len(ds) == 2 and ds.ledger.rejected == {"encoder_panic": 1}
    with pytest.raises(RowError, match=r"rows\.jsonl:2: tokenizers panics: Onig: Regex search error"):
        ps.prepare(source, fast=False, **options)


def test_a_panic_of_the_fast_engine_falls_back_to_the_reference(encoder: Encoder, tokenizer: Path) -> None:
    data = (tokenizer / "tokenizer.json").read_bytes()
    fast = Encoder(data, Vocabulary(data))
    assert fast._start_fast() == ""

    class PanicException(BaseException):
        """Stands in for pyo3's exception, which can't be imported."""

    class Broken:
        name = "gigatoken 1.0"
        checks_texts = False

        def encode(self, texts: list[bytes]) -> tuple[Any, Any]:
            raise PanicException("index out of bounds")

        def clear_cache(self) -> None:
            pass

    fast._fast = Broken()
    encoded = fast.encode([b"Hello, world!"])
    assert encoded.ids.tolist() == encoder.reference([b"Hello, world!"]).ids.tolist()
    assert encoded.fallbacks == {"gigatoken 1.0 panics: index out of bounds": 1}
    fast._reference = None
    with pytest.raises(AttributeError):
        fast.encode([b"Hello"])
    assert EncoderPanic("x").args == ("x",)
