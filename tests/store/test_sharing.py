"""Processes that share one build: started together, by rank, with one killed and one that never starts."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from tests.support.forks import Forks, leftovers, result

pytestmark = pytest.mark.slow


def made(output: str) -> int:
    """The number of slices a run encoded, from its `--json` output (which follows the format line)."""
    return int(json.loads(output[output.index("{") :])["build"]["slices_done"])


@pytest.fixture(scope="module")
def many(memory: Path, examples: Path) -> Path:
    """Enough rows for about a hundred small slices."""
    rows = (examples / "data" / "chats.jsonl").read_text().splitlines()
    path = memory / "many.jsonl"
    path.write_text("".join(row.replace("What", f"What {n}") + "\n" for n in range(5) for row in rows))
    return path


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, many: Path, tokenizer: Path, memory: Path) -> dict[str, bytes]:
    code, output = forks.run("prepare", many, "--tokenizer", tokenizer, "--cache", memory / "alone", "--no-fast")
    assert code == 0, output
    return result(memory / "alone")


def test_eight_concurrent_builds(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    command = ("prepare", many, "--tokenizer", tokenizer, "--cache", cache, "--no-fast", "--json")
    runs = [forks.start(*command) for _ in range(8)]
    codes = [forks.wait(pid) for pid in runs]
    assert codes == [0] * 8, [forks.output(pid) for pid in runs]
    assert result(cache) == undisturbed
    assert leftovers(cache) == []
    slices = sum(name.endswith(".arrow") for name in undisturbed)
    assert slices > 80
    assert slices <= sum(made(forks.output(pid)) for pid in runs) <= 1.1 * slices


def test_four_ranks_one_missing_and_one_killed(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    command = ("prepare", many, "--tokenizer", tokenizer, "--cache", cache, "--no-fast", "--world-size", 4, "--rank")
    runs = [forks.start(*command, rank, fault="shard.sync:9" if rank == 1 else "") for rank in (0, 1, 2)]
    assert [forks.wait(pid) for pid in runs] == [0, -9, 0], [forks.output(pid) for pid in runs]
    assert result(cache) == undisturbed
    assert leftovers(cache) == []


def test_ranks_from_the_environment(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    command = ("prepare", many, "--tokenizer", tokenizer, "--cache", cache, "--no-fast", "--json")
    slurm = forks.start(*command, env={"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    torchrun = forks.start(*command, env={"RANK": "1", "WORLD_SIZE": "2"})
    assert [forks.wait(slurm), forks.wait(torchrun)] == [0, 0]
    assert result(cache) == undisturbed
    assert min(made(forks.output(slurm)), made(forks.output(torchrun))) > 20


def test_a_claim_of_another_host_is_respected_until_it_expires(
    forks: Forks, chats: Path, tokenizer: Path, cache: Path
) -> None:
    command = ("prepare", chats, "--tokenizer", tokenizer, "--cache", cache, "--no-fast")
    assert forks.run(*command)[0] == 0
    whole = result(cache)
    (manifest,) = cache.glob("datasets/*/manifest.json")
    shard = next(cache.glob("shards/*/*.arrow"))
    manifest.unlink()
    shard.unlink()
    (cache / "claims" / shard.stem).write_text("elsewhere-0000.12.34")
    waiting = forks.start(*command)
    time.sleep(1.5)
    assert not manifest.exists()
    claim = cache / "claims" / shard.stem
    past = time.time() - 600
    os.utime(claim, (past, past))
    assert forks.wait(waiting) == 0
    assert result(cache) == whole
    assert leftovers(cache) == []


def test_streamed_sources_are_shared(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    packed = tmp_path / "many.jsonl.gz"
    packed.write_bytes(gzip.compress(many.read_bytes()))
    alone = ("--no-fast", "--workers", 1)
    command = ("prepare", packed, "--tokenizer", tokenizer, "--cache", cache, *alone, "--world-size", 4, "--rank")
    runs = [forks.start(*command, rank, fault="claim.write:5" if rank == 3 else "") for rank in (0, 3)]
    assert [forks.wait(pid) for pid in runs] == [0, -9], [forks.output(pid) for pid in runs]
    assert {n: b for n, b in result(cache).items() if n.endswith(".arrow")} == {
        n: b for n, b in undisturbed.items() if n.endswith(".arrow")
    }
    assert leftovers(cache) == []
