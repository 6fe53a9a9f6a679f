"""A cache in an object store, measured against a real S3 server (moto's) on loopback.

    python -m benchmarks.remote crash [--builders 8] [--kills 30] [--rows 3000] [--seed 0]
    python -m benchmarks.remote feed [--latency 0.03] [--bandwidth 20e6] [--step 0.2] [--shards 240] [--steps 120]

`crash`: builders race for one cache, each with its own local tier, and are killed at random times and commit steps and
started again, until there were enough kills and all have finished. Then the objects must be those of an undisturbed
build in a folder, byte for byte, with nothing left over.

`feed`: a loader with a cold local tier, behind a proxy that delays every answer and limits the bytes of all of them
together. A step takes `--step` seconds. Prints the seconds waited for the view, for the first batch and for each later
one, the bytes read, and the bandwidth that the first steps need.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import penstock as ps
from benchmarks.crash import KILLED, ROOT, SLICES, _data, _kill_group
from penstock.store.cache import open_cache
from penstock.store.object_storage import ObjectStorage
from penstock.store.transfer import copy_dataset
from tests.support.fork_server import cut_small
from tests.support.forks import Forks, result
from tests.support.object_servers import KEYS, Proxy, make_bucket, proxied, s3_server

STEPS = (
    "claim.create", "claim.release", "lease.put", "remote.index.put", "remote.shard.put", "remote.manifest.open",
    "remote.manifest.put", "remote.notes.put", "index.rename", "copy.write", "note.rename", "manifest.rename",
)  # fmt: skip


def main() -> None:
    """Runs one of the two and prints its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("crash", "feed"))
    parser.add_argument("--builders", type=int, default=8)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--rows", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--bandwidth", type=float, default=20e6)
    parser.add_argument("--step", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--shards", type=int, default=240)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="penstock-remote-"))
    try:
        with s3_server() as endpoint, proxied(endpoint) as proxy:
            use(proxy, endpoint, work)
            if args.what == "crash":
                found = crash(proxy, work, args.builders, args.kills, args.rows, random.Random(args.seed))
            else:
                cut_small(SLICES)
                found = feed(proxy, work, args)
            print(json.dumps(found, indent=2))
    finally:
        shutil.rmtree(work)


def use(proxy: Proxy, endpoint: str, work: Path) -> None:
    """Point this process and its children at the proxy, with an empty bucket and a state of their own."""
    proxy.bucket = "bench"
    make_bucket(endpoint, proxy.bucket)
    os.environ.update(KEYS | {"AWS_ENDPOINT_URL": proxy.endpoint, "XDG_STATE_HOME": str(work / "state")})


# -- racing builders ----------------------------------------------------------------------------------------------


class Race:
    """Builders of one dataset, killed and started again."""

    def __init__(self, forks: Forks, data: Path, url: str, work: Path, kills: int, choose: random.Random) -> None:
        self._forks, self._data, self._url, self._work = forks, data, url, work
        self._left, self._choose = kills, choose
        self._lock = threading.Lock()  # the fork server answers one question at a time
        self.kills: Counter[str] = Counter()
        self.seconds = 1.0  # of an undisturbed build

    def builder(self, number: int) -> None:
        """One machine: builds until a build completes."""
        code = KILLED
        while code == KILLED:
            fault, delay = self._plan()
            pid = self._start(number, fault)
            timer = threading.Timer(delay, _kill_group, (pid,)) if delay else None
            if timer is not None:
                timer.start()
            code = self._wait(pid)
            if timer is not None:
                timer.cancel()
            with self._lock:
                assert code in (0, KILLED), f"exit code {code}: {self._forks.output(pid)}"
                if code == KILLED:
                    self.kills[fault.split(":")[0] or "random"] += 1

    def _plan(self) -> tuple[str, float]:
        """Where and when the next build dies; neither, once there were enough kills."""
        with self._lock:
            if self._left <= 0:
                return "", 0.0
            self._left -= 1
            if self._choose.random() < 0.5:
                return f"{self._choose.choice(STEPS)}:{self._choose.randint(1, 3)}", self.seconds
            return "", self._choose.uniform(0.2, 1.0) * self.seconds

    def _start(self, number: int, fault: str) -> int:
        command = ("prepare", self._data, "--tokenizer", ROOT / "examples" / "tokenizer", "--cache", self._url)
        with self._lock:
            return self._forks.start(*command, "--local-cache", self._work / f"tier-{number}", "--no-fast", fault=fault)

    def _wait(self, pid: int) -> int:
        """Wait without blocking the fork server."""
        while Path(f"/proc/{pid}").exists() and not _is_zombie(pid):
            time.sleep(0.02)
        with self._lock:
            return self._forks.wait(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def crash(proxy: Proxy, work: Path, builders: int, kills: int, rows: int, choose: random.Random) -> dict[str, object]:
    """Race builders for one cache; fails if the result differs from that of an undisturbed build in a folder."""
    data = _data(work / "rows.jsonl", rows, choose)
    (work / "logs").mkdir()
    forks = Forks(work / "logs")  # cuts small slices
    url = f"s3://{proxy.bucket}/race"
    try:
        began = time.monotonic()
        build = ("prepare", data, "--tokenizer", ROOT / "examples" / "tokenizer", "--cache", work / "folder")
        code, said = forks.run(*build, "--no-fast")
        assert code == 0, said
        race = Race(forks, data, url, work, kills, choose)
        race.seconds = time.monotonic() - began
        proxy.clear()
        began = time.monotonic()
        threads = [threading.Thread(target=race.builder, args=(number,)) for number in range(builders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        code, said = forks.run(*build[:-1], url, "--local-cache", work / "tier-0", "--no-fast", "--json")
        assert code == 0, said
    finally:
        forks.close()
    expected, found = result(work / "folder"), objects(url)
    assert found == expected, "the objects differ from the files of an undisturbed build"
    assert left_over(url) == [], left_over(url)
    shards = sum(path.endswith(".arrow") for path in expected)
    encoded = sum(r.method == "PUT" and r.path.endswith(".index") for r in proxy.requests)
    return {
        "builders": builders, "kills": sum(race.kills.values()), "by_step": race.kills, "shards": shards,
        "shards_encoded": encoded, "identical": True, "left_over": 0, "seconds": round(seconds, 1),
        "requests": len(proxy.requests),
    }  # fmt: skip


def objects(url: str) -> dict[str, bytes]:
    """The shards and manifests in a store."""
    folder = ObjectStorage(url)
    paths = [entry.path for entry in folder.entries("") if entry.path.endswith((".arrow", "manifest.json"))]
    return {path: folder.read(path) or b"" for path in paths}


def left_over(url: str) -> list[str]:
    """The objects that a finished build must not leave."""
    kinds = ("claims/", "leases/", "collections/", "tmp/")
    paths = [entry.path for entry in ObjectStorage(url).entries("")]
    return [path for path in paths if path.startswith(kinds) or path.endswith(".bad")]


# -- a cold local tier --------------------------------------------------------------------------------------------


def feed(proxy: Proxy, work: Path, args: argparse.Namespace) -> dict[str, object]:
    """Train on nothing from a cold local tier; returns the seconds waited."""
    data = work / "long.jsonl"
    _long_rows(data, args.shards, random.Random(args.seed))
    local = ps.prepare(data, tokenizer=ROOT / "examples" / "tokenizer", cache=work / "folder", progress=False)
    pushed = copy_dataset(local, open_cache(f"s3://{proxy.bucket}/feed", local=work / "push"))
    proxy.clear()
    proxy.latency, proxy.bandwidth = args.latency, args.bandwidth
    clock = time.monotonic
    began = clock()
    view = ps.open(pushed.address, local_cache=work / "cold").view(max_length=4096)
    opened, index_bytes = clock() - began, proxy.bytes_read
    loader = view.loader(batch_size=8, seed=args.seed, epochs=1, prefetch=2)
    steps = min(args.steps, len(loader))
    began, waits = clock(), []
    batches = iter(loader)
    for _ in range(steps):
        asked = clock()
        next(batches)
        waits.append(clock() - asked)
        time.sleep(args.step)
    total = clock() - began
    batches.close()
    fresh = _new_bytes(loader, steps)
    later = waits[1:]
    return {
        "latency": args.latency, "bandwidth": args.bandwidth, "step": args.step, "steps": steps,
        "shards": len(local.shards), "bytes": sum(local.manifest.shards.bytes), "bytes_read": proxy.bytes_read,
        "index_bytes": index_bytes, "seconds_open_and_view": round(opened, 3),
        "seconds_first_batch": round(waits[0], 3),
        "wait_median": round(statistics.median(later), 4), "wait_p99": round(sorted(later)[int(0.99 * len(later))], 4),
        "wait_max": round(max(later), 4), "wait_total": round(sum(later), 3), "seconds": round(total, 2),
        "bytes_first_batch": fresh[0], "bandwidth_needed": round(max(fresh[1:11]) / args.step),
        "waits": [round(wait, 3) for wait in waits],
    }  # fmt: skip


def _new_bytes(loader: ps.Loader, steps: int) -> list[int]:
    """Bytes of shards that each step is the first to need."""
    seen: set[int] = set()
    found = []
    for step in range(steps):
        (part,) = loader._assemble.shards(step)
        new = set(part.shards) - seen
        seen |= new
        found.append(sum(part.dataset.shards.bytes[shard] for shard in new))
    return found


def _long_rows(path: Path, shards: int, choose: random.Random) -> None:
    """Conversations of a few thousand tokens, so that a batch needs few shards."""
    words = (ROOT / "README.md").read_text().split()
    with path.open("w") as file:
        for _ in range(shards * 12):
            text = " ".join(choose.choices(words, k=1000))
            turns = [{"role": "user", "content": text[:200]}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    main()
