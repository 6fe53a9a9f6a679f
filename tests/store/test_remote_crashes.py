"""Builders that race for a cache in an object store, and are killed; a reader behind a slow network."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

from benchmarks import remote
from tests.support.forks import Forks, result
from tests.support.object_servers import Proxy

pytestmark = pytest.mark.slow

KILLED = -9
STEPS = (
    "claim.create", "remote.index.put", "remote.shard.put", "claim.release", "lease.put", "remote.manifest.open",
    "remote.manifest.put", "remote.notes.put",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_killed_at_every_step(forks: Forks, chats: Path, tokenizer: Path, s3: Proxy, memory: Path, cache: Path) -> None:
    data = cache / "rows.jsonl"
    data.write_bytes(b"".join(chats.read_bytes().splitlines(keepends=True)[:120]))
    url = f"s3://{s3.bucket}/crash"
    environment = {"AWS_ENDPOINT_URL": s3.endpoint, "XDG_STATE_HOME": str(cache / "state"), **remote.KEYS}
    command = ("prepare", data, "--tokenizer", tokenizer, "--no-fast")
    code, output = forks.run(*command, "--cache", cache / "folder")
    assert code == 0, output
    for step in STEPS:
        code, output = forks.run(
            *command, "--cache", url, "--local-cache", cache / "tier", fault=f"{step}:1", env=environment
        )
        assert code == KILLED, f"{step}: {output}"
    code, output = forks.run(*command, "--cache", url, "--local-cache", cache / "tier", env=environment)
    assert code == 0, output
    assert remote.objects(url) == result(cache / "folder")
    assert remote.left_over(url) == []


def test_racing_builders(s3: Proxy, tmp_path: Path) -> None:
    found = remote.crash(s3, tmp_path, builders=3, kills=5, rows=150, choose=random.Random(1))
    assert found["identical"]


@pytest.mark.usefixtures("small_slices")
def test_a_cold_reader_waits_for_its_first_batch_only(s3: Proxy, tmp_path: Path) -> None:
    options = argparse.Namespace(latency=0.02, bandwidth=4e6, step=0.2, steps=12, shards=8, seed=0)
    found = remote.feed(s3, tmp_path, options)
    assert found["bytes_read"] < 1.2 * found["bytes"] + found["index_bytes"]
    assert found["bandwidth_needed"] < options.bandwidth
    assert found["wait_median"] < found["seconds_first_batch"]
