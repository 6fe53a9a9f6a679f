"""Measures what `--turns faithful` costs on agent traces, beside `--turns conversation` and one row per turn.

    python -m benchmarks.faithful_cost --data FOLDER --model FOLDER [--megabytes 400] [--rounds 3]
    python -m benchmarks.faithful_cost --data FOLDER --ratios MODEL … [--megabytes 20]
    python -m benchmarks.faithful_cost --table FILE.json

Takes the rows of tau-bench and SWE-agent with reasoning added to half of their answers, and grows each file with
shuffled words (`benchmarks.grow`). Both modes prepare it with one worker, each run in its own process with an empty
cache, in turns; seconds are CPU time, user and system. `new` are the tokens of chains behind what they share with the
root, and `least` is the size of a prefix tree of all chains of a row: no store of shared prefixes holds fewer tokens.
`naive` has one row per assistant turn: its prompt and its answer. `tree` are the tokens that a run goes through with
`collate="tree"`, and pairs are those of a token and one it attends to. Prints JSON, or the table of docs/faithful.md
from such JSON (`--table FILE`). `--ratios` prints only the CPU time that faithful takes per byte, start-up apart, as a
multiple of conversation's, for several models and more files; both modes run at once and take turns slice by slice.
Exit code 1 if faithful stores more than 1.15 times the tokens of roots and the new ones, takes more than 2 times the
CPU time, or if a spot check found a difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import penstock as ps
from benchmarks.faithful import REASONING
from benchmarks.grow import grown, material
from benchmarks.meters import Meter
from penstock.arrays import Int64
from penstock.load.assemble import RowTrees
from penstock.prepare.chat.conversation import BODY_PARTS, Part, Role
from penstock.prepare.encode.columns import Columns
from penstock.prepare.faithful.prefixes import row_of, sizes, tokens

FILES = {"tau-bench airline": "tau_airline_a", "SWE-agent": "swe_trajs_a"}
MODES = ("conversation", "faithful")
SHARE = 0.5  # of answers that get reasoning
RATIO_FILES = ("tau_airline_a", "swe_trajs_a", "sgd_dev_a", "lf_reason_tool_use")
STORAGE, TIME = 1.15, 2.0  # targets


def traces(data: Path, name: str, size: int, target: Path) -> Path:
    """The rows of a file, some answers with reasoning, grown to a size."""
    chance = random.Random(0)
    rows = material([data / f"{name}.jsonl"])
    with target.open("wb") as file:
        for line in grown(rows, size):
            row = orjson.loads(line)
            for message in row["messages"]:
                if message["role"] == "assistant" and chance.random() < SHARE:
                    message["reasoning_content"] = chance.choice(REASONING)
            file.write(orjson.dumps(row) + b"\n")
    return target


def prepare(file: Path, model: Path, cache: Path, turns: str) -> tuple[float, ps.Dataset]:
    """Prepares a file in a new process; its CPU seconds, and the dataset."""
    command = [
        sys.executable, "-m", "penstock.cli", "prepare", str(file), "--tokenizer", str(model), "--cache", str(cache),
        "--turns", turns, "--workers", "1", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    answer = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed: {answer}")
    return usage.ru_utime + usage.ru_stime, ps.open(answer["path"])


def measure(file: Path, model: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Both modes on a file."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    found: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                took, ds = prepare(file, model, Path(cache), mode)
                seconds[mode].append(round(took, 2))
                if mode not in found:
                    found[mode] = totals(ds) | (chains(ds) if mode == "faithful" else {})
    times = [after / before for before, after in zip(*(seconds[mode] for mode in MODES), strict=True)]
    return {
        "megabytes": file.stat().st_size / 1e6,
        **{mode: found[mode] | {"cpu_seconds": seconds[mode]} for mode in MODES},
        "chains_per_row": found["faithful"]["examples"] / found["faithful"]["rows"],
        "storage_of_new": found["faithful"]["stored"] / (found["faithful"]["roots"] + found["faithful"]["new"]),
        "storage_of_least": found["faithful"]["stored"] / found["faithful"]["least"],
        "storage_of_conversation": found["faithful"]["stored_bytes"] / found["conversation"]["stored_bytes"],
        "time_of_conversation": statistics.median(times),
        "tree_of_separate": {
            unit: found["faithful"]["tree"][unit] / found["faithful"]["separate"][unit] for unit in ("tokens", "pairs")
        },
    }


def ratio(file: Path, model: Path, folder: Path) -> dict[str, Any]:
    """The CPU time of faithful turns per byte after the first slice, relative to conversation."""
    meters = {mode: Meter("penstock", str(model), str(file), str(folder / mode), mode) for mode in MODES}
    reports: dict[str, list[Any]] = {mode: [] for mode in MODES}
    while waiting := [mode for mode in MODES if not reports[mode] or "dataset" not in reports[mode][-1]]:
        for mode in waiting:
            reports[mode].append(meters[mode].measure())
    for meter in meters.values():
        meter.close()
    costs = {}
    for mode, (first, *_, last, result) in reports.items():  # after the last slice, conversation previews faithful
        costs[mode] = (last["cpu"] - first["cpu"]) / (last["seen"] - first["seen"])
        if result["mismatches"]:
            raise SystemExit(f"{file.name}, {model.name}, {mode}: the spot check found differences")
    return {"model": model.name, "file": file.stem, "time_of_conversation": costs["faithful"] / costs["conversation"]}


def ratios(data: Path, models: Sequence[Path], size: int, folder: Path) -> list[dict[str, Any]]:
    """`ratio` of each model and file."""
    found = []
    for name in RATIO_FILES:
        file = traces(data, name, size, folder / f"{name}.jsonl")
        for model in models:
            with tempfile.TemporaryDirectory(dir=folder) as caches:
                found.append(ratio(file, model, Path(caches)))
            print(found[-1], file=sys.stderr, flush=True)
        file.unlink()
    return found


def totals(ds: ps.Dataset) -> dict[str, Any]:
    """Examples and tokens of a dataset."""
    paths = [ds.cache.shard_path(name) for name in ds.shards.names]
    columns = [ds.shards.columns(number) for number in range(len(ds.shards))]
    return {
        "rows": ds.ledger.kept,
        "examples": ds.shards.total,
        "tokens": ds.tokens,
        "stored": sum(int(one.id_offsets[-1]) for one in columns),
        "stored_bytes": sum(path.stat().st_size for path in paths),
        "trained": ds.view().ledger.trained,
    }


def chains(ds: ps.Dataset) -> dict[str, Any]:
    """What the chains of a dataset would take in other ways."""
    least = naive = turns = whole = new = 0
    separate, tree = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for shard in range(len(ds.shards)):
        columns = ds.shards.columns(shard)
        for first, root in _rows(columns):
            sequences = [_bytes(tokens(columns, number)) for number in range(first, root + 1)]
            whole += len(sequences[-1]) // 4
            new += sum(len(one) // 4 - _common(one, sequences[-1]) for one in sequences[:-1])
            least += _least(sequences)
        ends = _turn_ends(columns)
        naive, turns = naive + int(ends.sum()), turns + len(ends)
        every = sizes(columns)
        shared = np.zeros(len(every), np.int64) if columns.prefixes is None else columns.prefixes.astype(np.int64)
        shared = np.maximum(shared - 1, 0)  # the last shared token is repeated
        separate += every.sum(), _pairs(every).sum()
        tree += (every - shared).sum(), (_pairs(every) - _pairs(shared)).sum()
    assert RowTrees(ds.view()).lengths.sum() == tree[0], "the loader's trees have another size"
    return {
        "turns": turns,
        "roots": whole,
        "new": new,
        "least": least,
        "naive": {"examples": turns, "tokens": naive},
        "separate": {"tokens": int(separate[0]), "pairs": int(separate[1])},
        "tree": {"tokens": int(tree[0]), "pairs": int(tree[1])},
    }


def _pairs(lengths: Int64) -> Int64:
    """The number of pairs of a token and one it attends to, of sequences."""
    return lengths * (lengths + 1) // 2


def _rows(columns: Columns) -> Iterator[tuple[int, int]]:
    """The first and last example of each row."""
    number = 0
    while number < columns.examples:
        first, root = row_of(columns, number)
        yield first, root
        number = root + 1


def _bytes(ids: Any) -> bytes:
    """Tokens as bytes that sort alike."""
    ordered: bytes = ids.astype(">u4").tobytes()
    return ordered


def _least(sequences: list[bytes]) -> int:
    """The number of nodes in a prefix tree of sequences."""
    ordered = sorted(sequences)
    shared = [_common(one, other) for one, other in itertools.pairwise(ordered)]
    return sum(len(one) // 4 for one in ordered) - sum(shared)


def _common(one: bytes, other: bytes) -> int:
    a, b = np.frombuffer(one, np.uint32), np.frombuffer(other, np.uint32)
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size


def _turn_ends(columns: Columns) -> Int64:
    """For each trained turn, the tokens of its example up to its end."""
    trained = (columns.segment_roles == Role.ASSISTANT) & np.isin(columns.segment_parts, (*BODY_PARTS, Part.STOP))
    owner = np.repeat(np.arange(columns.examples), np.diff(columns.segment_offsets))[trained]
    keys = np.stack((owner, columns.segment_messages[trained]))
    ends = columns.segment_ends[trained].astype(np.int64)
    last = np.append((np.diff(keys, axis=1) != 0).any(axis=0), True) if len(ends) else np.empty(0, np.bool_)
    return ends[last]


def table(results: dict[str, Any]) -> str:
    """The table of docs/faithful.md."""
    lines = [
        "| data | way | examples | tokens of a run | stored | trained | CPU seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        conversation, faithful = result["conversation"], result["faithful"]
        naive, tree = faithful["naive"], faithful["tree"]["tokens"]
        took = {mode: f"{statistics.median(result[mode]['cpu_seconds']):.1f}" for mode in MODES}
        rows = f"{name}, {conversation['rows']:,} rows"
        ways = (
            (rows, "conversation", conversation["examples"], conversation["tokens"], conversation["stored"],
             conversation["trained"], took["conversation"]),
            ("", "one row per turn", naive["examples"], naive["tokens"], naive["tokens"], faithful["trained"], ""),
            ("", "faithful", faithful["examples"], faithful["tokens"], faithful["stored"], faithful["trained"],
             took["faithful"]),
            ("", 'faithful, `collate="tree"`', conversation["rows"], tree, faithful["stored"], faithful["trained"], ""),
        )  # fmt: skip
        for data, way, examples, *counts, seconds in ways:
            millions = " | ".join(f"{count / 1e6:.1f}M" for count in counts)
            lines.append(f"| {data} | {way} | {examples:,} | {millions} | {seconds} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path, help="folder with a tokenizer and its chat template")
    parser.add_argument("--megabytes", type=float, default=400, help="size of the grown files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratios", type=Path, nargs="+", help="models whose CPU time is compared, start-up apart")
    parser.add_argument("--table", type=Path, help="print the table of docs/faithful.md, from the JSON of a run")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_bytes())))
        return 0
    if arguments.data and arguments.ratios:
        with tempfile.TemporaryDirectory() as folder:
            found = ratios(arguments.data, arguments.ratios, int(arguments.megabytes * 1e6), Path(folder))
        print(json.dumps({"target": TIME, "ratios": found}, indent=2))
        return int(max(one["time_of_conversation"] for one in found) > TIME)
    if arguments.data is None or arguments.model is None:
        parser.error("--data and --model are required")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, name in FILES.items():
            file = traces(arguments.data, name, int(arguments.megabytes * 1e6), Path(folder, f"{name}.jsonl"))
            results[title] = measure(file, arguments.model, arguments.rounds, Path(folder))
            file.unlink()
    print(json.dumps(results, indent=2))
    missed = [r for r in results.values() if r["storage_of_new"] > STORAGE or r["time_of_conversation"] > TIME]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
