"""Computes how many workers this process may use, from CPU affinity, cgroup CPU quota and available memory."""

from __future__ import annotations

import math
import os
from pathlib import Path

WORKER_BYTES = 600 << 20
_CGROUP = Path("/sys/fs/cgroup")


def worker_count(asked: str) -> tuple[int, str]:
    """Resolves `--workers` to a number; also returns a notice if the requested number was reduced."""
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


def _folders() -> list[Path]:
    """Returns the cgroup folders of this process, from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.split("::", 1)[1] for line in lines if "::" in line), "/")
    folder = _CGROUP / own.strip("/")
    return [folder, *(p for p in folder.parents if p.is_relative_to(_CGROUP))]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cpu_quota() -> float | None:
    quotas: list[float] = []
    for folder in _folders():
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    quota_v1, period_v1 = _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota_v1 and quota_v1.isdigit() and period_v1 and period_v1.isdigit():
        quotas.append(int(quota_v1) / int(period_v1))
    return min(quotas, default=None)


def _memory_left() -> int | None:
    """Returns the free bytes, limited by this process's cgroups and the machine."""
    free: list[int] = []
    for folder in _folders():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit and limit.isdigit() and used and used.isdigit():
            free.append(int(limit) - int(used))
    limit, used = _read(_CGROUP / "memory/memory.limit_in_bytes"), _read(_CGROUP / "memory/memory.usage_in_bytes")
    if limit and limit.isdigit() and used and used.isdigit():
        free.append(int(limit) - int(used))
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) << 10)
    return min(free, default=None)
