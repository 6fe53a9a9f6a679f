"""Reuse per slice: appended and edited rows, copies, other paths, changed recipes, and the output of `explain`."""

from __future__ import annotations

import datetime
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.build import slice_plans
from penstock.build.explain import explain
from penstock.build.options import prepare_options
from penstock.prepare import recipe as recipes
from penstock.prepare.sources import text_slices
from penstock.prepare.sources.slices import identity
from tests.store.conftest import Prepare
from tests.support.forks import CLOCK_TICK, result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_slices")]


@pytest.fixture
def why(cache: Path, model: Path) -> Callable[..., list[str]]:
    """The output of `explain`: "hit", or the differences."""

    def run(*sources: Path, **options: Any) -> list[str]:
        found = explain(list(sources), prepare_options({"tokenizer": model, "cache": cache} | options))
        return ["hit"] if found.hit else list(found.differences)

    return run


def test_a_hit_reads_and_writes_nothing(prepare: Prepare, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(data)
    assert (first.hit, first.progress.slices_done) == (False, len(first.dataset.shards))
    monkeypatch.setattr(text_slices, "cut_text", None)
    second = prepare(data)
    assert second.hit
    assert second.dataset.key == first.dataset.key
    assert second.progress.slices_done == 0


def test_the_same_content_hits(
    prepare: Prepare, data: Path, model: Path, tmp_path: Path, why: Callable[..., list[str]]
) -> None:
    prepare(data)
    assert prepare(data, workers="3").hit
    elsewhere = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert prepare(data, tokenizer=elsewhere).hit
    data.touch()
    assert prepare(data).hit
    copy = Path(shutil.copy(data, tmp_path / "copy.jsonl"))
    assert why(copy) == ["hit"]
    outcome = prepare(copy)
    assert outcome.hit
    assert outcome.dataset.origins["files"][0]["path"] == str(copy)


def test_changed_content_of_the_same_size_and_time_misses(prepare: Prepare, data: Path) -> None:
    prepare(data)
    before = data.stat()
    text = data.read_bytes()
    data.write_bytes(text.replace(b"What is", b"What's a", 1).replace(b"?", b"", 1))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert data.stat().st_size == before.st_size
    assert data.stat().st_mtime_ns == before.st_mtime_ns
    outcome = prepare(data)
    assert not outcome.hit
    assert 1 <= outcome.progress.slices_done <= 2


def test_appending_rows_encodes_only_new_slices(prepare: Prepare, data: Path, cache: Path, why: Any) -> None:
    rows = data.read_bytes().splitlines(keepends=True)
    data.write_bytes(b"".join(rows[:396]))
    slices = len(prepare(data).dataset.shards)
    data.write_bytes(b"".join(rows))
    (said,) = why(data)
    assert said in {f"source: {new} of {total} slices new" for new in (1, 2) for total in (slices, slices + 1)}
    outcome = prepare(data)
    assert outcome.progress.slices_done <= 0.01 * slices + 2
    assert outcome.progress.slices_reused >= slices - 1


def test_appending_gives_the_same_shards_as_building_at_once(
    prepare: Prepare, data: Path, cache: Path, tmp_path: Path
) -> None:
    rows = data.read_bytes().splitlines(keepends=True)
    at_once = prepare(data).dataset
    other = tmp_path / "other"
    for count in (100, 250, 400):
        data.write_bytes(b"".join(rows[:count]))
        last = prepare(data, cache=other).dataset
    assert last.key == at_once.key
    assert (last.path / "manifest.json").read_bytes() == (at_once.path / "manifest.json").read_bytes()
    for name in at_once.shards.names:
        assert last.cache.shard_path(name).read_bytes() == at_once.cache.shard_path(name).read_bytes()


def test_editing_a_row_encodes_at_most_two_slices(prepare: Prepare, data: Path) -> None:
    prepare(data)
    rows = data.read_bytes().splitlines(keepends=True)
    rows[200] = (
        rows[200].replace(b"content", b"content", 1).replace(b'"user", "content": "', b'"user", "content": "So: ')
    )
    data.write_bytes(b"".join(rows))
    assert 1 <= prepare(data).progress.slices_done <= 2


def test_a_changed_recipe_misses_and_explain_names_it(
    prepare: Prepare, data: Path, model: Path, why: Callable[..., list[str]], tmp_path: Path
) -> None:
    prepare(data)
    assert why(data) == ["hit"]
    template = (model / "chat_template.jinja").read_text()
    changed = tmp_path / "changed.jinja"
    lines = template.split("\n")
    lines[0] = lines[0] + "{# new #}"
    changed.write_text("\n".join(lines))
    assert why(data, template=changed) == ["template: line 1 changed"]
    assert not prepare(data, template=changed).hit
    assert why(data, template_vars={"enable_thinking": False}) == ["template variable enable_thinking: added (false)"]
    prepare(data, template_vars={"enable_thinking": True})
    said = why(data, template_vars={"enable_thinking": False})
    assert said in (
        ["template variable enable_thinking: true → false"],
        ["template variable enable_thinking: added (false)"],
    )
    assert why(data, roles={"bot": "assistant"}) == ["format mapping: role bot: added (assistant)"]
    assert why(data, regions="structure") == ["option regions: auto → structure"]
    assert why(data, split="train[:50]")[0].startswith("source: ")


def test_another_unicode_misses_and_explain_names_it(
    prepare: Prepare, data: Path, why: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python decides which characters a template's `upper` changes and which ones a printed dict escapes."""
    prepare(data)
    before = why(data)
    monkeypatch.setattr("unicodedata.unidata_version", "99.0.0")
    assert before == ["hit"]
    assert any(line.startswith("version of unicode: ") for line in why(data))


def test_a_changed_tokenizer_misses_and_explain_names_it(
    prepare: Prepare, data: Path, model: Path, why: Callable[..., list[str]]
) -> None:
    prepare(data)
    value = json.loads((model / "tokenizer.json").read_text())
    top = max(token["id"] for token in value["added_tokens"]) + 10_000
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    value["added_tokens"] += [{"id": top + n, "content": f"<|new{n}|>", **flags} for n in range(3)]
    (model / "tokenizer.json").write_text(json.dumps(value))
    assert why(data) == ["tokenizer.json: 3 added tokens (<|new0|>, <|new1|>, <|new2|>)"]
    assert why(data, cache=Path(model, "empty")) == []


def test_views_encode_nothing(prepare: Prepare, data: Path, cache: Path, model: Path) -> None:
    prepare(data)
    before = result(cache)
    dataset = ps.prepare(data, tokenizer=model, cache=cache, on_miss="error")
    for options in (
        {"max_length": 50, "overlong": "truncate"},
        {"max_length": 60, "overlong": "drop"},
        {"train_on": "last_assistant_message"},
        {"train_on": "all_tokens"},
        {"holdout": 0.1},
    ):
        assert len(dataset.view(**options)) > 0
    for weight in (0.3, 2.0):
        assert len(ps.mix({"a": (dataset.view(), 1.0), "b": (dataset.view(), weight)}, seed=0)) > 0
    assert result(cache) == before


def test_force_rebuilds_everything(prepare: Prepare, data: Path, cache: Path) -> None:
    first = prepare(data)
    before = result(cache)
    again = prepare(data, force=True)
    assert not again.hit
    assert again.progress.slices_done == len(first.dataset.shards)
    assert result(cache) == before


def test_no_cache_leaves_the_cache_alone(prepare: Prepare, data: Path, cache: Path, tmp_path: Path) -> None:
    outcome = prepare(data, no_cache=True)
    assert list(cache.iterdir()) == []
    assert "delete it when you are done" in outcome.warnings[0]
    shutil.rmtree(outcome.dataset.cache.root)


def test_on_miss_error(prepare: Prepare, data: Path, cache: Path) -> None:
    with pytest.raises(ps.PenstockError, match="the dataset is not in .* on_miss is 'error'"):
        prepare(data, on_miss="error")
    prepare(data)
    shutil.rmtree(cache / "memo", ignore_errors=True)
    assert prepare(data, on_miss="error").hit


def test_a_file_that_was_just_written_is_not_memoized(
    prepare: Prepare, data: Path, cache: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(slice_plans, "SETTLED", 60.0)
    prepare(data)
    assert not list(cache.glob("memo/*/*.json"))
    assert prepare(data).hit  # found by reading it again
    monkeypatch.setattr(slice_plans, "now", lambda: time.time() + 70)
    monkeypatch.setattr(slice_plans, "now", lambda: time.time() + 70)
    assert prepare(data).hit
    assert list(cache.glob("memo/*/*.json"))


def mapped_change(path: Path, old: bytes, new: bytes) -> None:
    """Change a file through a mapping of which all pages are dirty already, and keep its identity."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        before = identity(path)
        mapped[:] = mapped[:].replace(old, new)
        mapped.flush()
        if identity(path) != before:  # on a disk: what a page that was dirty before would look like
            pytest.skip("the file system noticed at once")


def test_a_source_on_tmpfs_is_never_memoized(
    prepare: Prepare, chats: Path, memory: Path, cache: Path, monkeypatch: Any
) -> None:
    """On tmpfs, writing through a mapping never changes the times of a file."""
    if slice_plans._file_system(memory.stat().st_dev) != "tmpfs":
        pytest.skip("no tmpfs here")
    monkeypatch.setattr(slice_plans, "WITHOUT_TIMES", frozenset({"tmpfs"}))
    data = memory / "mapped.jsonl"
    data.write_bytes(chats.read_bytes())
    time.sleep(2 * CLOCK_TICK)
    first = prepare(data).dataset
    assert not list(cache.glob("memo/*/*.json"))
    mapped_change(data, b" is ", b" IS ")
    second = prepare(data).dataset
    assert second.key != first.key
    data.unlink()


def test_a_plan_is_not_used_if_blocks_of_the_file_have_changed(
    prepare: Prepare, chats: Path, memory: Path, cache: Path
) -> None:
    """Where the file system does not show the change (here tmpfs, as if it were another), sampled blocks may."""
    data = memory / "sampled.jsonl"
    data.write_bytes(chats.read_bytes())
    time.sleep(2 * CLOCK_TICK)
    first = prepare(data).dataset
    assert list(cache.glob("memo/*/*.json"))
    mapped_change(data, b" is ", b" IS ")
    assert prepare(data).dataset.key != first.key
    data.unlink()


def test_rehash_reads_what_the_memo_would_skip(
    prepare: Prepare, chats: Path, memory: Path, cache: Path, monkeypatch: Any
) -> None:
    data = memory / "rehashed.jsonl"
    data.write_bytes(chats.read_bytes())
    time.sleep(2 * CLOCK_TICK)
    first = prepare(data).dataset
    monkeypatch.setattr(slice_plans, "_same_blocks", lambda *_: True)  # a change outside of the sampled blocks
    mapped_change(data, b" is ", b" IS ")
    assert prepare(data).dataset.key == first.key  # what remains, and is documented
    changed = prepare(data, rehash=True)
    assert changed.dataset.key != first.key
    again = prepare(data, rehash=True)
    assert again.hit
    assert again.dataset.key == changed.dataset.key
    data.unlink()


# -- dates ------------------------------------------------------------------------------------------------------------


class _Date(datetime.date):
    now = datetime.date(2026, 3, 1)

    @classmethod
    def today(cls) -> datetime.date:  # type: ignore[override]
        return cls.now


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch, model: Path) -> Callable[[int, int], None]:
    """Sets the date; the template prints it."""
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}\n" + template.read_text())
    prepare_options({"tokenizer": "t", "date": "2026-03-01"})  # pydantic reads the types once: let it see the real one
    monkeypatch.setattr(recipes, "datetime", SimpleNamespace(date=_Date))

    def choose(month: int, day: int) -> None:
        _Date.now = datetime.date(2026, month, day)

    return choose


def test_a_dataset_that_differs_only_in_its_date_is_reused(
    prepare: Prepare, data: Path, today: Callable[[int, int], None], tmp_path: Path, why: Callable[..., list[str]]
) -> None:
    today(3, 1)
    first = prepare(data)
    today(5, 9)
    again = prepare(data)
    assert again.hit
    assert again.warnings == (
        "the template prints the date: reusing what was prepared with 2026-03-01 (--date sets another)",
    )
    assert prepare(Path(shutil.copy(data, tmp_path / "copy.jsonl"))).hit
    assert why(data) == ["hit"]
    assert why(data, date="2026-05-09") == ["date only: 2026-03-01 → 2026-05-09"]
    other = prepare(data, date="2026-05-09")
    assert not other.hit
    assert other.dataset.key != first.dataset.key
    with data.open("ab") as file:
        file.write(data.read_bytes().splitlines(keepends=True)[0])
    assert prepare(data).progress.slices_done <= 2


def test_a_killed_build_resumes_with_its_date(
    prepare: Prepare, data: Path, today: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    today(3, 1)
    from penstock.build import commit as module

    with monkeypatch.context() as patched:
        patched.setattr(module, "commit_dataset", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(data)
    today(3, 20)
    outcome = prepare(data)
    assert outcome.dataset.recipe["date"] == "2026-03-01"
    assert outcome.progress.slices_done == 0
