"""Shared caches: files that another user planted under the right name are not used unchecked."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from penstock.digests import bytes_digest, seal, unseal
from penstock.errors import CorruptError
from penstock.prepare.encode.columns import Columns
from penstock.prepare.sources.slices import identity
from penstock.store.dataset import Dataset, open_dataset
from penstock.store.manifest import seal_manifest
from penstock.store.shard import ShardMeta, check_columns, encode_shard, read_shard
from tests.store.conftest import Prepare
from tests.support.forks import CLOCK_TICK, Forks, leftovers, result

pytestmark = pytest.mark.slow

WRITER, READER = 1, 65534  # daemon and nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")


class Shared:
    """A cache that WRITER has filled and that READER uses."""

    def __init__(self, forks: Forks, chats: Path, tokenizer: Path, cache: Path, home: Path) -> None:
        self.cache, self._forks, self._home = cache, forks, home
        self._command = (chats, "--tokenizer", tokenizer, "--cache", cache, "--no-fast", "--json")
        self.prepare(WRITER)
        self.expected = result(cache)

    def run(self, user: int, *args: object) -> tuple[int, str]:
        home = {"HOME": str(self._home), "TMPDIR": str(self._home), "PENSTOCK_LOCAL_CACHE": ""}
        return self._forks.run(*args, user=user, umask=0o022, env=home)

    def prepare(self, user: int, *more: object) -> Any:
        code, output = self.run(user, "prepare", *self._command, *more)
        assert code == 0, output
        return orjson.loads(output[output.index("\n{") + 1 :])

    def dataset(self) -> Dataset:
        (folder,) = (self.cache / "datasets").iterdir()
        return open_dataset(folder)

    def copies(self) -> list[Path]:
        """READER's copies of WRITER's shards."""
        return sorted(self._home.glob(f".cache/penstock-copies-{READER}/shards/*/*.arrow"))

    def served(self) -> dict[str, bytes]:
        """Shards and manifest as READER reads them: pushed to another cache."""
        target = self._home / "pushed"
        code, output = self.run(READER, "cache", "push", self.dataset().key, "--to", target, "--cache", self.cache)
        assert code == 0, output
        return result(target)

    def owners(self) -> set[int]:
        return {path.stat().st_uid for path in self.cache.glob("shards/*/*.arrow")}

    def verified(self, *more: object) -> tuple[int, str]:
        return self.run(READER, "cache", "verify", "--cache", self.cache, *more)

    def poison(self, change: Callable[[Columns], Columns], shards: int = 1) -> None:
        """Replace the content of some shards, with matching notes and manifest, as their owner could."""
        dataset = self.dataset()
        for number in range(shards):
            replace_shard(dataset, number, change)


class Mapped:
    """A process of another user that has a file mapped for writing, with pages that are dirty already."""

    def __init__(self, path: Path, user: int) -> None:
        command = [sys.executable, "-c", MAPPED, str(path), str(user)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.read(1) == b"."

    def overwrite(self, data: bytes) -> None:
        self._process.communicate(data)
        assert self._process.returncode == 0


MAPPED = """
import mmap, os, sys
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
opened = open(sys.argv[1], 'r+b')
file = mmap.mmap(opened.fileno(), 0)
file[:] = file[:]
sys.stdout.write('.')
sys.stdout.flush()
data = sys.stdin.buffer.read()
assert len(data) == len(file)
file[:] = data
"""


@pytest.fixture(params=["memory", "disk"])
def shared(
    forks: Forks, chats: Path, public_tokenizer: Path, cache: Path, memory: Path, request: pytest.FixtureRequest
) -> Iterator[Shared]:
    home = Path(tempfile.mkdtemp(prefix="home-", dir=memory))
    os.chown(home, READER, READER)
    folder = cache if request.param == "memory" else Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/var/tmp"))
    folder.chmod(0o777)
    yield Shared(forks, chats, public_tokenizer, folder, home)
    shutil.rmtree(home)
    if folder != cache:
        shutil.rmtree(folder)


def changed_bytes(path: Path, change: Callable[[Columns], Columns]) -> bytes:
    columns, meta = read_shard(path)
    copied = Columns(*(None if values is None else values.copy() for values in columns))
    return bytes(encode_shard(change(copied), ShardMeta(meta.ledger, meta.rejected, meta.proof, meta.noted)))


def replace_shard(dataset: Dataset, number: int, change: Callable[[Columns], Columns]) -> None:
    path = dataset.cache.shard_path(dataset.shards.names[number])
    data = changed_bytes(path, change)
    path.write_bytes(data)
    note = unseal(b"note", path.with_suffix(".json").read_bytes())
    path.with_suffix(".json").write_bytes(seal(b"note", {**note, "digest": bytes_digest(data), "bytes": len(data)}))
    manifest = orjson.loads((dataset.path / "manifest.json").read_bytes())
    del manifest["digest"]
    manifest["shards"]["digests"][number] = bytes_digest(data)
    manifest["shards"]["bytes"][number] = len(data)
    (dataset.path / "manifest.json").write_bytes(seal_manifest(manifest))


def other_tokens(columns: Columns) -> Columns:
    columns.ids[5::7] += 1
    return columns


def other_mask(columns: Columns) -> Columns:
    return columns._replace(segment_roles=np.roll(columns.segment_roles, 1))


def other_hashes(columns: Columns) -> Columns:
    return columns._replace(row_hashes=columns.row_hashes + 1)


@needs_root
@pytest.mark.parametrize("change", [other_tokens, other_mask, other_hashes])
def test_a_poisoned_shard_is_not_used(shared: Shared, change: Callable[[Columns], Columns]) -> None:
    shared.poison(change, shards=2)
    assert shared.verified()[0] == 0  # digests and counts are consistent
    found = shared.prepare(READER)
    assert found["build"]["others_refused"] == 2
    assert found["build"]["slices_done"] == 2
    assert result(shared.cache) == shared.expected
    told = [text for text in found["warnings"] if "not used" in text]
    assert len(told) == 2
    assert all(f"written by daemon on {socket.gethostname()}" in text for text in told)
    assert shared.prepare(READER)["hit"]
    assert leftovers(shared.cache) == []


@needs_root
def test_what_was_checked_is_not_checked_again(shared: Shared) -> None:
    shards = len(shared.dataset().shards)
    first = shared.prepare(READER)
    assert first["hit"]
    assert first["build"]["others_checked"] == shards
    assert first["build"]["others_rows"] >= shards
    again = shared.prepare(READER)
    assert again["hit"]
    assert again["build"]["others_checked"] == 0
    shared.poison(other_tokens)  # with its manifest, which is rebuilt from the checked copies
    assert shared.prepare(READER)["build"]["others_checked"] == 0
    assert shared.served() == shared.expected
    assert len(shared.copies()) == shards
    for path in shared.copies():
        os.utime(path, (1, 1))
    assert shared.run(READER, "cache", "gc", "--cache", shared.cache)[0] == 0
    assert shared.copies() == []
    assert shared.prepare(READER)["build"]["others_refused"] == 1


@needs_root
def test_a_checked_shard_changed_through_a_mapping_is_not_served(shared: Shared) -> None:
    """Writing through a mapping changes neither the inode, nor the size, nor the times of a file."""
    dataset = shared.dataset()
    paths = [dataset.cache.shard_path(name) for name in dataset.shards.names[:3]]
    for path in paths:
        path.read_bytes()
    mapped = [Mapped(path, WRITER) for path in paths]
    shared.prepare(READER)
    states = [identity(path) for path in paths]
    for path, one in zip(paths, mapped, strict=True):
        one.overwrite(changed_bytes(path, other_tokens))
    kept = [identity(path) == state for path, state in zip(paths, states, strict=True)]
    assert all(kept) or os.statvfs(shared.cache) != os.statvfs("/dev/shm")  # a disk may write pages back in between
    assert result(shared.cache) != shared.expected
    again = shared.prepare(READER)
    assert again["hit"]
    assert again["build"]["others_checked"] == 0
    assert shared.served() == shared.expected


@needs_root
def test_a_folder_for_copies_that_others_can_write_is_not_used(shared: Shared) -> None:
    shared.prepare(READER)
    (folder,) = {path.parent.parent.parent for path in shared.copies()}
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    found = shared.prepare(READER)
    assert found["build"]["others_checked"] == len(shared.dataset().shards)


@needs_root
def test_files_of_a_cache_are_not_writable_by_the_group(shared: Shared) -> None:
    """Else members of a group with the usual umask 002 could change each other's shards, which count as checked."""
    files = [path for path in shared.cache.rglob("*") if path.is_file() and path.name != "used"]
    assert not [path for path in files if path.stat().st_mode & 0o022]


@needs_root
def test_the_writer_trusts_its_own_shards(shared: Shared) -> None:
    assert shared.prepare(WRITER)["build"]["others_checked"] == 0
    assert shared.prepare(READER, "--trust", "all")["build"]["others_checked"] == 0


@needs_root
def test_trust_own_reuses_no_shards_of_other_users(shared: Shared) -> None:
    shared.poison(other_tokens, shards=3)
    found = shared.prepare(READER, "--trust", "own")
    assert not found["hit"]
    assert found["build"]["slices_reused"] == 0
    assert shared.owners() == {READER}
    assert result(shared.cache) == shared.expected
    assert shared.prepare(READER, "--trust", "own")["hit"]
    assert leftovers(shared.cache) == []


@needs_root
def test_another_users_manifest_with_wrong_counts_is_rebuilt(shared: Shared) -> None:
    path = shared.dataset().path / "manifest.json"
    value = orjson.loads(path.read_bytes())
    del value["digest"]
    counts = value["shards"]["examples"]
    counts[0], counts[1] = counts[0] + 1, counts[1] - 1
    path.write_bytes(seal_manifest(value))
    shared.prepare(READER)
    assert result(shared.cache) == shared.expected


@needs_root
def test_a_planted_memo_is_not_used(
    shared: Shared, forks: Forks, chats: Path, public_tokenizer: Path, memory: Path
) -> None:
    """A memo holds the slices of a file. One with the slices of another file would turn that dataset into a hit."""
    other = memory / "other.jsonl"
    other.write_bytes(b"\n".join(chats.read_bytes().split(b"\n")[50:]))
    os.utime(other, (1_700_000_000, 1_700_000_000))
    command = ("prepare", other, "--tokenizer", public_tokenizer, "--cache", shared.cache, "--no-fast", "--json")
    (of_chats,) = shared.cache.glob("memo/*/b3-*.json")
    time.sleep(2 * CLOCK_TICK)  # younger files are not remembered
    shared.run(WRITER, *command)
    (of_other,) = {*shared.cache.glob("memo/*/b3-*.json")} - {of_chats}
    planted = unseal(b"memo", of_other.read_bytes()) | {"slices": unseal(b"memo", of_chats.read_bytes())["slices"]}
    of_other.write_bytes(seal(b"memo", planted))
    code, output = shared.run(READER, *command)
    assert code == 0, output
    assert orjson.loads(output[output.index("\n{") + 1 :])["ledger"]["rows"] == 350
    other.unlink()


@needs_root
def test_a_planted_tokenizer_is_not_used(shared: Shared) -> None:
    (path,) = shared.cache.glob("tokenizers/*.json")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"!"', b'"?"', 1))
    with pytest.raises(CorruptError, match="the tokenizer's bytes have changed"):
        _ = shared.dataset().tokenizer_json
    for shard in shared.cache.glob("shards/*/*.arrow"):
        shard.unlink()
    shared.prepare(READER)
    assert path.read_bytes() == whole
    assert result(shared.cache) == shared.expected


@needs_root
def test_recheck_finds_what_verify_can_not(shared: Shared) -> None:
    code, output = shared.verified("--recheck", "100%")
    assert code == 0, output
    assert "400 rows recomputed from their sources: no problems" in output
    shared.poison(other_tokens)
    assert shared.verified()[0] == 0
    code, output = shared.verified("--recheck", "1", "--json")
    assert code == 1
    found = orjson.loads(output[: output.rindex("}") + 1])
    (finding,) = found["findings"]
    assert "are not what the references make of them (written by daemon on " in finding["what"]
    assert shared.prepare(WRITER)["build"]["slices_done"] == 1  # it was marked, for everybody
    assert result(shared.cache) == shared.expected


def test_recheck_of_missing_sources(prepare: Prepare, data: Path, small_slices: None) -> None:
    from penstock.build.recheck import recheck

    dataset = prepare(data).dataset
    assert recheck(dataset.cache, dataset.path, 0.05).redone >= len(dataset.shards)
    data.write_text("{}")
    (finding,) = recheck(dataset.cache, dataset.path, 0.05).findings
    assert "rows.jsonl can't be redone" in str(finding)


def test_recheck_of_a_compressed_source(prepare: Prepare, data: Path, tmp_path: Path, small_slices: None) -> None:
    import gzip

    from penstock.build.recheck import recheck

    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(data.read_bytes()))
    dataset = prepare(packed).dataset
    found = recheck(dataset.cache, dataset.path, 1.0)
    assert (found.redone, found.findings) == (400, [])


@needs_root
def test_every_shard_is_listed_with_its_writer(shared: Shared) -> None:
    os.chown(next(iter(shared.cache.glob("shards/*/*.arrow"))), READER, READER)  # so the note belongs to someone else
    code, output = shared.run(READER, "cache", "ls", "--shards", "--json", "--cache", shared.cache)
    assert code == 0, output
    entries = orjson.loads(output)["shards"]
    assert len(entries) == len(shared.dataset().shards)
    assert sorted({(entry["user"], entry["host"]) for entry in entries}) == [
        ("daemon", socket.gethostname()),
        ("nobody", ""),
    ]
    assert {tuple(entry["datasets"]) for entry in entries} == {(shared.dataset().key,)}
    _, lines = shared.run(READER, "cache", "ls", "--shards", "--cache", shared.cache)
    assert f"by daemon@{socket.gethostname()}, 1 by nobody@?" in lines


DAMAGES: dict[str, Callable[[Columns], Columns]] = {
    "offsets that go back": lambda c: c._replace(id_offsets=c.id_offsets[::-1].copy()),
    "offsets beyond the end": lambda c: c._replace(segment_offsets=c.segment_offsets * 2),
    "too few roles": lambda c: c._replace(segment_roles=c.segment_roles[:-1]),
    "too few hashes": lambda c: c._replace(row_hashes=c.row_hashes[:-1]),
    "rows in no order": lambda c: c._replace(rows=c.rows[::-1].copy()),
    "segments that end elsewhere": lambda c: c._replace(segment_ends=c.segment_ends + 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_inconsistent_columns_are_rejected(prepare: Prepare, data: Path, damage: str) -> None:
    dataset = prepare(data).dataset
    columns = dataset.shards.columns(0)
    check_columns(columns)
    with pytest.raises(CorruptError):
        check_columns(DAMAGES[damage](columns))
