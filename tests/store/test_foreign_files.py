"""Only marked folders are caches, and Penstock deletes only files that it created."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.cli import app
from penstock.errors import CorruptError, FormatError, StoreError
from penstock.store.cache import Cache
from penstock.store.gc import DAY, collect_garbage
from penstock.store.listing import list_datasets
from penstock.store.verify import verify_cache
from tests.store.conftest import Prepare
from tests.support.forks import Forks, leftovers, result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]

MINE = (
    "claims/expenses.csv",
    "claims/2024/report.txt",
    "datasets/squad/train.jsonl",
    "datasets/squad/manifest.json",
    "tokenizers/mine.json",
    "tmp/scratch.txt",
    "shards/ab/weights.arrow",
    "shards/model.safetensors",
    "memo/ab/minutes.json",
    "memo/todo.txt",
    "README.md",
)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with its modification time."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def put_mine(folder: Path) -> dict[str, tuple[bytes, int]]:
    """A user's own files, in folders named like a cache's, last changed long ago."""
    for name in MINE:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    make_old(folder)
    return {name: found for name, found in contents(folder).items() if name in MINE}


def make_old(folder: Path) -> None:
    then = time.time() - 400 * DAY
    for path in folder.rglob("*"):
        os.utime(path, (then, then), follow_symlinks=False)


def test_a_folder_with_other_files_is_refused(prepare: Prepare, data: Path, cache: Path) -> None:
    mine = put_mine(cache)
    cases: list[Callable[[], object]] = [
        lambda: prepare(data),
        lambda: prepare(data, on_unwritable="temporary"),
        lambda: prepare(data, on_miss="error"),
        lambda: collect_garbage(Cache(cache), older_than=0),
        lambda: list_datasets(Cache(cache)),
        lambda: verify_cache(Cache(cache)),
    ]
    for call in cases:
        with pytest.raises(StoreError) as raised:
            call()
        assert str(raised.value) == (
            f"{cache} is not a Penstock cache: it holds other files and no penstock-cache.json. Nothing was changed. "
            "Choose a new or empty folder with cache=… or PENSTOCK_CACHE."
        )
    assert contents(cache) == mine


def test_commands_refuse_a_folder_with_other_files(data: Path, model: Path, cache: Path) -> None:
    mine = put_mine(cache)
    run = CliRunner()
    prepared = ["prepare", str(data), "--tokenizer", str(model)]
    explained = ["cache", "explain", str(data), "--tokenizer", str(model)]
    for command in (prepared, explained, ["cache", "ls"], ["cache", "verify"], ["cache", "gc", "--older-than", "0"]):
        done = run.invoke(app, [*command, "--cache", str(cache)])
        assert isinstance(done.exception, StoreError)
        assert "is not a Penstock cache" in str(done.exception)
    assert contents(cache) == mine


def test_user_files_in_a_cache_survive(prepare: Prepare, data: Path, cache: Path) -> None:
    prepare(data)
    mine = put_mine(cache)
    prepare(data, force=True)
    prepare(data)
    time.sleep(0.05)  # file clocks are coarse
    found = collect_garbage(Cache(cache), older_than=0, drop_unused=0)
    assert len(found.datasets) == 1
    assert found.refused == 0
    assert {name: value for name, value in contents(cache).items() if name in MINE} == mine
    assert not result(cache).keys() - mine.keys()


@pytest.mark.parametrize("name", ["claims", "datasets", "memo", "shards", "tmp", "tokenizers"])
def test_planted_links_are_not_followed(prepare: Prepare, data: Path, cache: Path, tmp_path: Path, name: str) -> None:
    """Not even to files with the names that Penstock uses."""
    time.sleep(0.06)  # files younger than the clock tick are not memoized
    prepare(data)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(cache / name, elsewhere)
    (elsewhere / ("b3-" + "0" * 64)).write_text("elsewhere-00000000.1.2")
    (elsewhere / "elsewhere-00000000.1.2.0123456789ab").write_text("")
    (cache / name).symlink_to(elsewhere)
    make_old(cache)
    make_old(elsewhere)
    before = contents(elsewhere)
    for act in (lambda: prepare(data), lambda: prepare(data, force=True)):
        try:
            act()
        except StoreError as error:
            assert "is a link or not a folder. Remove what is in the way" in str(error)
    try:
        collect_garbage(Cache(cache), older_than=0, drop_unused=0)
    except StoreError as error:
        assert "is a link or not a folder" in str(error)
    assert contents(elsewhere) == before


def test_gc_deletes_nothing_if_the_datasets_folder_is_a_link(
    prepare: Prepare, data: Path, cache: Path, tmp_path: Path
) -> None:
    prepare(data)
    shutil.move(cache / "datasets", tmp_path / "datasets")
    (cache / "datasets").symlink_to(tmp_path / "datasets")
    before = result(cache)
    with pytest.raises(StoreError, match="'datasets' is a link or not a folder"):
        collect_garbage(Cache(cache), older_than=0)
    assert result(cache) == before


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_an_invalid_claim_does_not_stop_the_build(
    prepare: Prepare, data: Path, cache: Path, tmp_path: Path, kind: str
) -> None:
    dataset = prepare(data).dataset
    whole = result(cache)
    name = dataset.shards.names[0]
    dataset.cache.shard_path(name).unlink()
    outside = tmp_path / "outside"
    outside.write_text("mine")
    claim = cache / "claims" / name
    match kind:
        case "link":
            claim.symlink_to(outside)
        case "pipe":
            os.mkfifo(claim)
        case _:
            claim.mkdir()
    prepare(data)
    assert result(cache) == whole
    assert outside.read_text() == "mine"
    assert os.path.lexists(claim)


def test_the_used_mark_is_not_written_through_a_link(prepare: Prepare, data: Path, tmp_path: Path) -> None:
    dataset = prepare(data).dataset
    outside = tmp_path / "outside"
    (dataset.path / "used").unlink()
    (dataset.path / "used").symlink_to(outside)
    ps.open(dataset.path).input_ids(0)
    assert not outside.exists()
    outside.write_text("mine")
    os.utime(outside, (0, 0))
    ps.open(dataset.path).input_ids(0)
    assert outside.stat().st_mtime == 0


# -- the marker -------------------------------------------------------------------------------------------------------


def test_a_new_or_empty_folder_becomes_a_cache(prepare: Prepare, data: Path, cache: Path) -> None:
    (cache / "lost+found").mkdir()  # an empty file system
    prepare(data)
    prepare(data, cache=cache / "new" / "deeper")
    for folder in (cache, cache / "new" / "deeper"):
        assert (folder / "penstock-cache.json").read_bytes() == b'{"format":1}'


def test_an_empty_or_missing_folder_has_no_datasets(cache: Path) -> None:
    for folder in (cache, cache / "missing"):
        assert list_datasets(Cache(folder)) == []
        assert verify_cache(Cache(folder)).datasets == 0
        with pytest.raises(StoreError, match="not a cache"):
            collect_garbage(Cache(folder))
    assert list(cache.iterdir()) == []


def test_another_format_is_refused(prepare: Prepare, data: Path, cache: Path) -> None:
    prepare(data)
    before = result(cache)
    (cache / "penstock-cache.json").write_text('{"format": 99}')
    cases: list[Callable[[], object]] = [
        lambda: prepare(data),
        lambda: collect_garbage(Cache(cache), older_than=0, drop_unused=0),
        lambda: list_datasets(Cache(cache)),
        lambda: verify_cache(Cache(cache)),
    ]
    for call in cases:
        with pytest.raises(FormatError, match="format version 99, but this Penstock reads version 1"):
            call()
    assert result(cache) == before


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]"])
def test_a_damaged_marker_is_reported_with_the_remedy(prepare: Prepare, data: Path, cache: Path, damage: bytes) -> None:
    prepare(data)
    marker = cache / "penstock-cache.json"
    marker.write_bytes(damage)
    with pytest.raises(CorruptError, match="put it back: echo") as raised:
        prepare(data)
    command = str(raised.value).partition("put it back: ")[2]
    assert os.system(command) == 0
    assert prepare(data).hit


def test_concurrent_creation_of_a_cache(forks: Forks, chats: Path, tokenizer: Path, cache: Path) -> None:
    for number in range(5):
        place = cache / str(number)
        command = ("prepare", chats, "--tokenizer", tokenizer, "--no-fast", "--cache", place)
        runs = [forks.start(*command) for _ in range(6)]
        assert [forks.wait(pid) for pid in runs] == [0] * 6, [forks.output(pid) for pid in runs]
        assert leftovers(place) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("name", ["claims", "tmp", "shards", "datasets"])
def test_a_link_planted_by_another_user(
    forks: Forks, chats: Path, public_tokenizer: Path, cache: Path, memory: Path, name: str
) -> None:
    """In a world-writable folder, planted so that the next user would delete their own files."""
    cache.chmod(0o777)
    home = memory / f"home-{name}"
    home.mkdir()
    mine = put_mine(home)
    os.chown(home, 65534, 65534)
    for path in home.rglob("*"):
        os.chown(path, 65534, 65534)
    command = ("prepare", chats, "--tokenizer", public_tokenizer, "--cache", cache, "--no-fast")
    nobody = {"user": 65534, "env": {"HOME": "/nonexistent"}}
    assert forks.run(*command, user=1, umask=0o002, env={"HOME": "/nonexistent"})[0] == 0
    (cache / name).rename(cache / "moved")
    (cache / name).symlink_to(home / name)
    forks.run(*command, "--force", **nobody)
    forks.run("cache", "gc", "--older-than", "0", "--drop-unused", "0", "--cache", cache, **nobody)
    assert contents(home) == mine
