"""Manifests are self-checking, and no bad file in a cache stops `ls` or `verify` from handling the others."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

import penstock as ps
from penstock.errors import CorruptError
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.listing import list_datasets
from penstock.store.manifest import dataset_key, recipe_digest, seal_manifest, shard_name
from penstock.store.verify import verify_cache
from tests.store.conftest import Prepare
from tests.support.forks import result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]

WRONG: tuple[Any, ...] = (None, True, -1, 2**63, 1e300, "", "b3-", [], [None], {}, {"": [{}]})


@pytest.fixture
def dataset(prepare: Prepare, data: Path) -> Dataset:
    """A dataset next to another one, which must stay usable."""
    prepare(data, template_vars={"x": 1})
    return prepare(data).dataset


def content(dataset: Dataset) -> dict[str, Any]:
    value: dict[str, Any] = orjson.loads((dataset.path / "manifest.json").read_bytes())
    del value["digest"]
    return value


def swap(value: dict[str, Any]) -> None:
    for column in value["shards"].values():
        column[0], column[1] = column[1], column[0]


def leave_out(value: dict[str, Any]) -> None:
    table = value["shards"]
    gone = {name: column.pop() for name, column in table.items()}
    for name in ("rows", "examples", "tokens"):
        value["ledger"][name] -= gone[name]
    value["ledger"]["kept"] -= gone["rows"]


def change_template(value: dict[str, Any]) -> None:
    value["recipe"]["templates"]["default"] += " "


def move_rows(value: dict[str, Any]) -> None:
    value["shards"]["first_rows"] = [first + 1 for first in value["shards"]["first_rows"]]


def move_source(value: dict[str, Any]) -> None:
    value["shards"]["sources"][-1] = 1


def rename_key(value: dict[str, Any]) -> None:
    value["key"] = "b3-" + "0" * 64


@pytest.mark.parametrize("change", [swap, leave_out, change_template, move_rows, move_source, rename_key])
@pytest.mark.parametrize("resealed", [False, True])
def test_a_changed_manifest_is_not_a_hit(
    prepare: Prepare, data: Path, cache: Path, dataset: Dataset, change: Callable[[Any], None], resealed: bool
) -> None:
    whole = result(cache)
    path = dataset.path / "manifest.json"
    value = content(dataset)
    change(value)
    path.write_bytes(seal_manifest(value) if resealed else orjson.dumps(value | {"digest": dataset.manifest.key}))
    with pytest.raises(CorruptError, match="manifest.json: the manifest is damaged: it"):
        ps.open(dataset.path)
    (finding,) = verify_cache(Cache(cache)).findings
    assert finding.dataset == dataset.key
    assert prepare(data).progress.slices_done == 0
    assert result(cache) == whole


def test_verify_finds_counts_that_differ_from_the_shards(cache: Path, dataset: Dataset) -> None:
    """Even with a new digest and consistent sums, because `verify` counts."""
    value = content(dataset)
    value["shards"]["tokens"][0] += 1
    value["ledger"]["tokens"] += 1
    (dataset.path / "manifest.json").write_bytes(seal_manifest(value))
    (finding,) = verify_cache(Cache(cache)).findings
    assert "tokens, not" in finding.what


def test_moved_slices_make_a_different_dataset(prepare: Prepare, data: Path, tmp_path: Path) -> None:
    """Because their row numbers differ."""
    rows = data.read_bytes().splitlines(keepends=True)
    tail = tmp_path / "tail.jsonl"
    tail.write_bytes(b"".join(rows[380:]))
    alone = prepare(tail).dataset
    part = prepare(data, split="train[380:400]").dataset
    assert part.locate(0).row == 380
    assert alone.locate(0).row == 0
    assert part.shards.names[-1] == alone.shards.names[-1]
    assert part.key != alone.key


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path in a JSON value; for lists, the first entry."""
    entries = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    )
    for name, inner in entries:
        yield (*before, name)
        yield from paths(inner, (*before, name))


def consistent(value: dict[str, Any]) -> dict[str, Any]:
    """Recompute key and names where possible, as a hostile writer would."""
    try:
        table, made = value["shards"], recipe_digest(value["recipe"])
        table["names"] = [shard_name(made, part) for part in table["slices"]]
        value["key"] = dataset_key(made, zip(table["sources"], table["first_rows"], table["slices"], strict=True))
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return value


def test_wrong_types_crash_neither_ls_nor_verify(cache: Path, dataset: Dataset) -> None:
    path = dataset.path / "manifest.json"
    original, tried = content(dataset), 0
    for place in paths(original):
        if place[0] == "recipe" and len(place) > 2:
            continue
        for wrong, change in product(WRONG, (dict, consistent)):
            value: Any = copy.deepcopy(original)
            inner = value
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = wrong
            path.write_bytes(seal_manifest(change(value)))
            assert len(list_datasets(Cache(cache))) == 2
            if tried % 10 == 0:  # it reads every shard
                assert verify_cache(Cache(cache)).datasets == 2
            tried += 1
    assert tried > 500


@pytest.mark.parametrize(
    "notes", [b"[]", b'{"files": 7}', b'{"files": [7]}', b'{"files": [{"name": []}], "tokenizer": {}}']
)
def test_invalid_notes_are_ignored(cache: Path, dataset: Dataset, notes: bytes) -> None:
    (dataset.path / "notes.json").write_bytes(notes)
    assert len(list_datasets(Cache(cache))) == 2
    assert verify_cache(Cache(cache)).findings == []


@pytest.mark.parametrize("kind", ["pipe", "link", "loop", "folder"])
@pytest.mark.parametrize("which", ["manifest.json", "notes.json", "used", "shard", "note", "tokenizer", "dataset"])
def test_pipes_do_not_block(cache: Path, dataset: Dataset, tmp_path: Path, which: str, kind: str) -> None:
    """Pipes, links and folders in place of files: `ls` and `verify` finish and report the problem."""
    shard = dataset.cache.shard_path(dataset.shards.names[0])
    place = {
        "shard": shard,
        "note": shard.with_suffix(".json"),
        "tokenizer": dataset.cache.tokenizer_path(dataset.recipe["tokenizer"]),
        "dataset": dataset.path,
    }.get(which, dataset.path / which)
    shutil.move(place, tmp_path / "moved")
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "link":
            os.mkfifo(tmp_path / "pipe")
            place.symlink_to(tmp_path / "pipe")
        case "loop":
            place.symlink_to(place)
        case _:
            place.mkdir()
    assert len(list_datasets(Cache(cache))) >= 1
    findings = verify_cache(Cache(cache)).findings
    expected = which in ("manifest.json", "shard", "tokenizer") or (which, kind) == ("dataset", "loop")
    assert bool(findings) is expected
