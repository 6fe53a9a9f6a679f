"""How fast `penstock.prepare` is, against transformers and against the fast encoder alone, in one run.

    python -m benchmarks.prepare --tokenizer FOLDER --data FILE.jsonl … [--traces FILE.jsonl …] [--megabytes 500]

Data is grown from the files by seeded word shuffles. While one worker prepares it, the run stops the clock every few
slices and lets transformers (with masks) and gigatoken (alone, warm, on rendered text) work on a stretch of the same
file: so all three see the same noise. Every row that transformers encoded is compared token by token. The clock starts
after the first slice: start-up (imports, engines, calibration, cold caches) is reported apart. One worker and two, one
loop and two take turns, for the same reason.
Targets: 20 times transformers, on `--traces` too; 0.25 of the encoder; two workers 0.8 of what two copies of a plain
loop reach; 400-message conversations at most 1.3 times the cost per byte of 4-message ones. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import xxhash
from jinja2 import TemplateError

import penstock as ps
from benchmarks.conformance import reference_tokenizer, trl_templates
from benchmarks.grow import MATERIAL, grow, grown, material
from benchmarks.meters import Meter, token_hash
from benchmarks.turns import rates
from penstock.build.progress import Progress
from penstock.sources import model_folder

PEER_BYTES, LIMIT_BYTES = 700_000, 24_000_000
TURN_BYTES = 30_000_000
WARM_BYTES = 50_000_000
LOOPS = 60_000_000


@dataclass
class Clock:
    """When slices were done; time spent in `pauses` does not count. The first slice belongs to the start."""

    marks: list[tuple[float, float, int]] = field(default_factory=list)  # wall, CPU, bytes
    paused: float = 0.0
    begin: float = field(default_factory=time.perf_counter)

    def mark(self, seen: int) -> None:
        self.marks.append((time.perf_counter() - self.begin - self.paused, time.process_time(), seen))

    def pause(self, work: Callable[[], None]) -> None:
        begin = time.perf_counter()
        work()
        self.paused += time.perf_counter() - begin

    @property
    def start_up(self) -> float:
        """Seconds until the first slice was done, less the time such a slice takes later on."""
        return max(0.0, self.marks[0][0] - self.marks[0][2] * self.seconds_per_byte())

    def seconds_per_byte(self, cpu: bool = False) -> float:
        first, last = self.marks[0], self.marks[-1]
        return (last[cpu] - first[cpu]) / (last[2] - first[2])


def timed(
    file: Path, tokenizer: Path, every: int = 0, pause: Callable[[int], None] | None = None
) -> tuple[Clock, ps.Dataset, Progress]:
    """One worker prepares a file in a new cache. `pause(bytes so far)` is called every so many bytes with the clock
    stopped."""
    cache = Path(tempfile.mkdtemp(prefix="bench-", dir=file.parent))
    clock = Clock()
    last: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        before = clock.marks[-1][2] if clock.marks else 0
        clock.mark(progress.bytes_seen)
        last[:] = [progress]
        if pause is not None and progress.bytes_seen // every > before // every:
            clock.pause(lambda: pause(progress.bytes_seen))

    dataset = ps.prepare(
        file, tokenizer=str(tokenizer), cache=cache, workers="1", dropped_tool_calls="keep", on_progress=on_progress
    )
    clock.mark(last[0].bytes_seen)
    return clock, dataset, last[0]


def peer_template(tokenizer: Path, rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """A template with {% generation %} that prints what the tokenizer's own prints, and its name: its own, one of
    trl's, or its own with an empty tag."""
    oracle = reference_tokenizer(tokenizer)
    own = model_folder.load(tokenizer).templates["default"]

    def texts(template: str) -> list[str]:
        return [
            oracle.apply_chat_template(r["messages"], tools=r.get("tools"), chat_template=template, tokenize=False)
            for r in rows
        ]

    expected = texts(own)
    for name, template in {"own": own, **trl_templates()}.items():
        try:
            if "generation %}" in template and texts(template) == expected:
                return name, template
        except (TemplateError, TypeError):
            continue  # a template of another model refuses what it does not know
    return "own, with an empty tag", tagged(own)


def tagged(template: str) -> str:
    """A template without a tagged twin, with one empty tag: transformers then does the work of masks all the same."""
    return template + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"


def against(file: Path, tokenizer: Path, peer: Meter, limit: Meter, pauses: int) -> dict[str, Any]:
    """One worker on a file, transformers and the encoder on stretches of it in between."""
    size = file.stat().st_size
    theirs: list[dict[str, Any]] = []
    encoder: list[dict[str, Any]] = []

    def pause(seen: int) -> None:
        room = max(0, min(seen, size - LIMIT_BYTES))
        theirs.append(peer.measure(path=str(file), offset=min(seen, size - PEER_BYTES), bytes=PEER_BYTES))
        encoder.append(limit.measure(path=str(file), offset=room, bytes=LIMIT_BYTES))

    clock, dataset, progress = timed(file, tokenizer, size // (pauses + 1), pause)
    equal, compared = same_tokens(dataset, file, theirs)
    shutil.rmtree(dataset.cache.root)
    ours = {kind: clock.seconds_per_byte(kind == "cpu") for kind in ("seconds", "cpu")}
    cost = {
        name: {kind: sum(r[kind] for r in runs) / sum(r["bytes"] for r in runs) for kind in ("seconds", "cpu")}
        for name, runs in (("transformers", theirs), ("encoder", encoder))
    }
    return {
        "megabytes": size / 1e6,
        "rows": progress.rows,
        "tokens": progress.tokens,
        "start_up_seconds": clock.start_up,
        "megabytes_per_second": per_second(ours),
        "rows_per_second": progress.rows / size / ours["seconds"],
        "tokens_per_second": progress.tokens / size / ours["seconds"],
        "transformers_megabytes_per_second": per_second(cost["transformers"]),
        "encoder_megabytes_per_second": per_second(cost["encoder"]),
        "times_transformers": {kind: cost["transformers"][kind] / ours[kind] for kind in ours},
        "of_the_encoder": {kind: cost["encoder"][kind] / ours[kind] for kind in ours},
        "compared_rows": compared,
        "equal_rows": equal,
        "reference_served": {stage: dict(why) for stage, why in progress.engines.items()},
        "proof_mismatches": progress.mismatches,
    }


def per_second(costs: dict[str, float]) -> dict[str, float]:
    return {kind: 1e-6 / cost for kind, cost in costs.items()}


def same_tokens(dataset: ps.Dataset, file: Path, theirs: list[dict[str, Any]]) -> tuple[int, int]:
    """Of the rows that transformers encoded: how many have its tokens here, and how many were found here."""
    wanted = {int(line): int(ids) for answer in theirs for line, ids in answer["rows"]}
    with file.open("rb") as lines:
        numbers = {k: h for k, h in enumerate(map(xxhash.xxh3_64_intdigest, map(bytes.rstrip, lines))) if h in wanted}
    equal = sum(token_hash(dataset.input_ids(k)) == wanted[h] for k, h in numbers.items())
    return equal, len(numbers)


def speed_up(file: Path, tokenizer: Path, rounds: int) -> dict[str, Any]:
    """Two workers against one, and two copies of a loop against one, all by turns.

    Each worker's encoder has to meet the words of the data first, so the clock starts after `WARM_BYTES` a worker.
    """
    warm = min(WARM_BYTES, file.stat().st_size / 4)
    loop = ("loop", str(LOOPS))
    workers: list[float] = []
    loops: list[float] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=file.parent) as caches:
            one, two = (
                ("prepare", str(file), str(tokenizer), f"{caches}/{count}", str(count), str(count * warm))
                for count in (1, 2)
            )
            found = rates({"one": [one], "two": [two], "loop": [loop], "loops": [loop, loop]})
        workers.append(found["two"] / found["one"])
        loops.append(found["loops"] / found["loop"])
    shares = [w / loop for w, loop in zip(workers, loops, strict=True)]
    return {"workers": workers, "loops": loops, "share_of_loops": statistics.median(shares)}


def turns(rows: Sequence[dict[str, Any]], length: int, size: int) -> Iterator[bytes]:
    """Conversations of `length` messages, made of the questions and answers of others."""
    messages: list[dict[str, str]] = []
    for line in grown(rows, size, seed=5):
        for before, after in pairwise(orjson.loads(line)["messages"]):
            if (before["role"], after["role"]) == ("user", "assistant") and before["content"] and after["content"]:
                messages += ({"role": m["role"], "content": m["content"]} for m in (before, after))
            if len(messages) == length:
                yield orjson.dumps({"messages": messages}) + b"\n"
                messages = []


def long_conversations(rows: Sequence[dict[str, Any]], tokenizer: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Cost per byte of long conversations against short ones with the same messages."""
    files = {length: folder / f"turns_{length}.jsonl" for length in (4, 400)}
    for length, file in files.items():
        with file.open("wb") as out:
            out.writelines(turns(rows, length, TURN_BYTES))
    costs: dict[int, list[float]] = {4: [], 400: []}
    for _ in range(rounds):
        for length, file in files.items():
            clock, dataset, _ = timed(file, tokenizer)
            shutil.rmtree(dataset.cache.root)
            costs[length].append(clock.seconds_per_byte(cpu=True))
    return {"400_messages_against_4": statistics.median(costs[400]) / statistics.median(costs[4])}


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """Which targets are met."""
    parts = {name: result[name] for name in ("mixed", "traces") if name in result}
    times = {name: part["times_transformers"]["seconds"] for name, part in parts.items()}
    return {
        **{f"{name}: 20 times transformers": found >= 20 for name, found in times.items()},
        **{f"{name}: same tokens": part["equal_rows"] == part["compared_rows"] > 0 for name, part in parts.items()},
        "mixed: a quarter of the encoder": result["mixed"]["of_the_encoder"]["seconds"] >= 0.25,
        "two workers: 0.8 of the loops": result["two_workers"]["share_of_loops"] >= 0.8,
        "400 messages: at most 1.3": result["turns"]["400_messages_against_4"] <= 1.3,
    }


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All measurements."""
    rows = material(arguments.data)
    template = folder / "peer.jinja"
    name, text = peer_template(arguments.tokenizer, rows[:: max(1, len(rows) // 100)])
    template.write_text(text)
    peer, limit = Meter("peer", str(arguments.tokenizer), str(template)), Meter("limit", str(arguments.tokenizer))
    size = int(arguments.megabytes * 1e6)
    mixed = grow(arguments.data, size, folder / "mixed.jsonl")
    result: dict[str, Any] = {"transformers_template": name}
    result["mixed"] = against(mixed, arguments.tokenizer, peer, limit, arguments.pauses)
    if arguments.traces:
        traces = grow(arguments.traces, size // 4, folder / "traces.jsonl", seed=1)
        result["traces"] = against(traces, arguments.tokenizer, peer, limit, arguments.pauses)
        traces.unlink()
    peer.close()
    limit.close()
    result["two_workers"] = speed_up(mixed, arguments.tokenizer, arguments.rounds)
    result["turns"] = long_conversations(rows, arguments.tokenizer, folder, arguments.rounds)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=MATERIAL.parent / "tokenizer", help="folder")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--traces", nargs="*", type=Path, default=[], help="long tool traces, measured by themselves")
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--pauses", type=int, default=10, help="how often the others are measured in between")
    parser.add_argument("--rounds", type=int, default=3, help="of workers, loops and turns")
    parser.add_argument("--scratch", type=Path, help="folder for the grown data; default: the system's")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        result = run(arguments, Path(folder))
    result["met"] = verdicts(result)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
