"""Flips random bits in the files of a cache, one at a time, and checks what is served afterwards.

    python -m tools.bit_flips [--flips 2000] [--seed 0] [--jobs 2]

Each flip is made in a fresh copy of a small cache; a separate process then reads the dataset as is, verifies the cache,
and prepares again. Reading may raise one of our errors or return what the damaged bytes say, but must never crash the
interpreter or exhaust memory. If `verify` finds nothing, and after `prepare`, the tokens and masks must be those of the
undamaged cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.api import Dataset
from penstock.build.options import prepare_options
from penstock.build.run import Builder
from penstock.errors import PenstockError
from penstock.store import claims
from penstock.store.cache import Cache
from penstock.store.dataset import open_dataset
from penstock.store.verify import verify_cache
from tests.support.fork_server import cut_small
from tests.support.forks import ROOT, result

ROWS = 24
MEMORY = 8 << 30  # limit on the address space of a process
KINDS = {
    "shard": "shards/*/*.arrow",
    "manifest": "datasets/*/manifest.json",
    "shard's note": "shards/*/*.json",
    "dataset's notes": "datasets/*/notes.json",
    "memo": "memo/*/*.json",
    "claim": "claims/*",
    "tokenizer": "tokenizers/*.json",
}
DEAD_WRITER = "elsewhere-00000000.1.1"  # on another host, so that its claim must expire


class BitFlip(NamedTuple):
    """One bit of one file."""

    kind: str
    path: str  # in the cache
    byte: int
    bit: int


class BitFlips:
    """A pristine cache, and the tokens it serves."""

    def __init__(self, work: Path) -> None:
        self._work, self._pristine = work, work / "pristine"
        self._source = work / "rows.jsonl"
        rows = (ROOT / "examples" / "data" / "chats.jsonl").read_bytes().splitlines(keepends=True)[:ROWS]
        self._source.write_bytes(b"".join(rows))
        os.utime(self._source, (1_700_000_000, 1_700_000_000))
        cut_small()
        claims.EXPIRY = 0.1
        while not list(self._pristine.glob(KINDS["memo"])):  # files that were just written are not memoised
            self._served = _served(self._prepared(self._pristine))
        self._expected = result(self._pristine)
        (self._pristine / "claims" / next(self._pristine.glob(KINDS["shard"])).stem).write_text(DEAD_WRITER)

    def _prepared(self, cache: Path) -> Dataset:
        options = {"tokenizer": ROOT / "examples" / "tokenizer", "cache": cache, "fast": False}
        stored = Builder([self._source], prepare_options(options), None).run().dataset
        return Dataset(stored.cache, stored.manifest)

    def chosen(self, count: int, choose: random.Random) -> Iterator[BitFlip]:
        """Random flips, equally many for each kind of file."""
        files = {kind: sorted(self._pristine.glob(pattern)) for kind, pattern in KINDS.items()}
        for number in range(count):
            kind = list(KINDS)[number % len(KINDS)]
            path = choose.choice(files[kind])
            byte, bit = choose.randrange(path.stat().st_size), choose.randrange(8)
            yield BitFlip(kind, str(path.relative_to(self._pristine)), byte, bit)

    def try_one(self, flip: BitFlip) -> str:
        """Returns how a flip ended: `found` by verify, or `harmless`; anything else is a bug."""
        cache = Path(tempfile.mkdtemp(dir=self._work))
        try:
            shutil.copytree(self._pristine, cache, dirs_exist_ok=True)
            data = bytearray((cache / flip.path).read_bytes())
            data[flip.byte] ^= 1 << flip.bit
            (cache / flip.path).write_bytes(data)
            return _in_a_process(lambda: self._outcome(cache))
        finally:
            shutil.rmtree(cache)

    def _outcome(self, cache: Path) -> str:
        try:
            _served(self._opened(cache))
        except MemoryError:
            raise
        except Exception:
            pass  # any error is fine as long as the interpreter survives
        findings = verify_cache(Cache(cache)).findings
        if not findings:
            _compare(_served(self._opened(cache)), self._served, "after verify found nothing")
        _compare(_served(self._prepared(cache)), self._served, "after prepare")
        dataset = self._opened(cache)
        with contextlib.suppress(PenstockError):
            dataset.conversation(0)
        left = [name for name, data in result(cache).items() if self._expected.get(name) != data]
        assert not left or not findings, f"still damaged after verify and prepare: {left}"
        return "found" if findings else "harmless"

    def _opened(self, cache: Path) -> Dataset:
        (folder,) = (cache / "datasets").iterdir()
        stored = open_dataset(folder)
        return Dataset(stored.cache, stored.manifest)


def _served(dataset: Dataset) -> list[Any]:
    """All tokens and masks that training would see, and their source rows."""
    view = dataset.view()
    return [
        (view[i].input_ids.tolist(), view[i].loss_mask.tolist(), tuple(dataset.locate(i))) for i in range(len(view))
    ]


def _compare(found: list[Any], expected: list[Any], when: str) -> None:
    assert found == expected, f"different tokens {when}"


def _in_a_process(act: Callable[[], str]) -> str:
    """Runs `act` in a fork and returns its answer, or how the process died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            answer = act()
        except BaseException:
            answer = f"WRONG: {traceback.format_exc()}"
        with os.fdopen(writer, "w") as out:
            out.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer if code == 0 else f"WRONG: the interpreter died: {code}"


def main() -> None:
    """Tries random flips; exits with 1 if one had a result it must not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    np.seterr(all="ignore")
    work = Path(tempfile.mkdtemp(prefix="penstock-flips-"))
    try:
        flips = BitFlips(work)
        todo = list(flips.chosen(args.flips, random.Random(args.seed)))  # noqa: S311
        with ThreadPoolExecutor(args.jobs) as pool:
            ended = list(pool.map(flips.try_one, todo))
    finally:
        shutil.rmtree(work)
    wrong = [(flip, how) for flip, how in zip(todo, ended, strict=True) if how not in ("found", "harmless")]
    for flip, how in wrong:
        print(flip, how, file=sys.stderr)
    counts = Counter(f"{flip.kind}: {how.split(':')[0]}" for flip, how in zip(todo, ended, strict=True))
    print(json.dumps({"flips": len(todo), "wrong": len(wrong), "ended": dict(sorted(counts.items()))}, indent=2))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
