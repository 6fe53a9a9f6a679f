"""Compares the Ray runner with local worker processes: throughput, start-up, bytes of the result, memory of the driver.

    python -m benchmarks.scale --tokenizer FOLDER --data FILE.jsonl … [--megabytes 200] [--rounds 3] [--json OUT.json]

Both runners prepare the same file with two workers, alternating. Throughput is measured between a fifth of the bytes
and the last slice, so the start of all workers is left out and given separately. CPU seconds are those of all processes
of a run in the same interval, daemons of the cluster included; on a machine that is busy otherwise, they are the
steadier figure. The driver's memory is measured with few and with ten times as many slices, from files that are one
small slice each. Targets: Ray delivers 0.8 of the local throughput and 0.95 of it per CPU second, the shards and
manifests are identical, and ten times the slices grow the driver by less than 10%. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.grow import MATERIAL, grow, grown, material
from penstock.build.workers.process import ONE_THREAD
from penstock.child import environment
from penstock.digests import file_digest

SHARE, CPU_SHARE, GROWTH = 0.8, 0.95, 1.1
SMALL_FILE = 20_000  # bytes
DRIVER = """
import json, os, sys, time
from pathlib import Path
import penstock as ps
from penstock.prepare.sources import discover

discover.RUN_FILES = 1 << 60  # small files stay slices of their own
source, tokenizer, cache, runner, workers = sys.argv[1:]
tick = os.sysconf("SC_CLK_TCK")
seen, first = [], 0.0

def cpu_seconds():
    '''Of this process and all below it, those that have ended included.'''
    parents, used = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / tick
    found = {os.getpid()}
    while added := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= added
    return sum(used.get(pid, 0) for pid in found)

def on_progress(progress):
    global first
    first = first or time.perf_counter()
    if progress.bytes > (0.9 if seen else 0.2) * progress.bytes_total > 0:
        seen.append((time.perf_counter(), cpu_seconds(), progress.bytes))

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

begin = time.perf_counter()
ray = {"runner": "ray", "ray_address": "local"} if runner == "ray" else {}
ps.prepare(source, tokenizer=tokenizer, cache=cache, workers=workers, progress=False, on_progress=on_progress,
           dropped_tool_calls="keep", **ray)
end = time.perf_counter()
(start, cpu_start, bytes_start), (last, cpu_last, bytes_last) = seen[0], seen[-1]
megabytes = (bytes_last - bytes_start) / 1e6
print(json.dumps({
    "megabytes_per_second": megabytes / max(last - start, 1e-9),
    "megabytes_per_cpu_second": megabytes / max(cpu_last - cpu_start, 1e-9),
    "start_up_seconds": first - begin, "total_seconds": end - begin,
    "driver_megabytes": memory("VmRSS:"), "driver_peak_megabytes": memory("VmHWM:"),
}))
"""


def prepared(source: Path, tokenizer: Path, cache: Path, runner: str, workers: int) -> dict[str, Any]:
    """The figures of one run in a process of its own."""
    command = [sys.executable, "-c", DRIVER, *map(str, (source, tokenizer, cache, runner, workers))]
    done = subprocess.run(command, env=environment(ONE_THREAD), stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"prepare failed on {source.name} with the {runner} runner")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def content(cache: Path) -> dict[str, str]:
    """Digests of shards and manifests."""
    files = (*cache.glob("shards/*/*.arrow"), *cache.glob("datasets/*/manifest.json"))
    return {path.relative_to(cache).as_posix(): file_digest(path) for path in files}


def compared(source: Path, tokenizer: Path, rounds: int, workers: int) -> dict[str, Any]:
    """Both runners on the same file, alternating; ratios are Ray's figure over the local one of the same round."""
    runs: list[dict[str, Any]] = []
    identical = True
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="scale-", dir=source.parent) as folder:
            caches = {runner: Path(folder) / runner for runner in ("local", "ray")}
            order = list(caches)[:: 1 if number % 2 == 0 else -1]
            run = {runner: prepared(source, tokenizer, caches[runner], runner, workers) for runner in order}
            identical &= content(caches["local"]) == content(caches["ray"])
        for name in ("megabytes_per_second", "megabytes_per_cpu_second"):
            run[f"ray_over_local_{name}"] = run["ray"][name] / run["local"][name]
        print(json.dumps(run), file=sys.stderr, flush=True)
        runs.append(run)
    ratios = {
        f"ray_over_local_{name}": statistics.median(run[f"ray_over_local_{name}"] for run in runs)
        for name in ("megabytes_per_second", "megabytes_per_cpu_second")
    }
    return {"runs": runs, **ratios, "identical": identical}


def driver_memory(files: list[Path], tokenizer: Path, folder: Path, slices: int) -> dict[str, Any]:
    """The driver's memory with `slices` slices, and with ten times as many."""
    lines = list(grown(material(files), SMALL_FILE * 10))
    found: dict[str, Any] = {}
    for number in (slices, 10 * slices):
        source = folder / f"{number}"
        source.mkdir()
        for file in range(number):
            part = lines[file % 10 :: 10]
            extra = b'{"messages":[{"role":"user","content":"%d"},{"role":"assistant","content":"."}]}\n' % file
            (source / f"{file:06}.jsonl").write_bytes(b"".join(part) + extra)
        run = prepared(source, tokenizer, folder / f"cache-{number}", "ray", 2)
        found[str(number)] = run
        print(json.dumps({number: run}), file=sys.stderr, flush=True)
    small, large = (found[str(n)]["driver_peak_megabytes"] for n in (slices, 10 * slices))
    return {"slices": found, "growth": large / small, "bytes_per_slice": (large - small) * 1024**2 / (9 * slices)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=MATERIAL.parent / "tokenizer", help="folder")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slices", type=int, default=200, help="for the driver's memory; also measured with ten times")
    parser.add_argument("--scratch", type=Path, help="folder for the data; default: the system's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-", dir=arguments.scratch) as folder:
        source = grow(arguments.data, int(arguments.megabytes * 1e6), Path(folder) / "rows.jsonl")
        result = {
            "megabytes": arguments.megabytes,
            "workers": arguments.workers,
            "engines": compared(source, arguments.tokenizer, arguments.rounds, arguments.workers),
            "driver": driver_memory(arguments.data, arguments.tokenizer, Path(folder), arguments.slices),
        }
    engines, driver = result["engines"], result["driver"]
    result["met"] = {
        f"Ray delivers {SHARE} of the local throughput": engines["ray_over_local_megabytes_per_second"] >= SHARE,
        f"and {CPU_SHARE} per CPU second": engines["ray_over_local_megabytes_per_cpu_second"] >= CPU_SHARE,
        "shards and manifests are identical": engines["identical"],
        "ten times the slices grow the driver by less than 10%": driver["growth"] < GROWTH,
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
