"""Measures how `prepare` scales with a second worker, and with the length of conversations.

Two workers are compared with one, and two copies of a plain loop with one, all interleaved (`interleave`): the loops
show what two cores of a shared machine can deliver. Conversations of 400 messages are compared with conversations of
four that contain the same messages.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from benchmarks.grow import grown
from benchmarks.interleave import rates
from benchmarks.meters import timed

TURN_BYTES = 30_000_000
WARM_BYTES = 50_000_000
LOOPS = 60_000_000


def speed_up(file: Path, model: Path, rounds: int) -> dict[str, Any]:
    """Compares two workers with one, and two copies of a loop with one.

    Each worker's encoder must first see the words of the data: the clock starts after `WARM_BYTES` per worker.
    """
    warm = min(WARM_BYTES, file.stat().st_size / 4)
    loop = ("loop", str(LOOPS))
    workers: list[float] = []
    loops: list[float] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=file.parent) as caches:
            one, two = (
                ("prepare", str(file), str(model), f"{caches}/{count}", str(count), str(count * warm))
                for count in (1, 2)
            )
            found = rates({"one": [one], "two": [two], "loop": [loop], "loops": [loop, loop]})
        workers.append(found["two"] / found["one"])
        loops.append(found["loops"] / found["loop"])
    shares = [w / loop for w, loop in zip(workers, loops, strict=True)]
    return {"workers": workers, "loops": loops, "share_of_loops": statistics.median(shares)}


def turns(rows: Sequence[dict[str, Any]], length: int, size: int) -> Iterator[bytes]:
    """Conversations of `length` messages, assembled from questions and answers of other conversations."""
    messages: list[dict[str, str]] = []
    for line in grown(rows, size, seed=5):
        for before, after in pairwise(orjson.loads(line)["messages"]):
            if (before["role"], after["role"]) == ("user", "assistant") and before["content"] and after["content"]:
                messages += ({"role": m["role"], "content": m["content"]} for m in (before, after))
            if len(messages) == length:
                yield orjson.dumps({"messages": messages}) + b"\n"
                messages = []


def long_conversations(rows: Sequence[dict[str, Any]], model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """CPU time per byte of long conversations relative to short ones with the same messages."""
    files = {length: folder / f"turns_{length}.jsonl" for length in (4, 400)}
    for length, file in files.items():
        with file.open("wb") as out:
            out.writelines(turns(rows, length, TURN_BYTES))
    costs: dict[int, list[float]] = {4: [], 400: []}
    for _ in range(rounds):
        for length, file in files.items():
            with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as cache:
                costs[length].append(timed(file, model, Path(cache)).cost("cpu"))
    return {"400_messages_against_4": statistics.median(costs[400]) / statistics.median(costs[4])}
