"""Traces one row through the code, from reading its slice to the report of the committed shard.

    python -m tools.walk [--turns faithful] [--list] [--json]

Prepares a row of chat in this process, once to fill caches and once more in a new cache under `sys.setprofile`. Prints,
with the spot check and without it:

- functions: distinct named functions of the package that were entered
- files: the modules they are in
- packages: how often a call enters another top-level folder than the call before it; modules directly in the package
  count as one folder
- stages: the same with the folders of `prepare/` counted separately, so that a common parent hides no switch

The figures repeat exactly. `--list` prints the functions in the order of their first calls; `*` marks the spot check.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import penstock as ps
from penstock.build.progress import Progress
from penstock.build.slice_job import SliceJob

ROOT = Path(__file__).parent.parent
PACKAGE = f"{ROOT / 'penstock'}/"
CHECKS = ("prepare/check.py",)  # modules of the spot check
NESTED = ("prepare",)  # packages whose folders are stages
ROW = {
    "messages": [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Which river flows through Cologne?"},
        {"role": "assistant", "content": "The Rhine."},
    ]
}


class ThreadWalk:
    """Calls of functions of the package by one thread, in order, each with whether the spot check made it."""

    def __init__(self) -> None:
        self.calls: list[tuple[CodeType, bool]] = []
        self._check_depth = 0  # frames below the entry into the spot check

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile function."""
        if event == "return":
            self._check_depth = max(0, self._check_depth - 1)
        elif event == "call":
            code = frame.f_code
            ours = code.co_filename.startswith(PACKAGE)
            if self._check_depth or (ours and path_of(code).startswith(CHECKS)):
                self._check_depth += 1
            if ours:
                self.calls.append((code, self._check_depth > 0))


class Walk:
    """The calls of the thread that prepares and of the one that commits."""

    def __init__(self) -> None:
        self._threads: dict[int, ThreadWalk] = {}

    def start(self) -> None:
        """Records the calls of this thread from now on."""
        sys.setprofile(self._threads.setdefault(threading.get_ident(), ThreadWalk()).record)

    def figures(self, *, checked: bool) -> dict[str, int]:
        """The figures, with or without the spot check."""
        threads = [[code for code, by_check in t.calls if checked or not by_check] for t in self._threads.values()]
        entered = {code for calls in threads for code in calls}
        return {
            "functions": sum(not code.co_name.startswith("<") for code in entered),
            "files": len({code.co_filename for code in entered}),
            "packages": sum(switches([stage_of(code).partition("/")[0] for code in calls]) for calls in threads),
            "stages": sum(switches([stage_of(code) for code in calls]) for calls in threads),
        }

    def listing(self) -> list[str]:
        """Functions of each thread in the order of their first calls, under a heading per stage."""
        lines: list[str] = []
        for thread in self._threads.values():
            stage = None
            for code, by_check in dict.fromkeys(thread.calls):
                if stage_of(code) != stage:
                    stage = stage_of(code)
                    lines.append(f"{stage}/")
                lines.append(f"    {path_of(code)}: {code.co_qualname}{' *' if by_check else ''}")
        return lines


def path_of(code: CodeType) -> str:
    """The file of a function, relative to the package."""
    return code.co_filename.removeprefix(PACKAGE)


def stage_of(code: CodeType) -> str:
    """The folder of a function: a package, or a stage of `prepare`; "" directly in the package."""
    folders = path_of(code).split("/")[:-1]
    return "/".join(folders[: 2 if folders and folders[0] in NESTED else 1])


def switches(stages: list[str]) -> int:
    """How often the stage changes."""
    return sum(one != other for one, other in pairwise(stages))


def walk(tokenizer: Path, turns: str) -> Walk:
    """Prepares the row and records its calls from the start of its slice job until it is reported."""
    recorded = Walk()

    prepare, add = SliceJob.prepare, Progress.add

    def traced_prepare(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        recorded.start()
        commit = prepare(*args, **kwargs)

        def traced_commit() -> Any:
            recorded.start()
            try:
                return commit()
            finally:
                sys.setprofile(None)

        return traced_commit

    def traced_add(*args: Any, **kwargs: Any) -> Any:
        try:
            return add(*args, **kwargs)
        finally:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as folder:
        source = Path(folder, "row.jsonl")
        source.write_text(json.dumps(ROW) + "\n")
        SliceJob.prepare, Progress.add = traced_prepare, traced_add  # type: ignore[assignment, method-assign]
        try:
            ps.prepare(source, tokenizer=tokenizer, cache=f"{folder}/cache", workers=1, turns=turns, progress=False)
        finally:
            sys.setprofile(None)
            SliceJob.prepare, Progress.add = prepare, add  # type: ignore[method-assign]
    return recorded


def main() -> int:
    """Prints the figures of one row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "examples/tokenizer")
    parser.add_argument("--turns", default="conversation", choices=["conversation", "faithful"])
    parser.add_argument("--list", action="store_true", help="print the functions in the order of their first calls")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    walk(given.tokenizer, given.turns)
    recorded = walk(given.tokenizer, given.turns)
    figures = {"with spot check": recorded.figures(checked=True), "without": recorded.figures(checked=False)}
    if given.list:
        print("\n".join(recorded.listing()), end="\n\n")
    if given.json:
        print(json.dumps(figures, indent=2))
        return 0
    for number, (label, values) in enumerate(figures.items()):
        if number == 0:
            print(f"{'':18}" + "".join(f"{name:>11}" for name in values))
        print(f"{label:18}" + "".join(f"{value:>11}" for value in values.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
