"""Scenarios on two NFS mounts of one folder; run by test_nfs.py inside the virtual machine of tools/nfs.py.

    python -m tools.nfs python -m tests.store.nfs_guest 10 [SCENARIO…]

Each function is a scenario of some rounds that raises if something is wrong. Alpha and beta are hosts by their names,
and have a mount each. The last line of output is JSON: what each scenario counted, or its traceback.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.store.test_crashes import KILLED, STEPS
from tests.support.forks import ROOT, Forks, leftovers, result
from tools.nfs import MOUNTS

DATA, TOKENIZER = ROOT / "examples" / "data" / "chats.jsonl", ROOT / "examples" / "tokenizer"
WORK = Path("/dev/shm/work")
ENDS = ("open", "write", "sync", "rename")
READ = """
import ctypes, sys, time
from pathlib import Path
from penstock.store.dataset import open_dataset

PAGE, DONTNEED = 4096, 4
dataset, stop = open_dataset(sys.argv[1]), Path(sys.argv[2])
libc = ctypes.CDLL(None)


def forget(array):  # the pages of a mapped file, so that they are read from the server again
    begin = array.ctypes.data // PAGE * PAGE
    length = array.ctypes.data + array.nbytes - begin
    assert libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), DONTNEED) == 0


def summed(columns):
    for shard in columns:
        forget(shard.ids)
    Path("/proc/sys/vm/drop_caches").write_text("1")
    return [int(shard.ids.astype("int64").sum()) for shard in columns]


columns = [dataset.shards.columns(number) for number in range(len(dataset.shards))]
sums = summed(columns)
print("mapped", flush=True)
passes = 0
while not passes or not stop.exists():
    assert summed(columns) == sums
    fresh = open_dataset(sys.argv[1])
    assert summed([fresh.shards.columns(number) for number in range(len(sums))]) == sums
    passes += 1
    time.sleep(0.05)
assert summed(columns) == sums
print(passes)
"""


class Hosts:
    """Two hosts, and the result of an undisturbed build."""

    def __init__(self) -> None:
        WORK.mkdir()
        self.alpha, self.beta = (Forks(self._logs(name), name) for name in ("alpha", "beta"))
        self.data = WORK / "chats.jsonl"
        self.data.write_bytes(b"".join(DATA.read_bytes().splitlines(keepends=True)[:120]))
        os.utime(self.data, (1_700_000_000, 1_700_000_000))
        self.good(self.alpha, *self.command(WORK / "undisturbed"))
        self.expected = result(WORK / "undisturbed")
        began = time.monotonic()
        self.good(self.alpha, *self.command(MOUNTS[0] / "timed"))
        self.whole = time.monotonic() - began

    def _logs(self, name: str) -> Path:
        folder = WORK / f"logs-{name}"
        folder.mkdir()
        return folder

    def command(self, cache: Path) -> tuple[object, ...]:
        return "prepare", self.data, "--tokenizer", TOKENIZER, "--cache", cache, "--no-fast"

    def good(self, host: Forks, *command: object, **more: Any) -> str:
        code, output = host.run(*command, **more)
        assert code == 0, output
        return output

    def check(self, name: str) -> None:
        """Check that both hosts see the undisturbed result, and nothing else."""
        for mount in MOUNTS:
            assert settled(lambda place=mount / name: result(place) == self.expected), f"{mount}: another result"
            assert settled(lambda place=mount / name: leftovers(place) == []), leftovers(mount / name)


def settled(holds: Callable[[], bool]) -> bool:
    """Wait for a condition: another host's changes become visible when attributes are revalidated."""
    for _ in range(40):
        if holds():
            return True
        time.sleep(0.25)
    return False


def three_race(hosts: Hosts, rounds: int) -> dict[str, int]:
    """Three concurrent builds on two hosts."""
    for number in range(rounds):
        name = f"race-{number}"
        places = [(hosts.alpha, MOUNTS[0]), (hosts.beta, MOUNTS[1]), (hosts.beta, MOUNTS[1])]
        running = [(host, host.start(*hosts.command(mount / name))) for host, mount in places]
        for host, pid in running:
            assert host.wait(pid) == 0, host.output(pid)
        hosts.check(name)
    return {"builders": 3 * rounds}


def kills(hosts: Hosts, rounds: int) -> dict[str, int]:
    """Kills on one host at commit steps and random times; the other continues once the dead claims expire."""
    seed, done = random.SystemRandom().randrange(1 << 32), 0
    choose = random.Random(seed)
    steps = [step for step in STEPS if step.split(".")[0] in ("claim", "note", "shard")]
    for number in range(rounds):
        name = f"kills-{number}"
        for fault in (f"{choose.choice(steps)}:{choose.randint(1, 3)}", "", "", f"lease.{choose.choice(ENDS)}:1"):
            pid = hosts.alpha.start(*hosts.command(MOUNTS[0] / name), fault=fault)
            if not fault:
                time.sleep(choose.uniform(0, 0.4 * hosts.whole))
                hosts.alpha.kill(pid)
            code = hosts.alpha.wait(pid)
            assert code in (0, KILLED), hosts.alpha.output(pid)
            done += code == KILLED
        if number == 0:  # claims of the other host expire sooner than in two minutes
            hosts.good(hosts.beta, *hosts.command(MOUNTS[1] / name), expiry=2.0)
        hosts.good(hosts.alpha, *hosts.command(MOUNTS[0] / name))
        hosts.check(name)
    assert done >= 3 * rounds, f"{done} kills, seed {seed}"
    return {"kills": done, "seed": seed}


def gc_and_force_beside_a_reader(hosts: Hosts, rounds: int) -> dict[str, int]:
    """Beta has all shards mapped while alpha forces builds and collects garbage."""
    name, stop = "reader", WORK / "stop"
    hosts.good(hosts.alpha, *hosts.command(MOUNTS[0] / name))
    (dataset,) = (MOUNTS[1] / name / "datasets").iterdir()
    reader = subprocess.Popen([sys.executable, "-c", READ, dataset, stop], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "mapped\n"
    for _ in range(rounds):
        hosts.good(hosts.alpha, *hosts.command(MOUNTS[0] / name), "--force")
        hosts.good(hosts.alpha, "cache", "gc", "--older-than", "0s", "--cache", MOUNTS[0] / name)
    stop.touch()
    output, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0, f"the reader ended with {reader.returncode}"
    hosts.check(name)
    return {"forced builds": rounds, "passes of the reader": int(output)}


def gc_beside_a_builder(hosts: Hosts, rounds: int) -> dict[str, int]:
    """Beta reuses old unreferenced shards while alpha's gc is about to delete them."""
    name, collected = "collected", 0
    hosts.good(hosts.beta, *hosts.command(MOUNTS[1] / name))
    for _ in range(rounds):
        (dataset,) = (MOUNTS[0] / name / "datasets").iterdir()
        shutil.rmtree(dataset)
        builder = hosts.beta.start(*hosts.command(MOUNTS[1] / name))
        collector = hosts.alpha.start("cache", "gc", "--older-than", "0s", "--json", "--cache", MOUNTS[0] / name)
        assert hosts.alpha.wait(collector) == 0, hosts.alpha.output(collector)
        assert hosts.beta.wait(builder) == 0, hosts.beta.output(builder)
        collected += json.loads(hosts.alpha.output(collector))["shards"]
        hosts.check(name)
    return {"builds": rounds, "shards deleted": collected}


SCENARIOS = (three_race, kills, gc_and_force_beside_a_reader, gc_beside_a_builder)


def main() -> None:
    """Run all scenarios, or those given."""
    rounds = int(sys.argv[1])
    hosts = Hosts()
    found: dict[str, Any] = {}
    for scenario in SCENARIOS:
        if sys.argv[2:] and scenario.__name__ not in sys.argv[2:]:
            continue
        began = time.monotonic()
        try:
            found[scenario.__name__] = scenario(hosts, rounds) | {"seconds": round(time.monotonic() - began, 1)}
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
