"""Measures the time of a cache hit, and the cost of opening a very large dataset.

    python -m benchmarks.cache [--rows 100000] [--shards 20000] [--json FILE]

A hit is timed in a process (median of 20) and as a command (best and median of 5). The large dataset has 20,000 shards
of a million tokens each in sparse files: open, `len` and 100 random rows in a new process, with its peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from penstock.digests import bytes_digest
from penstock.prepare.encode.columns import Columns
from penstock.store.cache import Cache
from penstock.store.manifest import Manifest, ShardTable, dataset_key, recipe_digest, shard_name
from penstock.store.shard import ShardMeta, encode_shard

ROOT = Path(__file__).parent.parent
TOKENS, EXAMPLES = 1_000_000, 1000  # in each shard of the large dataset
PROBE = """
import resource, sys, time
began = time.perf_counter()
import random
import penstock as ps
ps.open  # imports what it needs
imported = time.perf_counter()
dataset = ps.open(sys.argv[1])
count = len(dataset)
opened = time.perf_counter()
choose = random.Random(0)
total = sum(len(dataset.input_ids(choose.randrange(count))) for _ in range(100))
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(imported - began, opened - imported, done - opened, peak, count, dataset.tokens)
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--tokenizer", default=str(ROOT / "examples" / "tokenizer"))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="penstock-cache-"))
    try:
        found = {"hit": hits(work, args.rows, args.tokenizer), "large": large(work, args.shards)}
    finally:
        shutil.rmtree(work)
    text = json.dumps(found, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text)


def hits(work: Path, rows: int, tokenizer: str) -> dict[str, float]:
    """Times a hit on `rows` rows."""
    import penstock as ps

    data, cache = _rows(work / "rows.jsonl", rows), work / "cache"
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "prepare", str(data)]
    command += ["--tokenizer", tokenizer, "--cache", str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    inside, outside = [], []
    for _ in range(20):
        began = time.perf_counter()
        ps.prepare(data, tokenizer=tokenizer, cache=cache, on_miss="error")
        inside.append(time.perf_counter() - began)
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        outside.append(time.perf_counter() - began)
    return {
        "rows": rows,
        "in_process_ms": round(1000 * statistics.median(inside), 1),
        "command_s": round(statistics.median(outside), 3),
        "command_best_s": round(min(outside), 3),
    }


def large(work: Path, shards: int) -> dict[str, float]:
    """Opens a dataset of many sparse shards."""
    path = _sparse(Cache(work / "large"), shards)
    run = [sys.executable, "-c", PROBE, str(path)]
    output = subprocess.run(
        run, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True, text=True
    )
    imported, opened, read, peak, count, tokens = map(float, output.stdout.split())
    return {
        "tokens": int(tokens),
        "examples": int(count),
        "shards": shards,
        "import_s": round(imported, 3),
        "open_and_len_s": round(opened, 3),
        "hundred_rows_s": round(read, 3),
        "peak_mb": round(peak, 1),
    }


def _rows(path: Path, rows: int) -> Path:
    lines = (ROOT / "examples" / "data" / "chats.jsonl").read_text().splitlines()
    choose = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            row = json.loads(lines[number % len(lines)])
            row["messages"][0]["content"] += " ".join(str(choose.randrange(10**6)) for _ in range(60))
            file.write(json.dumps(row) + "\n")
    past = time.time() - 60
    os.utime(path, (past, past))
    time.sleep(0.1)
    return path


def _sparse(cache: Cache, shards: int) -> Path:
    """Writes sparse shards with a real header and footer, and a manifest with their true figures."""
    columns = Columns(
        ids=np.zeros(TOKENS, np.uint32),
        id_offsets=np.arange(0, TOKENS + 1, TOKENS // EXAMPLES, np.int64),
        segment_offsets=np.arange(EXAMPLES + 1, dtype=np.int64),
        segment_ends=np.full(EXAMPLES, TOKENS // EXAMPLES, np.uint32),
        segment_roles=np.zeros(EXAMPLES, np.uint8),
        segment_parts=np.zeros(EXAMPLES, np.uint8),
        segment_messages=np.zeros(EXAMPLES, np.int32),
        segment_weights=None,
        rows=np.arange(EXAMPLES, dtype=np.uint32),
        row_hashes=np.zeros(EXAMPLES, np.uint64),
        sides=None,
    )
    ledger = {"rows": EXAMPLES, "kept": EXAMPLES, "rejected": {}, "examples": EXAMPLES, "tokens": TOKENS}
    ledger |= {"regions_unknown": 0, "notes": {}, "warnings": []}
    data = bytes(encode_shard(columns, ShardMeta(ledger, [], {"rows": []})))
    page = 4096
    full = [at for at in range(0, len(data), page) if data[at : at + page].strip(b"\0")]
    recipe = {"tokenizer": "b3-" + "0" * 64}
    slices = [f"b3-{number:064x}" for number in range(shards)]
    names = [shard_name(recipe_digest(recipe), part) for part in slices]
    for name in names:
        target = cache.shard_path(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for at in full:
                file.seek(at)
                file.write(data[at : at + page])
            file.truncate(len(data))
    table = ShardTable(
        names=names,
        slices=slices,
        digests=[bytes_digest(data)] * shards,
        bytes=[len(data)] * shards,
        sources=[0] * shards,
        first_rows=[EXAMPLES * number for number in range(shards)],
        rows=[EXAMPLES] * shards,
        examples=[EXAMPLES] * shards,
        tokens=[TOKENS] * shards,
    )
    total = {**ledger, "rows": EXAMPLES * shards, "examples": EXAMPLES * shards, "tokens": TOKENS * shards}
    key = dataset_key(recipe_digest(recipe), zip(table.sources, table.first_rows, slices, strict=True))
    return Manifest(key, recipe, table, total, {"rows": 0}, False).commit(cache)


if __name__ == "__main__":
    main()
