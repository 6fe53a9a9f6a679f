"""Measures the CPU seconds of `penstock prepare` on a small file, starting from a cold process.

    python -m benchmarks.cold --tokenizer FOLDER [--data FILE.jsonl …] [--rows 1000] [--runs 3] [--json FILE]

Each run has three commands, each in a new process: `first` on an empty cache, `second` on different rows with the same
tokenizer, template and cache, and `hit` on the first rows again. CPU seconds are user and system time of the process
and its children; the median of the runs is printed. `floor` is a process that imports nothing, measured in the same
run. Exits with 1 if `first` takes more than 3 CPU seconds or `second` more than 2.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from benchmarks.grow import MATERIAL, material
from benchmarks.servers import ROOT

LIMITS = {"first": 3.0, "second": 2.0}  # CPU seconds
COMMAND = "from penstock.cli import main; main()"


def cost(arguments: Sequence[str], cache: Path) -> tuple[float, float]:
    """CPU and wall seconds of a Python process and its children."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_CACHE": str(cache), "HOME": str(cache)}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run = subprocess.run([sys.executable, *arguments], env=environment, cwd=cache, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"exit code {run.returncode}: {run.stderr}")
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def sample(files: Sequence[Path], rows: int, out: Path, first: int = 0) -> Path:
    """Writes rows spread over the files, starting at number `first`."""
    found = material(files)
    chosen = [found[(first + number * len(found) // rows) % len(found)] for number in range(rows)]
    out.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in chosen))
    past = time.time() - 60  # recently modified files are not looked up by mtime
    os.utime(out, (past, past))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=MATERIAL.parent / "tokenizer", help="folder")
    parser.add_argument("--template", type=Path, help="default: the tokenizer's own")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    costs: dict[str, list[tuple[float, float]]] = {"floor": [], "first": [], "second": [], "hit": []}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder)
            file = sample(arguments.data, arguments.rows, cache / "rows.jsonl")
            other = sample(arguments.data, arguments.rows, cache / "other.jsonl", first=1)
            command = ["-c", COMMAND, "prepare", "--tokenizer", str(arguments.tokenizer.absolute())]
            command += ["--on-bad-row", "quarantine", "--dropped-tool-calls", "keep", "--cache", str(cache / "cache")]
            command += ["--template", str(arguments.template.absolute())] if arguments.template else []
            costs["floor"].append(cost(["-c", ""], cache))
            costs["first"].append(cost([*command, str(file)], cache))
            costs["second"].append(cost([*command, str(other)], cache))
            costs["hit"].append(cost([*command, str(file)], cache))
    result: dict[str, object] = {"rows": arguments.rows, "tokenizer": arguments.tokenizer.name}
    for name, pairs in costs.items():
        cpu, wall = (statistics.median(values) for values in zip(*pairs, strict=True))
        result[name] = {"cpu": round(cpu, 3), "seconds": round(wall, 3)}
        print(f"{name:8} {cpu:6.2f} CPU s {wall:6.2f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    slow = [name for name, most in LIMITS.items() if statistics.median(cpu for cpu, _ in costs[name]) > most]
    print(f"FAILED {', '.join(slow)}: more than {LIMITS}" if slow else "all targets met")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
