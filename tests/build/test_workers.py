"""Workers that die, shards written while the next slice is prepared, and memory freed after each slice."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from penstock import child
from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome
from penstock.build.progress import Progress
from penstock.build.run import Builder
from penstock.build.workers.local import Overlap
from penstock.errors import WorkerError
from penstock.prepare.chat.formats import detect
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import make_recipe
from penstock.prepare.slice_record import SliceState
from penstock.prepare.sources.slices import SliceRows
from penstock.prepare.tokenizer.files import load_tokenizer

pytestmark = pytest.mark.slow

ROWS: Final = 25_000


def conversation(number: int) -> dict[str, Any]:
    text = f"{number} and {number * 7919 % 1013}, " * 40
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}


@pytest.fixture
def source(write_rows: Callable[..., Path]) -> Path:
    """Enough rows for several slices."""
    return write_rows([conversation(number) for number in range(ROWS)])


def build(source: Path, tokenizer: Path, cache: Path, workers: int, on_progress: Any = None) -> Outcome:
    values = {"tokenizer": str(tokenizer), "cache": cache, "workers": str(workers)}
    return Builder([source], prepare_options(values), on_progress).run()


def shards(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.glob("shards/*/*.arrow")}


def processes() -> dict[int, int]:
    """Returns the fork servers and workers of all builds, and the parent of each."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"penstock.build.workers.worker" in command:
            found[int(folder.name)] = int(parent)
    return found


def fork_servers() -> list[int]:
    """Returns the ids of this process's fork servers."""
    return [pid for pid, parent in processes().items() if parent == os.getpid()]


def worker_processes() -> list[int]:
    """Returns the ids of the workers that these have forked."""
    servers = fork_servers()
    return [pid for pid, parent in processes().items() if parent in servers]


@contextmanager
def killer(pause: float, found: Callable[[], list[int]]) -> Iterator[None]:
    """Kills every worker, or every fork server, as soon as it appears."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(pause):
            for pid in found():
                with suppress(ProcessLookupError):
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


def test_workers_outlive_the_process_that_forked_them(source: Path, tokenizer: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.slices_done == 2 and not killed:
            killed.extend([*fork_servers(), worker_processes()[0]])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    outcome = build(source, tokenizer, tmp_path / "two", 2, kill)
    assert len(killed) == 2
    assert outcome.progress.retries == 1
    assert outcome.progress.rows == ROWS


def test_each_worker_loads_its_engines_where_forking_is_unsafe(
    source: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.platform = 'darwin'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.slices_done == 2 and not started:
            assert not worker_processes()
            started.extend(fork_servers())

    assert build(source, tokenizer, tmp_path / "two", 2, watch).progress.rows == ROWS
    assert len(started) == 2


@pytest.mark.parametrize("victims", [worker_processes, fork_servers])
def test_the_error_names_the_slice_that_kills_workers(
    source: Path, tokenizer: Path, tmp_path: Path, victims: Callable[[], list[int]]
) -> None:
    with (
        killer(0.02, victims),
        pytest.raises(WorkerError, match=r"died twice on the same slice .*rows.jsonl, rows \d.*SIGKILL"),
    ):
        build(source, tokenizer, tmp_path / "cache", 2)
    assert build(source, tokenizer, tmp_path / "cache", 2).progress.rows == ROWS


def test_second_steps_overlap_and_results_come_in_order() -> None:
    delivered: list[int] = []

    def begin(number: int) -> Callable[[], int]:
        def end() -> int:
            time.sleep(0.01)
            return number

        return end

    with Overlap[int]() as overlap:
        for number in range(5):
            overlap.run(partial(begin, number), delivered.append)
            assert delivered == list(range(number))
    assert delivered == list(range(5))


def test_the_result_before_an_error_is_delivered() -> None:
    delivered: list[int] = []
    with pytest.raises(ZeroDivisionError), Overlap[int]() as overlap:
        overlap.run(lambda: lambda: 1, delivered.append)
        overlap.run(lambda: 1 // 0, delivered.append)  # type: ignore[arg-type,return-value]
    assert delivered == [1]


def test_the_earlier_error_comes_first() -> None:
    with pytest.raises(KeyError) as caught, Overlap[int]() as overlap:
        overlap.run(lambda: lambda: {}["earlier"], print)
        overlap.run(lambda: 1 // 0, print)  # type: ignore[arg-type,return-value]
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_a_slice_is_freed_without_the_garbage_collector(tokenizer: Path) -> None:
    """Errors of templates and of rejected rows must not keep the slice alive in a reference cycle."""
    rows: list[Any] = [conversation(number) for number in range(5)]
    rows.append({"messages": [{"role": "assistant", "content": "I begin."}]})  # the template refuses its prompt
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


def test_a_worker_whose_parent_has_stopped_prints_nothing() -> None:
    """After a worker's error the parent closes the connections; a second error then had no reader: a traceback."""
    ours, other = socket.socketpair()
    with ours, other:
        process = subprocess.Popen(
            child.command("penstock.build.workers.worker"),
            stdin=other,
            stderr=subprocess.PIPE,
            env=child.environment(),
        )
        ours.sendall(b'{"cache": ["/nowhere"], "recipe": {"tokenizer": "b3-' + b"0" * 64 + b'"}}\n')
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == 0
    process.stderr.close()
