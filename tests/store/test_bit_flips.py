"""Bit flips never change a token after `verify` nor crash the interpreter. A sample of `python -m tools.bit_flips`."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.digests import seal, unseal
from penstock.errors import CorruptError
from penstock.store.cache import Cache
from penstock.store.shard import read_shard
from penstock.store.storage import shard_at
from penstock.store.trust import read_record
from tests.store.conftest import Prepare
from tests.support.forks import CLOCK_TICK, ROOT

pytestmark = pytest.mark.slow


def test_random_bit_flips() -> None:
    seed = random.SystemRandom().randrange(1 << 32)  # another sample each time; the failure names it
    options = ["--flips", "14", "--seed", str(seed), "--jobs", "1"]
    command = [sys.executable, "-W", "ignore", "-m", "tools.bit_flips", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"


def test_a_damaged_memo_is_ignored(prepare: Prepare, data: Path, cache: Path) -> None:
    """It named slices that the file does not have, and every prepare ended with an error."""
    time.sleep(2 * CLOCK_TICK)  # younger files are not remembered
    prepare(data)
    (memo,) = cache.glob("memo/*/*.json")
    memo.write_bytes(memo.read_bytes().replace(b'"first_row":0', b'"first_row":4', 1))
    assert prepare(data).hit


def test_a_damaged_note_is_ignored(prepare: Prepare, data: Path, cache: Path) -> None:
    dataset = prepare(data).dataset
    name = dataset.shards.names[0]
    note = Cache(cache).root / shard_at(name, "json")
    note.write_bytes(note.read_bytes().replace(b'"rejected":0', b'"rejected":1'))
    assert read_record(Cache(cache).files, name) is None
    assert Cache(cache).shard_record(name)["rejected"] == 0
    value = unseal(b"note", seal(b"note", {"digest": 1, "bytes": "2"}))
    note.write_bytes(seal(b"note", value))  # written by an attacker
    assert read_record(Cache(cache).files, name) is None


def test_a_shard_with_invalid_offsets_is_rejected_when_opened(prepare: Prepare, data: Path) -> None:
    """One flipped bit in a segment's end took all memory when the shard was viewed."""
    dataset = prepare(data).dataset
    path = dataset.cache.shard_path(dataset.shards.names[0])
    ends = dataset.shards.columns(0).segment_ends
    place = path.read_bytes().index(ends.tobytes())
    damaged = bytearray(path.read_bytes())
    damaged[place + 3] ^= 0x40  # a billion tokens
    copy = path.with_suffix(".copy")
    copy.write_bytes(damaged)
    with pytest.raises(CorruptError, match="segments do not cover"):
        read_shard(copy)
