"""How many workers fit: limits of cgroups, v1 and v2, wherever in the hierarchy they are set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.build.workers import runner
from penstock.build.workers.runner import WORKER_BYTES

GB = 1 << 30
NO_LIMIT = str((1 << 63) - 4096)  # as v1 writes it


class Groups:
    """A hierarchy of cgroups, written as files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root / "cgroup"
        self._root.mkdir()
        self._own = root / "own"
        meminfo = root / "meminfo"
        meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * GB >> 10} kB\n")
        monkeypatch.setattr(runner, "_CGROUP", self._root)
        monkeypatch.setattr(runner, "_OWN_GROUPS", self._own)
        monkeypatch.setattr(runner, "_MEMINFO", meminfo)

    def __call__(self, own: str, **groups: dict[str, object]) -> None:
        self._own.write_text(own)
        for name, files in groups.items():
            folder = self._root / name.replace("__", "/").strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for file, value in files.items():
                (folder / file.replace("_", ".", 1)).write_text(f"{value}\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


def test_page_cache_is_free_memory(groups: Groups) -> None:
    """A group of 1.5 GB in which 2 GB were written is full of pages that the kernel drops when asked for memory."""
    stat = f"anon 1000\ninactive_file {int(1.4 * GB)}\nactive_file 1000"
    groups("0::/\n", __={"memory_max": 3 * GB // 2, "memory_current": 3 * GB // 2 - 5, "memory_stat": stat})
    assert runner._memory_left() == 5 + int(1.4 * GB)
    assert runner._limits()[1] == 1.4 * GB // WORKER_BYTES


def test_a_limit_between_the_group_and_the_root_counts(groups: Groups) -> None:
    """As Slurm sets it: on the job, while the process is in a group of the task."""
    groups(
        "0::/slurm/job_7/step_0/task_0\n",
        slurm={"memory_max": "max", "memory_current": 40 * GB},
        slurm__job_7={"memory_max": 8 * GB, "memory_current": 6 * GB},
        slurm__job_7__step_0__task_0={"memory_max": "max", "memory_current": 6 * GB},
    )
    assert runner._memory_left() == 2 * GB


def test_memory_high_counts(groups: Groups) -> None:
    groups("0::/job\n", job={"memory_max": "max", "memory_high": 5 * GB, "memory_current": GB})
    assert runner._memory_left() == 4 * GB


def test_a_group_below_the_root_of_v1(groups: Groups) -> None:
    stat = f"inactive_file 0\ntotal_inactive_file {GB}"
    groups(
        "5:cpu,cpuacct:/\n4:memory:/slurm/uid_1/job_7\n0::/\n",
        memory={"memory_limit_in_bytes": NO_LIMIT, "memory_usage_in_bytes": 50 * GB},
        memory__slurm__uid_1__job_7={
            "memory_limit_in_bytes": 4 * GB,
            "memory_usage_in_bytes": 3 * GB,
            "memory_stat": stat,
        },
        **{"cpu,cpuacct": {"cpu_cfs_quota_us": 150_000, "cpu_cfs_period_us": 100_000}},
    )
    assert runner._memory_left() == 2 * GB
    assert runner._cpu_quota() == 1.5


def test_a_container_whose_path_is_only_visible_outside(groups: Groups) -> None:
    groups("4:memory:/docker/abc\n", memory={"memory_limit_in_bytes": GB, "memory_usage_in_bytes": 100})
    assert runner._memory_left() == GB - 100


def test_without_limits_the_machine_decides(groups: Groups) -> None:
    groups("0::/\n")
    assert runner._memory_left() == 64 * GB
    assert runner._cpu_quota() is None


def test_a_real_group_full_of_page_cache(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/penstock-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
        code = (
            "import os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
            "with open(sys.argv[2], 'wb') as file:\n"
            "    for _ in range(300): file.write(bytes(1 << 20))\n"
            "    os.fsync(file.fileno())\n"
            "from penstock.build.workers.runner import _memory_left\n"
            "print(_memory_left())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, group, tmp_path / "data"], capture_output=True, text=True, check=True
        )
        assert 100 << 20 < int(done.stdout) < 200 << 20
    finally:
        group.rmdir()


def test_a_small_address_space_is_refused_at_once(tmp_path: Path) -> None:
    """Libraries abort if they can't allocate memory, each with its own output."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))\n"
        "from penstock.build.workers.runner import worker_count; worker_count('auto')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("\n")[2]
    assert "is limited to 300 MB, and Penstock needs 512. Raise the limit: ulimit -v 1048576, or unlimited." in last
