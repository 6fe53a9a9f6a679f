"""Many small files: the shards of one file with their rows, also after kills, and the right file for each row."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.build.recheck import recheck
from penstock.errors import RowError, SourceError
from penstock.objects import open_object_store
from penstock.prepare.sources import text_slices
from penstock.store.cache import Cache
from penstock.store.gc import collect_garbage
from penstock.store.verify import verify_cache
from tests.store.conftest import Prepare
from tests.store.test_crashes import KILLED, STEPS, kills_until_done
from tests.support.forks import Forks, leftovers, result
from tests.support.object_servers import Proxy

pytestmark = pytest.mark.slow
OLD = (1_700_000_000, 1_700_000_000)


def split_into(folder: Path, chats: Path) -> Path:
    """A file for each three rows of a source."""
    folder.mkdir()
    lines = chats.read_bytes().splitlines(keepends=True)
    for first in range(0, len(lines), 3):
        path = folder / f"{first:05d}.jsonl"
        path.write_bytes(b"".join(lines[first : first + 3]))
        os.utime(path, OLD)
    return folder


def reworded(path: Path) -> bytes:
    text = path.read_bytes()
    assert b"What" in text
    return text.replace(b"What", b"What else", 1)


@pytest.fixture(scope="module")
def many(chats: Path, memory: Path) -> Path:
    return split_into(memory / "many", chats)


@pytest.fixture
def folder(chats: Path, tmp_path: Path) -> Path:
    """Files that a test may change."""
    return split_into(tmp_path / "folder", chats)


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, chats: Path, tokenizer: Path, memory: Path) -> dict[str, bytes]:
    """The result of all rows in one file."""
    cache = memory / "as-one"
    code, output = forks.run("prepare", chats, "--tokenizer", tokenizer, "--cache", cache)
    assert code == 0, output
    return result(cache)


def test_killed_at_every_commit_step(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    """One build, which resumes after each kill."""
    order = ["marker", "memo", "tokenizer", "claim", "note", "shard", "lease", "manifest", "notes"]
    command = ("prepare", many, "--tokenizer", tokenizer, "--cache", cache, "--no-fast")
    for step in sorted(STEPS, key=lambda step: order.index(step.split(".")[0])):
        code, output = forks.run(*command, fault=f"{step}:1")
        assert code == KILLED, (step, output)
    code, output = forks.run(*command)
    assert code == 0, output
    assert result(cache) == undisturbed
    assert leftovers(cache) == []


def test_killed_with_workers(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    command = ("prepare", many, "--tokenizer", tokenizer, "--cache", cache)
    for workers, fault in ((2, "shard.write:2"), (1, "claim.release:2"), (2, "note.rename:2")):
        code, output = forks.run(*command, "--workers", workers, "--no-fast", workers=True, fault=fault)
        assert code == KILLED, output
    code, output = forks.run(*command, "--workers", 2, workers=True)
    assert code == 0, output
    assert result(cache) == undisturbed
    assert leftovers(cache) == []


def test_killed_at_random_times(
    forks: Forks, many: Path, tokenizer: Path, cache: Path, undisturbed: dict[str, bytes]
) -> None:
    choose, kills = random.Random(5), 0
    for round_ in range(40):
        place = cache / str(round_)
        command = ("prepare", many, "--tokenizer", tokenizer, "--cache", place, "--no-fast")
        kills += kills_until_done(forks, command, choose, 1.5)
        assert result(place) == undisturbed
        if kills >= 8:
            return
    raise AssertionError(f"only {kills} kills")


# -- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slices")
class TestReuse:
    def test_the_rows_of_one_file_hit(self, prepare: Prepare, many: Path, chats: Path, monkeypatch: Any) -> None:
        first = prepare(chats)
        second = prepare(many)
        assert second.hit
        assert second.dataset.key == first.dataset.key
        monkeypatch.setattr(text_slices, "cut_text", None)
        assert prepare(many).hit  # by the slice plan, and the rows of each file with it
        assert ps.open(second.dataset.path).file_row(0, 4) == (f"{many}/00003.jsonl", 1)

    def test_a_changed_file_costs_the_slices_around_it(self, prepare: Prepare, folder: Path) -> None:
        whole = prepare(folder).progress.slices_done
        assert whole > 15
        changed = folder / "00030.jsonl"
        before = changed.stat()
        changed.write_bytes(reworded(changed))
        os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert 1 <= prepare(folder).progress.slices_done <= 2
        (folder / "00031.jsonl").write_bytes(reworded(changed))
        assert 1 <= prepare(folder).progress.slices_done <= 2
        (folder / "00060.jsonl").unlink()
        found = prepare(folder)
        assert 1 <= found.progress.slices_done <= 2
        assert found.dataset.ledger.rows == sum(len(path.read_bytes().splitlines()) for path in folder.iterdir())

    def test_a_change_that_the_times_hide_is_seen(self, prepare: Prepare, folder: Path, monkeypatch: Any) -> None:
        first = prepare(folder)
        changed = folder / "00030.jsonl"
        monkeypatch.setattr("penstock.build.slice_plans.SlicePlan.holds_for", lambda *_: True)
        inode = changed.stat().st_ino
        changed.write_bytes(reworded(changed))
        os.utime(changed, OLD)
        assert changed.stat().st_ino == inode
        assert prepare(folder).dataset.key != first.dataset.key

    def test_splits_and_limits(self, prepare: Prepare, many: Path, chats: Path) -> None:
        for options in ({"split": "train[10%:14%]+train[-5:]"}, {"limit": 20}):
            one, joined = prepare(chats, **options), prepare(many, **options)
            assert joined.dataset.key == one.dataset.key
            assert joined.hit or not joined.progress.slices_done
            assert prepare(many, **options).hit

    def test_bad_rows_name_their_file(self, prepare: Prepare, folder: Path) -> None:
        bad = folder / "00030.jsonl"
        bad.write_bytes(b"\n" + bad.read_bytes() + b'{"messages": []}\n')
        with pytest.raises(RowError, match=r"00030\.jsonl:5: "):
            prepare(folder)
        outcome = prepare(folder, on_bad_row="quarantine")
        assert outcome.quarantine is not None
        assert b'/00030.jsonl:5"' in outcome.quarantine.read_bytes()
        assert prepare(folder, on_bad_row="quarantine").hit

    def test_verify_recheck_and_gc(self, prepare: Prepare, folder: Path, cache: Path) -> None:
        dataset = prepare(folder).dataset
        opened = Cache(cache)
        assert not verify_cache(opened).findings
        checked = recheck(opened, dataset.path, 0.2)
        assert checked.redone
        assert not checked.findings
        shard = opened.shard_path(dataset.shards.names[3])
        shard.write_bytes(b"x" + shard.read_bytes()[1:])
        (damage,) = [found for found in verify_cache(opened).findings if found.shard]
        assert "(48 files)" not in str(damage)
        assert prepare(folder).progress.slices_done == 1
        assert not verify_cache(opened).findings
        dataset.path.joinpath("manifest.json").unlink()
        collect_garbage(opened, older_than=0)
        assert not list(cache.glob("shards/*/*"))

    def test_conversations_come_from_their_files(self, prepare: Prepare, folder: Path, chats: Path) -> None:
        one, joined = prepare(chats).dataset, prepare(folder).dataset
        expected = list(one.conversations.conversations())
        assert list(ps.open(joined.path).conversations.conversations()) == expected
        (folder / "00030.jsonl").write_bytes((folder / "00033.jsonl").read_bytes())
        with pytest.raises(SourceError, match="changed"):
            list(ps.open(joined.path).conversations.conversations())


@pytest.mark.usefixtures("small_slices")
def test_objects_have_the_slices_of_files(prepare: Prepare, many: Path, s3: Proxy) -> None:
    store, _ = open_object_store(f"s3://{s3.bucket}/x")
    for path in many.iterdir():
        store.put(f"many/{path.name}", path.read_bytes())
    first = prepare(many)
    second = prepare(f"s3://{s3.bucket}/many/")
    assert second.hit
    assert second.dataset.key == first.dataset.key
    s3.clear()
    assert prepare(f"s3://{s3.bucket}/many/").hit
    assert s3.bytes_read < 10_000  # its kind and rows are remembered
    assert ps.open(second.dataset.path).conversation(7) == first.dataset.conversation(7)
