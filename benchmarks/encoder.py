"""Compares the speed of the encoding stage with that of the bare engine, and measures the cost of unseen words.

    python -m benchmarks.encoder --models FOLDER … --data FILE.jsonl … [--megabytes 40] [--rounds 5] [--json FILE]

The pipeline renders synthetic data once, and its batches (4 MB of texts with their segments) are kept. Then the whole
stage (`encode_texts`: guards, ids, tokens per segment, memory checks) and the bare engine (`encode_batch` on the same
texts) alternate over the same batches, both warm. `new words` is the extra cost of a new engine's first pass. All times
are CPU time. Exits with 1 if the stage has less than 0.7 of the engine's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.grow import MATERIAL, grow_rows, material
from benchmarks.prepare import accepted
from penstock.build.options import prepare_options
from penstock.prepare import pipeline as pipeline_module
from penstock.prepare.chat.formats import detect
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.example_batch import encode_texts
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import make_recipe
from penstock.prepare.regions.segments import Segments
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.tokenizer.files import load_tokenizer

SHARE = 0.7
SLICE_ROWS = 8192
Batch = tuple[list[bytes], Segments]


def batches(model: Path, file: Path) -> tuple[Pipeline, list[Batch]]:
    """A pipeline whose encoder is warm, and the inputs of its encoding stage."""
    folder = load_tokenizer(model)
    lines = file.read_bytes().splitlines()
    options = prepare_options({"tokenizer": str(model), "dropped_tool_calls": "keep"})
    mapping = detect([json.loads(line) for line in lines[:20]], options)
    pipeline = Pipeline(make_recipe(options, mapping, folder), folder.tokenizer_json)
    kept: list[Batch] = []

    def recorded(texts: list[bytes], segments: Segments, encoder: Encoder, **how: bool) -> Any:
        kept.append((texts, segments))
        return encode_texts(texts, segments, encoder, **how)

    pipeline_module.encode_texts = recorded  # type: ignore[assignment]
    for first in range(0, len(lines), SLICE_ROWS):
        rows = lines[first : first + SLICE_ROWS]
        pipeline.run(SliceRows(rows, list(range(len(rows)))))
    pipeline_module.encode_texts = encode_texts
    return pipeline, kept


def cpu(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(model: Path, rows: Sequence[dict[str, Any]], size: int, rounds: int) -> dict[str, Any]:
    """Megabytes of text per second, of the stage and of the engine, for one model."""
    with tempfile.TemporaryDirectory() as scratch:
        kept, _ = accepted(model, rows, Path(scratch))
        file = grow_rows(kept, size, Path(scratch) / "grown.jsonl")
        pipeline, parts = batches(model, file)
    encoder, megabytes = pipeline.encoder, sum(len(text) for texts, _ in parts for text in texts) / 1e6
    engine = encoder.new_engine()

    def bare() -> None:
        for texts, _ in parts:
            engine.encode(texts)

    def stage() -> None:
        for texts, segments in parts:
            encode_texts(texts, segments, encoder)

    first = cpu(bare)
    stage()
    times = [(cpu(bare), cpu(stage)) for _ in range(rounds)]
    alone, whole = (median(column) for column in zip(*times, strict=True))
    return {
        "engine": engine.name,
        "megabytes": megabytes,
        "batches": len(parts),
        "engine_mb_s": megabytes / alone,
        "stage_mb_s": megabytes / whole,
        "share": float(np.median([a / b for a, b in times])),
        "new_words_ms_per_mb": 1000 * max(0.0, first - alone) / megabytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", type=Path, default=[MATERIAL.parent / "tokenizer"], help="folders")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    rows = material(arguments.data)
    found: dict[str, Any] = {}
    print(f"{'model':16} {'engine':>10} {'engine, MB/s':>12} {'stage, MB/s':>12} {'share':>6} {'new words, ms/MB':>16}")
    for model in arguments.models:
        one = found[model.name] = measure(model.absolute(), rows, int(arguments.megabytes * 1e6), arguments.rounds)
        print(
            f"{model.name:16} {one['engine']:>10} {one['engine_mb_s']:12.1f} {one['stage_mb_s']:12.1f}"
            f" {one['share']:6.2f} {one['new_words_ms_per_mb']:16.1f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0 if all(one["share"] >= SHARE for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
