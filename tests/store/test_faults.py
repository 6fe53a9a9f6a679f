"""Injects faults into a build's system calls: it succeeds byte-identically or fails clearly, and a rerun completes.

A sample of what `python -m tools.faults` tries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.build.slice_plans import SlicePlans, now
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.slices import SourceFile, identity
from penstock.store.cache import Cache
from tools.faults import ERRORS, Fault, Faults, compiled, faults

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")]


@pytest.fixture(scope="module")
def side(memory: Path) -> Iterator[Faults]:
    (memory / "shim").mkdir()
    made = Faults(memory / "faults", compiled(memory / "shim"))
    yield made
    made.close()


def test_the_shim_counts_and_fails(side: Faults) -> None:
    assert side.calls > 150
    assert side.try_one(Fault(1, "ENOSPC", True)) == "error"
    assert side.try_one(Fault(side.calls + 100, "EIO", True)) == "done"  # never comes


def test_an_input_error_is_not_called_a_lack_of_permission(side: Faults) -> None:
    """Also not by `access`, which only says no: it is among these calls."""
    assert {side.try_one(Fault(at, "EIO", True)) for at in range(30, 42)} == {"error"}


def test_nothing_is_written_before_the_marker(tmp_path: Path, chats: Path) -> None:
    """A briefly full disk used to leave folders without a marker, which the rerun refused."""
    home, file = tmp_path / "home", SourceFile(0, chats, FileKind.JSONL, "chats")
    home.mkdir()
    SlicePlans(Cache(home)).put(file, identity(chats), now() + 1, [])
    assert list(home.iterdir()) == []
    Cache(home).prepare_root()
    SlicePlans(Cache(home)).put(file, identity(chats), now() + 1, [])
    assert len(list(home.glob("memo/*/*.json"))) == 1


def test_faults_at_sampled_calls(side: Faults) -> None:
    ended = {side.try_one(fault) for fault in faults(side.calls, ERRORS, every=401)}
    assert ended == {"done", "error"}
