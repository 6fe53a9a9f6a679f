"""The long crash test: kills at random times and at every commit step, with varying numbers of workers.

    python -m benchmarks.crash --kills 500 [--rows 8000] [--turns faithful] [--small-files] [--cache DIR] [--seed 0]

Uses real worker processes, real (but smaller) slices, and the fast engines; builds are forked from a process that has
imported everything, so that no kill is spent on imports. Each round starts with an empty cache and is killed and rerun
until it is complete; then shards and manifest must be byte-identical to an undisturbed build, and no temporary file,
claim or marker may remain. With `--turns faithful` a template is used that rewrites history, so that every turn is a
chain of its own; with `--small-files` the rows are in many files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from penstock.prepare.sources.slices import SliceSizes
from tests.store.test_crashes import KILLED, REWRITES, STEPS
from tests.support.forks import Forks, leftovers, result

ROOT = Path(__file__).parent.parent
SLICES = SliceSizes(20_000, 80_000, 320_000)


def main() -> None:
    """Runs rounds until there were enough kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", choices=("conversation", "faithful"), default="conversation")
    parser.add_argument("--small-files", action="store_true")
    parser.add_argument("--cache", type=Path, default=None, help="where to work; default: a temporary folder")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="penstock-crash-", dir=args.cache))
    try:
        choose = random.Random(args.seed)
        print(
            json.dumps(crash(work, args.kills, args.rows, choose, args.turns, small_files=args.small_files), indent=2)
        )
    finally:
        shutil.rmtree(work)


def crash(
    work: Path, kills: int, rows: int, choose: random.Random, turns: str = "conversation", *, small_files: bool = False
) -> dict[str, object]:
    """Runs rounds of kills; fails if a round's result differs from the undisturbed one."""
    data = _data(work / "rows.jsonl", rows, choose)
    if small_files:
        data = _split(data, work / "rows")
    if turns == "faithful":
        (work / "template.jinja").write_text(REWRITES)
    (work / "logs").mkdir()
    forks = Forks(work / "logs", slices=SLICES)
    try:
        began = time.monotonic()
        code, said = _build(forks, data, work / "reference", 2)
        assert code == 0, f"the undisturbed build failed: {said}"
        whole, expected = time.monotonic() - began, result(work / "reference")
        done = rounds = 0
        steps: Counter[str] = Counter()
        while done < kills:
            cache = work / f"round-{rounds}"
            killed = _round(forks, data, cache, whole, choose)
            code, said = _build(forks, data, cache, 1)
            assert code == 0, said
            assert result(cache) == expected, f"round {rounds} differs; look at {cache}"
            assert leftovers(cache) == [], leftovers(cache)
            shutil.rmtree(cache)
            steps += killed
            done, rounds = steps.total(), rounds + 1
            print(f"{done} kills, {rounds} rounds identical", file=sys.stderr, flush=True)
    finally:
        forks.close()
    shards = sum(name.endswith(".arrow") for name in expected)
    return {"kills": done, "rounds": rounds, "shards": shards, "undisturbed_seconds": round(whole, 1), "by_step": steps}


def _round(forks: Forks, data: Path, cache: Path, whole: float, choose: random.Random) -> Counter[str]:
    """Kill builds of one cache until one completes; the kills by commit step, or `random`."""
    killed: Counter[str] = Counter()
    code = KILLED
    while code == KILLED:
        fault = f"{choose.choice(STEPS)}:{choose.randint(1, 6)}" if choose.random() < 0.5 else ""
        pid = _start(forks, data, cache, choose.choice((1, 2, 3)), fault)
        longest = whole * 1.05 ** killed.total()  # on a machine that has become slower, rounds must still end
        timer = threading.Timer(choose.uniform(0, choose.choice((0.2, 0.5, 1.0)) * longest), _kill_group, (pid,))
        timer.start()
        code = forks.wait(pid)
        timer.cancel()
        assert code in (0, KILLED), f"exit code {code}: {forks.output(pid)}"
        if code == KILLED:
            killed[fault.split(":")[0] or "random"] += 1
    return killed


def _data(path: Path, rows: int, choose: random.Random) -> Path:
    lines = (ROOT / "examples" / "data" / "chats.jsonl").read_text().splitlines()
    with path.open("w") as file:
        for number in range(rows):
            file.write(lines[number % len(lines)].replace("content", "content", 1)[:-1])
            file.write(f', "number": {choose.randrange(10**9)}}}\n')
    return path


def _split(data: Path, folder: Path) -> Path:
    folder.mkdir()
    for number, line in enumerate(data.read_bytes().splitlines(keepends=True)):
        with (folder / f"{number // 10:06}.jsonl").open("ab") as file:
            file.write(line)
    return folder


def _build(forks: Forks, data: Path, cache: Path, workers: int) -> tuple[int, str]:
    pid = _start(forks, data, cache, workers, "")
    return forks.wait(pid), forks.output(pid)


def _start(forks: Forks, data: Path, cache: Path, workers: int, fault: str) -> int:
    command = ("prepare", data, "--tokenizer", ROOT / "examples" / "tokenizer", "--cache", cache, "--workers", workers)
    template = data.parent / "template.jinja"
    faithful = ("--turns", "faithful", "--template", template) if template.exists() else ()
    return forks.start(*command, *faithful, fault=fault, workers=True)


def _kill_group(pid: int) -> None:
    """Kill a build and its workers; a build that has not made its group yet is killed alone."""
    with contextlib.suppress(ProcessLookupError):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
