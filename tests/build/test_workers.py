"""Workers that die, shards that are written behind, slices that leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from penstock.build.options import prepare_options
from penstock.build.prepare import Builder, Outcome
from penstock.build.progress import Progress
from penstock.build.recipe import make_recipe
from penstock.build.slices.pipeline import Pipeline
from penstock.build.slices.state import SliceState
from penstock.build.workers.overlap import Overlap
from penstock.chat.formats import detect
from penstock.errors import WorkerError
from penstock.sources import SliceRows
from penstock.tokenizer import load_tokenizer

ROWS: Final = 25_000


def conversation(number: int) -> dict[str, Any]:
    text = f"{number} and {number * 7919 % 1013}, " * 40
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}


@pytest.fixture
def source(write_rows: Callable[..., Path]) -> Path:
    """Enough for some slices."""
    return write_rows([conversation(number) for number in range(ROWS)])


def build(source: Path, tokenizer: Path, cache: Path, workers: int, on_progress: Any = None) -> Outcome:
    values = {"tokenizer": str(tokenizer), "cache": cache, "workers": str(workers)}
    return Builder([source], prepare_options(values), on_progress).run()


def shards(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob("shards/*/*.arrow")}


def worker_processes() -> list[int]:
    """The workers that this process has started and that have begun to work."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == str(os.getpid()) and b"penstock.build.worker" in command:
            found.append(int(folder.name))
    return found


@contextmanager
def killer(pause: float) -> Iterator[None]:
    """Kills every worker as soon as it is seen."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(pause):
            for pid in worker_processes():
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_killed_worker_is_replaced(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.slices_done == 2 and not killed:  # of more than two for each worker
            killed.append(worker_processes()[0])
            os.kill(killed[0], signal.SIGKILL)

    outcome = build(source, tokenizer, tmp_path / "two", 2, kill)
    assert killed
    assert outcome.progress.retries == 1
    assert outcome.progress.rows == ROWS
    build(source, tokenizer, tmp_path / "one", 1)
    assert shards(tmp_path / "two") == shards(tmp_path / "one")


def test_workers_that_always_die_are_told_with_their_slice(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    with killer(0.02), pytest.raises(WorkerError, match=r"died twice on the same slice .*rows.jsonl, rows \d.*SIGKILL"):
        build(source, tokenizer, tmp_path / "cache", 2)
    assert build(source, tokenizer, tmp_path / "cache", 2).progress.rows == ROWS


def test_ends_run_behind_and_are_told_in_order() -> None:
    told: list[int] = []

    def begin(number: int) -> Callable[[], int]:
        def end() -> int:
            time.sleep(0.01)
            return number

        return end

    with Overlap[int]() as overlap:
        for number in range(5):
            overlap.run(partial(begin, number), told.append)
            assert told == list(range(number))
    assert told == list(range(5))


def test_what_was_begun_before_an_error_is_told() -> None:
    told: list[int] = []
    with pytest.raises(ZeroDivisionError), Overlap[int]() as overlap:
        overlap.run(lambda: lambda: 1, told.append)
        overlap.run(lambda: 1 // 0, told.append)  # type: ignore[arg-type,return-value]
    assert told == [1]


def test_the_earlier_error_comes_first() -> None:
    with pytest.raises(KeyError) as caught, Overlap[int]() as overlap:
        overlap.run(lambda: lambda: {}["earlier"], print)
        overlap.run(lambda: 1 // 0, print)  # type: ignore[arg-type,return-value]
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_a_slice_is_let_go_without_the_collector(tokenizer: Path) -> None:
    """Errors that templates raise, and that rows are rejected for, must not hold the slice in a cycle."""
    rows: list[Any] = [conversation(number) for number in range(5)]
    rows.append({"messages": [{"role": "assistant", "content": "I begin."}]})  # its prompt, asked for, is refused
    rows.append({"messages": conversation(6)["messages"] * 2})
    model = load_tokenizer(tokenizer)
    template = (
        "{{ messages[0].content[:0] }}{% if messages|length > 2 %}{{ messages[9].content }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    options = prepare_options({"tokenizer": str(tokenizer)})
    recipe = make_recipe(options, detect(rows, options), replace(model, templates={"default": template}))
    pipeline = Pipeline(recipe, model.tokenizer_json)
    lines = SliceRows([orjson.dumps(row) for row in rows], list(range(1, len(rows) + 1)))
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        rejected = pipeline.run(lines).rejected
        del lines
        gc.collect()
        held = [thing for thing in gc.garbage if isinstance(thing, SliceState | SliceRows)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert [entry["kind"] for entry in rejected] == ["template"]
    assert not held
