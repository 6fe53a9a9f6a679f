"""What a runner is: the part of a build that runs slices somewhere.

`local` has the runners of one machine, `ray` the one of a cluster. A runner decides only who prepares a slice;
`sharing` decides which slices a build takes, and a shard has the same bytes no matter which worker writes it.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.build.progress import SliceReport
from penstock.build.workers.process import Task
from penstock.errors import WorkerError
from penstock.prepare.recipe import Recipe
from penstock.store.cache import Cache

OnReport = Callable[[Task, SliceReport], None]
OnRetry = Callable[[Sequence[Task], str], None]  # the slices of a worker, and how it died


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that all workers of a build share."""

    recipe: Recipe
    cache: Cache
    tokenizer_json: bytes
    fast: bool
    size: int = 0  # of the sources on disk; 0 if only some of their rows are taken

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as they are sent to a worker, which finds the tokenizer in the cache."""
        return {"recipe": self.recipe.as_json(), "cache": list(self.cache.place), "fast": self.fast, "size": self.size}


class SliceRunner(Protocol):
    """Runs slices. Workers start with the first task and stay until the runner is closed."""

    @property
    def workers(self) -> int:
        """Number of workers."""

    @property
    def nodes(self) -> int:
        """Number of machines they are on; 0 if the runner uses this one only."""

    def run(self, tasks: Iterator[Task], on_report: OnReport, on_retry: OnRetry) -> None:
        """Runs all tasks, drawing each when a worker is ready for it. The callbacks are never run concurrently."""

    def preview(self, rows: Sequence[bytes]) -> str:
        """What to say about both modes of turns, from these rows."""

    def close(self) -> None:
        """Stops all workers."""


# ---- limits ----------------------------------------------------------------------------------------------------------
#
# Computes how many workers this process may use, from CPU affinity, cgroup CPU quota and available memory.


WORKER_BYTES = 600 << 20
LEAST_ADDRESSES = 512 << 20  # bytes of virtual memory, below which libraries can't be loaded
_CGROUP, _OWN_GROUPS, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")


def worker_count(asked: str) -> tuple[int, str]:
    """Resolves `--workers` to a number; also returns a notice if the requested number was reduced."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= limit < LEAST_ADDRESSES:  # libraries would abort in the middle of a build
        raise WorkerError(
            f"the address space of a process is limited to {limit >> 20} MB, and Penstock needs "
            f"{LEAST_ADDRESSES >> 20}. Raise the limit: ulimit -v {LEAST_ADDRESSES >> 9}, or unlimited."
        )
    cores, fitting = _limits()
    most = min(cores, fitting)
    if asked == "auto" or int(asked) <= most:
        return (most if asked == "auto" else int(asked)), ""
    why = "cores this process may use" if cores <= fitting else "workers that fit in the free memory"
    return most, f"--workers {asked} is capped at {most}, the number of {why}"


def _limits() -> tuple[int, int]:
    """Returns the number of usable cores, and of workers that fit in the free memory."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    if quota is not None:
        cpus = min(cpus, max(1, math.floor(quota)))
    memory = _memory_left()
    return max(1, cpus), 1 << 30 if memory is None else max(1, memory // WORKER_BYTES)


def _folders(controller: str) -> list[Path]:
    """Returns this process's cgroup folders with a controller, from its own up to the root, for cgroup v2 and v1.

    In a container the own path may name a folder that is only visible outside of it; then the root is the container's.
    """
    found: list[Path] = []
    for line in (_read(_OWN_GROUPS) or "").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = [_CGROUP / controllers, _CGROUP / controller] if controllers else [_CGROUP, _CGROUP / "unified"]
        for root in dict.fromkeys(roots):
            folder = root / own.strip("/")
            found += [place for place in (folder, *folder.parents) if place.is_relative_to(root)]
    return list(dict.fromkeys(found))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _cpu_quota() -> float | None:
    quotas: list[float] = []
    for folder in _folders("cpu"):
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
        quota_v1, period_v1 = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_v1 and period_v1:
            quotas.append(quota_v1 / period_v1)
    return min(quotas, default=None)


def _memory_left() -> int | None:
    """Returns the free bytes, limited by this process's cgroups and the machine."""
    free = [left for folder in _folders("memory") if (left := _left_in_group(folder)) is not None]
    for line in (_read(_MEMINFO) or "").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) << 10)
    return min(free, default=None)


def _left_in_group(folder: Path) -> int | None:
    """Returns the bytes left in a cgroup; None if it has no limit. File pages not used lately count as free."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for name in names if (limit := _number(folder / name)) is not None]
    used = _number(folder / "memory.current")
    used = _number(folder / "memory.usage_in_bytes") if used is None else used
    if not limits or used is None:
        return None
    counts = dict(line.split()[:2] for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
    reclaimable = counts.get("total_inactive_file") or counts.get("inactive_file") or "0"  # v1: with its subgroups
    return max(0, min(limits) - used + int(reclaimable))
