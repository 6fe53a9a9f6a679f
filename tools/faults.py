"""Fails each system call of a build in turn, once or persistently, and checks how the build ends.

    python -m tools.faults [--errors EIO ENOSPC ESTALE EINTR] [--every 1] [--jobs 2]

Counts the calls of a small build on the files of its cache, source and tokenizer (see faults.c), then repeats the build
in a new cache for each of them, with that call failing. It must either succeed with the same bytes as an undisturbed
build or fail with a clear error (no traceback, exit code 1). Either way no existing shard may differ, and the same
command without a fault must then succeed and leave nothing behind.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.forks import ROOT, Forks, leftovers, result

ERRORS = ("EIO", "ENOSPC", "ESTALE", "EINTR")
ROWS = 24
LASTING = {"EINTR": 20}  # in a row: Python itself retries interrupted calls


class Fault(NamedTuple):
    """The `at`-th call fails; with `lasting`, so do all later ones."""

    at: int
    error: str
    lasting: bool


class FaultFailure(Exception):
    """A build ended in a way it must not."""


class Faults:
    """A build and the calls it makes. Not thread-safe."""

    def __init__(self, work: Path, shim: Path) -> None:
        work.mkdir()
        self._work = work
        (work / "logs").mkdir()
        self._forks = Forks(work / "logs", preload=shim)
        self._inputs = work / "inputs"
        shutil.copytree(ROOT / "examples" / "tokenizer", self._inputs / "tokenizer")
        rows = (ROOT / "examples" / "data" / "chats.jsonl").read_bytes().splitlines(keepends=True)[:ROWS]
        (self._inputs / "rows.jsonl").write_bytes(b"".join(rows))
        os.utime(self._inputs / "rows.jsonl", (1_700_000_000, 1_700_000_000))
        code, output = self._build(Fault(0, "EIO", False))
        found = re.search(r"^calls: (\d+)$", output, re.MULTILINE)
        if code != 0 or found is None:
            raise FaultFailure(f"the undisturbed build failed: {output}")
        self.calls = int(found[1])
        self._expected = result(self._cache)

    @property
    def _cache(self) -> Path:
        return self._work / "cache"

    def _build(self, fault: Fault | None) -> tuple[int, str]:
        source, tokenizer = self._inputs / "rows.jsonl", self._inputs / "tokenizer"
        env = {}
        if fault is not None:
            times = LASTING.get(fault.error, 10**9) if fault.lasting else 1
            order = (fault.at, getattr(errno, fault.error), times, self._cache, self._inputs)
            env["PENSTOCK_FAULTS"] = ":".join(map(str, order))
        return self._forks.run(
            "prepare", source, "--tokenizer", tokenizer, "--cache", self._cache, "--no-fast", env=env
        )

    def try_one(self, fault: Fault) -> str:
        """Returns how a build with a fault ended, `done` or `error`; raises FaultFailure for anything else."""
        shutil.rmtree(self._cache, ignore_errors=True)
        code, output = self._build(fault)
        kind = {0: "done", 1: "error"}.get(code, "crash")
        if kind == "crash" or "Traceback" in output:
            raise FaultFailure(f"{fault}: exit code {code}\n{output}")
        if "permission denied" in output.lower():
            raise FaultFailure(f"{fault} was taken for a lack of permission\n{output}")
        left = result(self._cache)
        damaged = [name for name, data in left.items() if self._expected.get(name) != data]
        if damaged or (kind == "done" and left != self._expected):
            raise FaultFailure(f"{fault}: {kind}, but {damaged or 'files are missing'}\n{output}")
        code, again = self._build(None)
        if code != 0 or result(self._cache) != self._expected or leftovers(self._cache):
            raise FaultFailure(f"{fault}: {output}\nthen, run again: {again}\nleft: {leftovers(self._cache)}")
        return kind

    def close(self) -> None:
        self._forks.close()


def compiled(folder: Path) -> Path:
    """Compiles the library to preload."""
    shim = folder / "faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(Path(__file__).with_suffix(".c")), "-ldl"]
    subprocess.run(command, check=True)
    return shim


def faults(calls: int, errors: Iterable[str], every: int) -> Iterator[Fault]:
    """All faults, or every n-th. Calls vary fastest, so that a sample has every error, once and lasting."""
    each = itertools.product(errors, (False, True), range(1, calls + 1))
    return itertools.islice((Fault(at, error, lasting) for error, lasting, at in each), 0, None, every)


def main() -> None:
    """Tries all faults; exits with 1 if a build ended in a way it must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", nargs="+", default=ERRORS, choices=ERRORS)
    parser.add_argument("--every", type=int, default=1, help="try only every n-th fault")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="penstock-faults-"))
    try:
        shim = compiled(work)
        sides = [Faults(work / str(number), shim) for number in range(args.jobs)]
        todo = list(faults(sides[0].calls, args.errors, args.every))
        with ThreadPoolExecutor(args.jobs) as pool:
            parts = pool.map(lambda number: _try_all(sides[number], todo[number :: args.jobs]), range(args.jobs))
            found = [outcome for part in parts for outcome in part]
    finally:
        shutil.rmtree(work)
    wrong = [outcome for _, outcome in found if outcome not in ("done", "error")]
    ended = Counter(
        f"{fault.error}, {'lasting' if fault.lasting else 'once'}: {outcome if len(outcome) < 6 else 'WRONG'}"
        for fault, outcome in found
    )
    for text in wrong:
        print(text, file=sys.stderr)
    print(json.dumps({"calls": sides[0].calls, "faults": len(found), "ended": dict(sorted(ended.items()))}, indent=2))
    sys.exit(bool(wrong))


def _try_all(side: Faults, todo: list[Fault]) -> list[tuple[Fault, str]]:
    found: list[tuple[Fault, str]] = []
    for fault in todo:
        try:
            found.append((fault, side.try_one(fault)))
        except FaultFailure as wrong:
            found.append((fault, str(wrong)))
    side.close()
    return found


if __name__ == "__main__":
    main()
