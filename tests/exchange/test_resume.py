"""An export that is killed or runs out of space resumes to the same bytes, and is invisible until it is complete."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from tests.support.forks import Forks

pytestmark = pytest.mark.slow

KILLED = -9
OPTIONS: dict[str, list[object]] = {
    "olmo": ["--to", "olmo", "--part-tokens", 900],
    "megatron": ["--to", "megatron", "--part-tokens", 900],
    "hf": ["--to", "hf", "--part-tokens", 900, "--max-length", 40],
    "nemo": ["--to", "megatron", "--part-tokens", 900, "--capacity", 300],
}
STEPS = [
    *(f"{file}.{step}" for file in ("settings", "record", "manifest") for step in ("open", "sync", "rename")),
    "part.write",
    "part.sync",
    "part.rename",
    "part.done",
    "commit.rename",
]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def whole(forks: Forks, dataset: ps.Dataset, memory: Path) -> dict[str, dict[str, bytes]]:
    """Uninterrupted exports."""
    found = {}
    for name, options in OPTIONS.items():
        code, said = forks.run("export", dataset.path, *options, "-o", memory / "whole" / name, "--workers", 1)
        assert code == 0, said
        found[name] = files(memory / "whole" / name)
    return found


@pytest.mark.parametrize("to", ["olmo", "megatron", "hf"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_commit_step(
    forks: Forks, dataset: ps.Dataset, whole: dict[str, dict[str, bytes]], place: Path, to: str, step: str
) -> None:
    command = ("export", dataset.path, *OPTIONS[to], "-o", place / "out")
    for passage in (1, 4) if step.startswith(("part", "record")) else (1,):
        code, said = forks.run(*command, "--workers", 2, fault=f"{step}:{passage}")
        assert code == KILLED, said
        assert (place / "out").exists() == (step == "commit.rename")
        if (place / "out").exists():
            break
    code, said = forks.run(*command)
    assert code == 0, said
    assert files(place / "out") == whole[to]
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("to", ["olmo", "megatron"])
def test_killed_at_random_instants(
    forks: Forks, dataset: ps.Dataset, whole: dict[str, dict[str, bytes]], place: Path, to: str
) -> None:
    choose = random.Random(to)
    began = time.monotonic()
    assert forks.run("export", dataset.path, *OPTIONS[to], "-o", place / "timed")[0] == 0
    took = time.monotonic() - began
    kills = 0
    for attempt in range(100):
        out, code, tries = place / str(attempt), KILLED, 0
        while code == KILLED:
            tries += 1
            command = ("export", dataset.path, *OPTIONS[to], "-o", out, "--workers", choose.choice((1, 2, 3, 7)))
            pid = forks.start(*command)
            time.sleep(choose.uniform(0, 0.8 * took * (1 + tries / 10)))  # so that one of them is long enough
            forks.kill(pid)
            code = forks.wait(pid)
            kills += code == KILLED
            if out.exists():
                assert files(out) == whole[to]
        assert code == 0, forks.output(pid)
        assert files(out) == whole[to]
        forks.run(*command)
        assert not out.with_name(f"{out.name}.partial").exists()
        if kills >= 30:
            return
    raise AssertionError(f"only {kills} kills")


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    """An 80 kB disk, too small for any of the exports."""
    folder = place / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("to", ["olmo", "megatron", "hf"])
def test_full_disk(
    forks: Forks, dataset: ps.Dataset, whole: dict[str, dict[str, bytes]], small_disk: Path, to: str
) -> None:
    command = ("export", dataset.path, *OPTIONS[to], "-o", small_disk / "out", "--workers", 2)
    for _ in range(2):
        code, said = forks.run(*command)
        assert code == 1
        assert "the disk is full" in said
        assert "Finished parts are kept" in said
        assert not (small_disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    code, said = forks.run(*command)
    assert code == 0, said
    assert files(small_disk / "out") == whole[to]


def test_concurrent_runs_produce_one_export(
    forks: Forks, dataset: ps.Dataset, whole: dict[str, dict[str, bytes]], place: Path
) -> None:
    for to in ("olmo", "megatron", "nemo"):
        command = ("export", dataset.path, *OPTIONS[to], "-o", place / to)
        running = [forks.start(*command, "--workers", workers) for workers in (1, 2, 3)]
        for pid in running:
            assert forks.wait(pid) == 0, forks.output(pid)
        assert files(place / to) == whole[to]
        assert not (place / f"{to}.partial").exists()


def test_finished_export_is_reused(forks: Forks, dataset: ps.Dataset, place: Path) -> None:
    command = ("export", dataset.path, *OPTIONS["olmo"], "-o", place / "out")
    assert forks.run(*command)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*")}
    code, said = forks.run(*command)
    assert code == 0
    assert "this export already exists" in said
    assert {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*")} == before
