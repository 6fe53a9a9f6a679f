"""Compares what `prepare --dry-run` predicts with what `prepare` does, on four kinds of data.

    python -m benchmarks.estimate [--model FOLDER] [--data FILE.jsonl …] [--megabytes 200] [--json FILE]

The rows of each source file are grown on their own and written one file after the other, so that the data is as uneven
as a folder of real ones: as one file of JSON lines, the same compressed, as Parquet, and as a folder of files in which
one row in fifty is broken. Targets: rows, tokens and disk within 10%, time within a factor of two. Exits with 1 if one
is missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.grow import MATERIAL, grow_rows, material

WITHIN = {"rows": 1.1, "tokens": 1.1, "disk": 1.1, "seconds": 2.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/tokenizer")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("chats*.jsonl")))
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    print(f"{'data':10} {'what':8} {'predicted':>14} {'real':>14} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for name, source in data_sets(Path(folder), arguments.data, arguments.megabytes).items():
            found[name] = compare(source, arguments.model, arguments.workers, Path(folder, "cache"))
            for what, (predicted, real) in found[name].items():
                print(f"{name:10} {what:8} {predicted:14,.1f} {real:14,.1f} {predicted / real:6.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    missed = [
        f"{name}: {what}"
        for name, figures in found.items()
        for what, (predicted, real) in figures.items()
        if not 1 / WITHIN[what] <= predicted / real <= WITHIN[what]
    ]
    print(f"MISSED: {', '.join(missed)}" if missed else "all targets met")
    return 1 if missed else 0


def data_sets(folder: Path, files: Sequence[Path], megabytes: float) -> dict[str, Path]:
    """Writes the data in four forms."""
    grown = (_grown(file, megabytes / len(files), folder / f"part-{n:03}.jsonl") for n, file in enumerate(files))
    parts = [part for part in grown if part is not None]
    plain, packed, table = folder / "rows.jsonl", folder / "rows.jsonl.gz", folder / "rows.parquet"
    with plain.open("wb") as joined:
        for part in parts:
            joined.write(part.read_bytes())
    with plain.open("rb") as lines, gzip.open(packed, "wb", compresslevel=1) as out:
        shutil.copyfileobj(lines, out)
    _write_parquet(plain, table)
    broken = folder / "files"
    broken.mkdir()
    choose = random.Random(0)
    for part in parts:
        lines_ = part.read_bytes().splitlines(keepends=True)
        worse = (line[: len(line) // 2] + b"\n" if choose.random() < 0.02 else line for line in lines_)
        (broken / part.name).write_bytes(b"".join(worse))
        part.unlink()
    return {"lines": plain, "gzip": packed, "parquet": table, "folder": broken}


def _grown(file: Path, megabytes: float, out: Path) -> Path | None:
    try:
        rows = material([file])
    except SystemExit:  # no conversations
        return None
    return grow_rows(rows, int(megabytes * 1e6), out)


def _write_parquet(lines: Path, table: Path, rows_at_once: int = 2000) -> None:
    """Writes only the messages, as a list of structs."""
    kind = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
    with lines.open("rb") as rows, pq.ParquetWriter(table, kind) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            messages = [
                {"role": m["role"], "content": m["content"]}
                for m in json.loads(row)["messages"]
                if isinstance(m.get("content"), str) and m["role"] in ("system", "user", "assistant")
            ]
            batch.append({"messages": messages})
            if len(batch) == rows_at_once:
                writer.write_table(pa.Table.from_pylist(batch, kind))
                batch.clear()
        if batch:
            writer.write_table(pa.Table.from_pylist(batch, kind))


def compare(source: Path, model: str, workers: str, cache: Path) -> dict[str, tuple[float, float]]:
    """Predicts, prepares, and returns both figures of each kind."""
    command = [
        sys.executable, "-m", "penstock.cli", "prepare", str(source), "--tokenizer", model, "--cache", str(cache),
        "--workers", workers, "--on-bad-row", "quarantine", "--quarantine-file", str(cache.parent / "bad.jsonl"),
        "--dropped-tool-calls", "keep", "--json",
    ]  # fmt: skip
    predicted = json.loads(subprocess.run([*command, "--dry-run"], check=True, stdout=subprocess.PIPE).stdout)
    shutil.rmtree(cache, ignore_errors=True)
    began = time.monotonic()
    real = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    seconds = time.monotonic() - began
    disk = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    shutil.rmtree(cache)
    return {
        "rows": (predicted["rows"], real["ledger"]["rows"]),
        "tokens": (predicted["tokens"], real["tokens"]),
        "disk": (predicted["disk_bytes"], disk),
        "seconds": (predicted["seconds"], seconds),
    }


if __name__ == "__main__":
    sys.exit(main())
