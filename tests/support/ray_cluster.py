"""A Ray cluster of several nodes on the loopback interface, whose nodes can be removed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.child import environment

PATIENCE = 120.0  # seconds


class LoopbackCluster:
    """The process of `loopback_cluster.py`."""

    def __init__(self, nodes: int, folder: str) -> None:
        script = Path(__file__).parent / "loopback_cluster.py"
        command = [sys.executable, script, str(nodes), folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self._read()

    def remove(self, node: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"remove {node}\n")
        self.process.stdin.flush()
        self._read()

    def _read(self) -> None:
        assert self.process.stdout is not None
        state = json.loads(self.process.stdout.readline())
        self.address, self.raylets = state["address"], state["raylets"]

    def worker(self, node: int) -> int:
        """The process id of the worker on a node, once it is preparing a slice."""
        found: list[int] = []

        def is_busy() -> bool:
            found.extend(
                pid for pid, parent, name in self.workers() if parent == self.raylets[node] and ".prep" in name
            )
            return bool(found)

        wait(is_busy)
        return found[0]

    def workers(self) -> list[tuple[int, int, str]]:
        """The processes of all workers."""
        return [found for found in processes() if found[1] in self.raylets and "RaySlot" in found[2]]

    def close(self) -> None:
        self.process.communicate(timeout=PATIENCE)


def processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent and command line of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                yield int(folder.name), parent, (folder / "cmdline").read_text()
            except OSError:
                continue  # ended meanwhile


def wait(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
