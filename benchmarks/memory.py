"""Measures the memory of `penstock.prepare`, parent and workers: on real rows, on ten times as many, and on noise.

    python -m benchmarks.memory --tokenizer FOLDER --data FILE.jsonl … [--megabytes 400] [--identifiers 300]

Peaks are the kernel's record of resident memory (VmHWM) of every process. The noise consists of random, distinct
identifiers, which no cache can exploit. Targets: with ten times the rows no peak grows by 10% or more, and a worker
stays under 600 MB, even on noise. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.grow import MATERIAL, grow

LIMIT = 600  # MiB per worker
GROWTH = 1.1
ROW_BYTES = 4000
ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_", np.uint8)
PREPARE = """
import sys, penstock as ps
source, tokenizer, cache, workers = sys.argv[1:]
ps.prepare(source, tokenizer=tokenizer, cache=cache, workers=workers, dropped_tool_calls="keep")
"""


def identifiers(size: int, seed: int = 0) -> Iterator[bytes]:
    """Yields rows of random identifiers of 4 to 24 characters until they have `size` bytes."""
    random = np.random.default_rng(seed)
    written = 0
    while written < size:
        text = random.choice(ALPHABET, ROW_BYTES)
        text[np.minimum(np.cumsum(random.integers(5, 26, ROW_BYTES // 5)), ROW_BYTES - 1)] = ord(" ")
        question, answer = text[: ROW_BYTES // 2].tobytes().decode(), text[ROW_BYTES // 2 :].tobytes().decode()
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        line = orjson.dumps({"messages": messages}) + b"\n"
        yield line
        written += len(line)


def peaks(source: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """Peak memory of one run in MiB, of the parent and of each worker."""
    cache = Path(tempfile.mkdtemp(prefix="memory-", dir=source.parent))
    command = [sys.executable, "-c", PREPARE, str(source), str(tokenizer), str(cache), str(workers)]
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
    found: dict[int, float] = {}
    while process.poll() is None:
        for pid in (process.pid, *children(process.pid)):
            found[pid] = max(found.get(pid, 0.0), peak(pid))
        time.sleep(0.02)
    shutil.rmtree(cache)
    if process.returncode:
        raise SystemExit(f"prepare failed on {source.name}")
    parent = found.pop(process.pid)
    seconds = time.perf_counter() - begin
    size = source.stat().st_size / 1e6
    return {"megabytes": size, "seconds": seconds, "parent": parent, "workers": sorted(found.values())}


def children(pid: int) -> list[int]:
    """The processes below a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return found + [below for child in found for below in children(child)]
    except OSError:  # it has just ended
        return []


def peak(pid: int) -> float:
    """The peak memory of a process so far, in MiB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """Which targets are met."""
    small, large = result["rows"], result["ten times the rows"]
    runs = {name: max(run["workers"], default=run["parent"]) for name, run in result.items()}
    return {
        "parent grows by less than 10%": large["parent"] < GROWTH * small["parent"],
        "workers grow by less than 10%": runs["ten times the rows"] < GROWTH * runs["rows"],
        **{f"{name}: a worker stays under {LIMIT} MB": found < LIMIT for name, found in runs.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=MATERIAL.parent / "tokenizer", help="folder")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--megabytes", type=float, default=400, help="the smaller size; the larger is ten times that")
    parser.add_argument("--identifiers", type=float, default=300, help="megabytes of noise")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="folder for the data; default: the system's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    size = int(arguments.megabytes * 1e6)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        file = Path(folder) / "rows.jsonl"
        for name, times in (("rows", 1), ("ten times the rows", 10)):
            grow(arguments.data, times * size, file)
            result[name] = peaks(file, arguments.tokenizer, arguments.workers)
        with file.open("wb") as out:
            out.writelines(identifiers(int(arguments.identifiers * 1e6)))
        result["identifiers"] = peaks(file, arguments.tokenizer, arguments.workers)
    result["met"] = verdicts(result)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
