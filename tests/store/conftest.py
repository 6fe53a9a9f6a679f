"""Caches, sources and a `prepare` in this process that cuts small slices."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.build import slice_plans
from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome
from penstock.build.run import Builder
from penstock.prepare.sources import reading, text_slices
from tests.support.forks import CLOCK_TICK, ROOT, SMALL

Prepare = Callable[..., Outcome]


@pytest.fixture
def cache(memory: Path) -> Iterator[Path]:
    """An empty cache."""
    folder = Path(tempfile.mkdtemp(prefix="cache-", dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def chats(memory: Path) -> Path:
    """The bundled conversations, which make about twenty small slices, where every user can read them."""
    path = memory / "chats.jsonl"
    path.write_bytes((ROOT / "examples" / "data" / "chats.jsonl").read_bytes())
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


@pytest.fixture(scope="session")
def public_tokenizer(memory: Path, tokenizer: Path) -> Path:
    """A copy of the tokenizer that every user can read."""
    return Path(shutil.copytree(tokenizer, memory / "tokenizer"))


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store plans of files that are young or on tmpfs, as all files of tests are, in this process."""
    monkeypatch.setattr(slice_plans, "SETTLED", CLOCK_TICK)
    monkeypatch.setattr(slice_plans, "WITHOUT_TIMES", frozenset())


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sources into small slices, in this process."""
    monkeypatch.setitem(text_slices.cut_text.__kwdefaults__, "sizes", SMALL)
    monkeypatch.setattr(reading, "SLICE_SIZES", SMALL)


@pytest.fixture
def data(chats: Path, tmp_path: Path) -> Path:
    """A modifiable copy of the conversations."""
    path = tmp_path / "rows.jsonl"
    shutil.copy2(chats, path)
    return path


@pytest.fixture
def model(tokenizer: Path, tmp_path: Path) -> Path:
    """A modifiable copy of the tokenizer's folder."""
    return Path(shutil.copytree(tokenizer, tmp_path / "model"))


@pytest.fixture
def prepare(cache: Path, model: Path) -> Prepare:
    """Prepare in this process with the reference engines: same shards, no start-up time."""

    def run(*sources: Path, **options: Any) -> Outcome:
        given = {"tokenizer": model, "cache": cache, "fast": False} | options
        return Builder(list(sources), prepare_options(given), None).run()

    return run
