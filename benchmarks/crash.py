"""The long crash test: kills at random times and at every commit step, with varying numbers of workers.

    python -m benchmarks.crash --kills 500 [--rows 20000] [--cache DIR] [--seed 0]

Uses real worker processes, real (but smaller) slices, and the fast engines. Each round starts with an empty cache and
is killed and rerun until it is complete; then shards and manifest must be byte-identical to an undisturbed build, and
no temporary file, claim or marker may remain.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cache.conftest import leftovers, result
from tests.cache.test_crashes import STEPS

ROOT = Path(__file__).parent.parent
RUN = (
    "import sys; from tests.cache.forks import cut_small; from penstock.build import prepare; "
    "from penstock.sources.slices import SliceSizes; cut_small(SliceSizes(50_000, 200_000, 800_000)); "
    "prepare.SMALL_BYTES = 0; from penstock.cli import main; sys.argv = ['penstock', *sys.argv[1:]]; main()"
)


def main() -> None:
    """Runs rounds until there were enough kills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=None, help="where to work; default: a temporary folder")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="penstock-crash-", dir=args.cache))
    try:
        print(json.dumps(crash(work, args.kills, args.rows, random.Random(args.seed)), indent=2))
    finally:
        shutil.rmtree(work)


def crash(work: Path, kills: int, rows: int, choose: random.Random) -> dict[str, object]:
    """Runs rounds of kills; fails if a round's result differs from the undisturbed one."""
    data = _data(work / "rows.jsonl", rows, choose)
    began = time.monotonic()
    code = _start(data, work / "reference", 2, "").wait()
    assert code == 0, "the undisturbed build failed"
    whole, expected = time.monotonic() - began, result(work / "reference")
    done = rounds = 0
    steps: dict[str, int] = {}
    while done < kills:
        cache, code = work / f"round-{rounds}", -signal.SIGKILL
        while code != 0:
            fault = f"{choose.choice(STEPS)}:{choose.randint(1, 6)}" if choose.random() < 0.5 else ""
            process = _start(data, cache, choose.choice((1, 2, 3)), fault)
            code = _wait_or_kill(process, choose.uniform(0, 1.3 * whole))
            assert code in (0, -signal.SIGKILL), f"exit code {code}"
            done += code != 0
            steps[fault.split(":")[0] or "random"] = steps.get(fault.split(":")[0] or "random", 0) + (code != 0)
        assert _start(data, cache, 1, "").wait() == 0
        assert result(cache) == expected, f"round {rounds} differs; look at {cache}"
        assert leftovers(cache) == [], leftovers(cache)
        shutil.rmtree(cache)
        rounds += 1
        print(f"{done} kills, {rounds} rounds identical", file=sys.stderr, flush=True)
    shards = sum(name.endswith(".arrow") for name in expected)
    return {"kills": done, "rounds": rounds, "shards": shards, "undisturbed_seconds": round(whole, 1), "by_step": steps}


def _data(path: Path, rows: int, choose: random.Random) -> Path:
    lines = (ROOT / "examples" / "data" / "chats.jsonl").read_text().splitlines()
    with path.open("w") as file:
        for number in range(rows):
            file.write(lines[number % len(lines)].replace("content", "content", 1)[:-1])
            file.write(f', "number": {choose.randrange(10**9)}}}\n')
    return path


def _start(data: Path, cache: Path, workers: int, fault: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_FAULT": fault}
    command = ["prepare", str(data), "--tokenizer", str(ROOT / "examples" / "tokenizer"), "--cache", str(cache)]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *command, "--workers", str(workers)],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


if __name__ == "__main__":
    main()
