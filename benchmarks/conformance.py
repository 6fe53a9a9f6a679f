"""Compares Penstock with transformers, row by row: tokens always, masks where the template has {% generation %}.

    python -m benchmarks.conformance --tokenizer FOLDER … --data FILE.jsonl … [--template FILE.jinja …] [--sample N]

Templates default to the tokenizer's own and all of PyPI's `trl`. For each template and tokenizer it prints how many
rows transformers renders, how many have equal tokens and masks, how many are refused, and which engines served them.
Exits with 1 unless all are equal and none is refused. The work is spread over `--processes`; if a process crashes or
hangs, its template is reported and the run continues.

With `--masks-against CHECKOUT`, masks and segments are compared with those of another checkout instead (`masks`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from benchmarks import models
from benchmarks.clock import DATE
from benchmarks.masks import compare_masks, mask_report
from benchmarks.material import Files, sampled
from benchmarks.oracle import Expected, Oracle, token_hash
from benchmarks.servers import Server, ServerDiedError, serve
from penstock.errors import SourceError
from penstock.prepare.tokenizer.files import load_tokenizer

NAMED = 3  # differing rows to print per template


@dataclass
class ConformanceTally:
    """Counts for one template and tokenizer over all data. Each side of a pair counts as a row."""

    rows: int = 0
    not_rendered: int = 0  # transformers refuses the conversation
    refused: int = 0  # transformers renders it but Penstock doesn't
    equal: int = 0
    masks: int = 0
    masks_equal: int = 0
    masks_theirs_wrong: int = 0  # equal after fixing the known bugs of transformers' own mask
    engines: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def perfect(self) -> bool:
        return (
            not self.errors
            and self.equal == self.rows - self.not_rendered
            and not self.refused
            and self.masks_equal + self.masks_theirs_wrong == self.masks
        )


def trl_templates() -> dict[str, str]:
    """The chat templates in PyPI's trl."""
    return {f"trl/{name}": text for name, text in models.trl_templates().items()}


# -- one template with one tokenizer ------------------------------------------------------------------------------


def compare(files: Files, tokenizer: Path, oracle: Oracle, template: str, tally: ConformanceTally) -> None:
    """Prepares files and compares every row."""
    clock = Clock(tally.seconds)
    with tempfile.TemporaryDirectory() as folder:
        file, quarantine = Path(folder) / "template.jinja", Path(folder) / "quarantine.jsonl"
        file.write_text(template)
        last: list[Any] = []
        try:
            dataset = ps.prepare(
                *files.paths, tokenizer=str(tokenizer), template=file, cache=Path(folder) / "cache", workers=1,
                on_bad_row="quarantine", quarantine_file=quarantine, dropped_tool_calls="keep",
                date=DATE, on_progress=lambda progress: last.append(progress),
            )  # fmt: skip
        except SourceError:  # the template refuses every row
            if not quarantine.exists():
                raise
            compare_rejected(quarantine, oracle, template, tally)
            return
        clock.lap("prepare")
        for stage, why in last[-1].engines.items():
            tally.engines.update({f"{stage}: {reason}": n for reason, n in why.items()})
        compare_rows(dataset, files, oracle, template, tally, clock)
        compare_rejected(quarantine, oracle, template, tally)
        clock.lap("rejected")


def compare_rows(
    dataset: ps.Dataset, files: Files, oracle: Oracle, template: str, tally: ConformanceTally, clock: Clock
) -> None:
    """Compares the tokens and masks of every example."""
    has_masks = "generation %}" in template and not dataset.is_preference
    masks = view_masks(dataset) if has_masks else {}
    clock.lap("masks")
    sides = list(conversations(dataset))
    clock.lap("conversations")
    if wrong := oracle.check(sides, template, has_masks):
        tally.errors.append(f"the batched reference differs from apply_chat_template on {wrong} conversations")
    for number, expected in enumerate(oracle.expected(sides, template, has_masks)):
        tally.rows += 1
        where = files.name(*dataset.locate(number))
        ids = dataset.input_ids(number)
        if expected.error is not None:
            tally.differing.append(f"transformers refuses what Penstock rendered, {where}: {expected.error}")
        elif token_hash(ids) == expected.tokens:
            tally.equal += 1
            if has_masks:
                compare_mask(masks.get(number, np.zeros(len(ids), bool)), expected, where, tally)
        else:
            tally.differing.append(f"tokens of {where}")
            tally.masks += has_masks
    clock.lap("reference")


def compare_mask(ours: Any, expected: Expected, where: str, tally: ConformanceTally) -> None:
    tally.masks += 1
    if np.array_equal(ours, expected.mask):
        tally.masks_equal += 1
    elif np.array_equal(ours, expected.repaired_mask()):
        tally.masks_theirs_wrong += 1
    else:
        tally.differing.append(f"mask of {where}")


def conversations(dataset: ps.Dataset) -> Iterator[dict[str, Any]]:
    """The conversations of all examples in order, as passed to the template; for pairs, both sides."""
    for number in range(len(dataset)):
        found = dataset.conversation(number)
        yield from (found["chosen"], found["rejected"]) if dataset.is_preference else (found,)


def view_masks(dataset: ps.Dataset) -> dict[int, Any]:
    """Masks of all_assistant_messages by example number; examples without trained tokens are missing."""
    view = dataset.view(max_length=None, regions_unknown="drop")
    return {int(number): view.example(k).loss_mask for k, number in enumerate(view.index.rows)}


def compare_rejected(quarantine: Path, oracle: Oracle, template: str, tally: ConformanceTally) -> None:
    """Checks whether transformers would have rendered the quarantined rows as is."""
    for line in quarantine.read_text().split("\n") if quarantine.exists() else []:
        if line:
            entry = json.loads(line)
            tally.rows += 1
            if renders_raw(json.loads(entry["data"]), oracle, template):
                tally.refused += 1
                tally.differing.append(f"refused {entry['where']}: {entry['reason']}")
            else:
                tally.not_rendered += 1


def renders_raw(row: dict[str, Any], oracle: Oracle, template: str) -> bool:
    prompt = row.get("messages") or row.get("prompt")
    sides = [prompt + row[k] for k in ("chosen", "rejected")] if "chosen" in row else [prompt]
    try:
        for side in sides:
            oracle.render({"messages": side, "tools": row.get("tools"), "variables": {}}, template)
    except Exception:
        return False
    return True


class Clock:
    """CPU seconds by stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.process_time()

    def lap(self, stage: str) -> None:
        now = time.process_time()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now


# -- all templates and tokenizers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConformanceTask:
    """A template to compare with a tokenizer."""

    tokenizer: Path
    name: str
    template: str


def families(tokenizers: list[Path], chosen: Mapping[Path, Mapping[str, str]]) -> deque[list[ConformanceTask]]:
    """Groups tasks that render similar text, so that one process encodes it once: `x_training` before `x`."""
    found: dict[tuple[Path, str], list[ConformanceTask]] = {}
    for tokenizer in tokenizers:
        for name, template in chosen[tokenizer].items():
            found.setdefault((tokenizer, name.removesuffix("_training")), []).append(
                ConformanceTask(tokenizer, name, template)
            )
    return deque(sorted(tasks, key=lambda task: "generation %}" not in task.template) for tasks in found.values())


class ConformanceRun:
    """Processes that take families from both ends of the list, so that each mostly stays with one tokenizer."""

    def __init__(self, work: deque[list[ConformanceTask]], data: list[Files], seconds: float) -> None:
        self._work, self._data, self._seconds = work, data, seconds
        self._lock = threading.Lock()
        self.tallies: dict[str, ConformanceTally] = {}

    def go(self, processes: int) -> None:
        threads = [threading.Thread(target=self._drive, args=(number % 2 == 1,)) for number in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _drive(self, from_end: bool) -> None:
        server = Server(["-m", "benchmarks.conformance", "--serve"], seconds=self._seconds)
        while (family := self._next(from_end)) is not None:
            for task in family:
                tally = self._tally(server, task)
                with self._lock:
                    self.tallies[f"{task.tokenizer.name} × {task.name}"] = tally
                    print_tally(task, tally)
        server.close()

    def _next(self, from_end: bool) -> list[ConformanceTask] | None:
        with self._lock:
            if not self._work:
                return None
            return self._work.pop() if from_end else self._work.popleft()

    def _tally(self, server: Server, task: ConformanceTask) -> ConformanceTally:
        request = {"tokenizer": str(task.tokenizer.absolute()), "template": task.template}
        try:
            answer = server.ask({**request, "data": [files.as_json() for files in self._data]})
        except ServerDiedError as died:
            answer = {"errors": [f"the process died: {died}"]}
        return ConformanceTally(**{**answer, "engines": Counter(answer.get("engines"))})


def work(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one task."""
    tally = ConformanceTally()
    tokenizer = Path(request["tokenizer"])
    try:
        for files in request["data"]:
            compare(Files(**files), tokenizer, oracle_of(tokenizer), request["template"], tally)
    except Exception as error:  # one template's failure must not end the run
        tally.errors.append(f"{type(error).__name__}: {error}")
    return dict(tally.__dict__)


@cache
def oracle_of(tokenizer: Path) -> Oracle:
    return Oracle(tokenizer)


HEAD = f"{'tokenizer':16} {'template':36} {'rows':>7} {'rendered':>8} {'equal':>7} {'refused':>7} {'masks':>13} why"


def print_tally(task: ConformanceTask, tally: ConformanceTally) -> None:
    rendered = tally.rows - tally.not_rendered
    masks = f"{tally.masks_equal}+{tally.masks_theirs_wrong}/{tally.masks}" if tally.masks else "-"
    why = "; ".join(f"{reason} {n}" for reason, n in tally.engines.most_common(3)) or "fast"
    print(
        f"{task.tokenizer.name:16} {task.name:36} {tally.rows:7} {rendered:8} {tally.equal:7} {tally.refused:7}"
        f" {masks:>13} {why}"
    )
    for line in (*(f"ERROR {error}" for error in tally.errors), *tally.differing[:NAMED]):
        print(f"    {line}")
    sys.stdout.flush()


def chosen_templates(arguments: argparse.Namespace, tokenizer: Path) -> dict[str, str]:
    """The templates to compare, by name."""
    return {p.stem: p.read_text() for p in arguments.template or []} or {
        **{f"own/{n}": t for n, t in load_tokenizer(tokenizer).templates.items()},
        **({} if arguments.own else trl_templates()),
    }


def masks_against(arguments: argparse.Namespace, data: list[Files]) -> tuple[bool, dict[str, Any]]:
    """Compares masks and segments with another checkout's."""
    tallies = {}
    for tokenizer in arguments.tokenizer:
        templates = chosen_templates(arguments, tokenizer)
        found = compare_masks(arguments.masks_against, tokenizer, templates, data, arguments.timeout)
        tallies.update({f"{tokenizer.name} × {name}": tally for name, tally in found.items()})
    return all(tally.perfect for tally in tallies.values()), mask_report(tallies)


def conformance(arguments: argparse.Namespace, data: list[Files]) -> tuple[bool, dict[str, Any]]:
    """Compares tokens and masks with transformers'."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if arguments.processes > 1 else "true"
    chosen = {tokenizer: chosen_templates(arguments, tokenizer) for tokenizer in arguments.tokenizer}
    print(HEAD)
    run = ConformanceRun(families(arguments.tokenizer, chosen), data, arguments.timeout)
    run.go(arguments.processes)
    spent: Counter[str] = Counter()
    for tally in run.tallies.values():
        spent.update(tally.seconds)
    rows, equal = (sum(getattr(tally, name) for tally in run.tallies.values()) for name in ("rows", "equal"))
    print(f"{len(run.tallies)} combinations, {rows:,} rows, {equal:,} equal; CPU seconds:", end=" ")
    print(", ".join(f"{stage} {seconds:.0f}" for stage, seconds in spent.most_common()))
    return all(tally.perfect for tally in run.tallies.values()), {n: tally.__dict__ for n, tally in run.tallies.items()}


def main() -> int:
    if sys.argv[1:] == ["--serve"]:
        serve(work)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", nargs="+", type=Path, required=True, help="folders with tokenizer.json")
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--template", nargs="*", type=Path, help="templates; default: the tokenizer's own and trl's")
    parser.add_argument("--own", action="store_true", help="only the tokenizer's own templates")
    parser.add_argument("--sample", type=int, help="rows per file; default: all")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--masks-against", type=Path, help="compare masks with those of this checkout instead")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per template")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        data = sampled(arguments.data, arguments.sample, Path(folder))
        good, results = (masks_against if arguments.masks_against else conformance)(arguments, data)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print("all equal" if good else "NOT all equal", f"in {(time.perf_counter() - begin) / 60:.1f} minutes")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
