"""The systems compared by `benchmarks.prepare`, each in its own process that works on request and reports its time.

    python -m benchmarks.meters penstock MODEL FILE CACHE [TURNS] | transformers MODEL TEMPLATES | gigatoken MODEL

All speak JSON, one object per line, and report seconds (wall) and cpu (user and system).

`penstock` prepares a file with one worker through the public API. After every slice it reports its clock and waits for
a line before it continues; its last report has the dataset's path. `transformers` and `gigatoken` take {"path",
"offset", "bytes"}, a range of a JSON lines file. The former runs `apply_chat_template` with masks, row by row, and
returns a hash of each row's tokens; the latter encodes rendered text. Both get conversations that are ready for the
template, as returned by `Dataset.conversation`; parsing is not counted for them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.clock import DATE
from benchmarks.oracle import Oracle, has_null_content, token_hash
from benchmarks.servers import Answer, Server, answers, serve
from penstock.prepare.encode.engines import FastEngine, Gigatoken, Splintr
from penstock.prepare.tokenizer.files import load_tokenizer


class Meter:
    """The client of such a process. `ready` is its first report."""

    def __init__(self, *arguments: str) -> None:
        self._server = Server(["-m", "benchmarks.meters", *arguments])
        self.ready = self._server.start()

    def measure(self, **request: Any) -> Answer:
        """Sends a request and waits for the report."""
        answer = self._server.ask(request)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self._server.close()


@dataclass
class MeterRun:
    """The reports of a `penstock` process: at the start, after each slice, and at the end.

    A slice is reported when it is committed, which is after the next one was encoded. The end commits the dataset and
    previews the other mode of turns: a fixed cost, like start-up.
    """

    reports: list[Answer] = field(default_factory=list)

    @property
    def result(self) -> Answer:
        return self.reports[-1]

    def cost(self, kind: str) -> float:
        """Seconds per byte after the first two slices, which count as start-up; `kind` is seconds or cpu."""
        first, last = self.reports[1], self.reports[-2]
        if len(self.reports) < 5:
            raise SystemExit("the data fits in two slices, which count as start-up: raise --megabytes")
        return float((last[kind] - first[kind]) / (last["seen"] - self.reports[2]["seen"]))

    def start_up(self, kind: str) -> float:
        """Seconds until the first two slices were encoded, minus the usual cost of them."""
        begin = self.reports[0]["seconds"] if kind == "seconds" else 0.0
        return max(0.0, float(self.reports[1][kind] - begin - self.reports[2]["seen"] * self.cost(kind)))

    def end(self, kind: str) -> float:
        """Seconds after the last slice."""
        return float(self.result[kind] - self.reports[-2][kind])


def timed(file: Path, model: Path, cache: Path, every: int = 0, pause: Callable[[int], None] | None = None) -> MeterRun:
    """Prepares a file with one worker in a new process, off the clock while `pause(bytes)` runs every `every` bytes."""
    meter = Meter("penstock", str(model), str(file), str(cache))
    run = MeterRun([meter.ready])
    while "dataset" not in run.result:
        before = run.result["seen"]
        run.reports.append(meter.measure())
        seen = run.result["seen"]
        if pause is not None and "dataset" not in run.result and seen // every > before // every:
            pause(seen)
    meter.close()
    return run


def chosen(templates: dict[str, str], conversation: dict[str, Any]) -> str:
    """The template that transformers chooses for a conversation if a tokenizer has several."""
    return templates["tool_use" if conversation["tools"] is not None and "tool_use" in templates else "default"]


def stretch(request: Answer) -> list[bytes]:
    """The complete lines in a range of a file."""
    with Path(request["path"]).open("rb") as file:
        file.seek(request["offset"])
        if request["offset"]:
            file.readline()
        return file.read(request["bytes"]).split(b"\n")[:-1]


def conversations(model: str, lines: list[bytes]) -> tuple[list[bytes], list[dict[str, Any]]]:
    """The rows that the template accepts, and their conversations as passed to it."""
    import penstock as ps

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(b"\n".join(lines) + b"\n")
        cache = Path(folder) / "cache"
        dataset = ps.prepare(
            file, tokenizer=model, cache=cache, workers=1, dropped_tool_calls="keep", on_bad_row="quarantine"
        )
        numbers = range(len(dataset))
        return [lines[dataset.locate(k).row] for k in numbers], [dataset.conversation(k) for k in numbers]


def penstock(out: Callable[[Answer], None], model: str, file: str, cache: str, turns: str = "conversation") -> None:
    """Prepares a file with one worker, pausing after each slice."""
    import penstock as ps

    paused = 0.0

    def report(**more: Any) -> None:
        nonlocal paused
        wall, cpu = time.perf_counter() - paused, time.process_time()
        out({"seconds": wall, "cpu": cpu, **more})
        begin = time.perf_counter()
        sys.stdin.readline()
        paused += time.perf_counter() - begin

    def on_progress(progress: Any) -> None:
        report(seen=progress.bytes_seen)
        last[:] = [progress]

    last: list[Any] = []
    report(seen=0)
    dataset = ps.prepare(
        file, tokenizer=model, cache=cache, workers=1, dropped_tool_calls="keep", on_bad_row="quarantine",
        date=DATE, on_progress=on_progress, turns=turns,
    )  # fmt: skip
    progress = last[0]
    report(
        seen=progress.bytes_seen, dataset=str(dataset.path), rows=progress.rows, tokens=progress.tokens,
        reference={stage: dict(why) for stage, why in progress.engines.items()}, mismatches=progress.mismatches,
    )  # fmt: skip


def transformers(model: str, templates: str) -> Callable[[Answer], Answer]:
    """Runs `apply_chat_template` with masks, using templates with {% generation %}.

    Templates that agree on the original rows may differ once words are shuffled; such rows (`other_text`) are encoded
    again with the model's own template, off the clock. Conversations that it can't render are left out (see
    `has_null_content`).
    """
    oracle, own = Oracle(Path(model)), load_tokenizer(model).templates
    tagged: dict[str, str] = json.loads(Path(templates).read_text())

    def encode(conversation: dict[str, Any], template: str, masks: bool) -> list[int]:
        encoded = oracle.tokenizer.apply_chat_template(
            conversation["messages"], tools=conversation["tools"], chat_template=template, tokenize=True,
            return_dict=True, return_assistant_tokens_mask=masks, **conversation["variables"],
        )  # fmt: skip
        ids: list[int] = encoded["input_ids"]
        return ids

    def work(request: Answer) -> Answer:
        pairs = zip(*conversations(model, stretch(request)), strict=True)
        rendered = [(line, conversation) for line, conversation in pairs if not has_null_content(conversation)]
        lines, ready = [line for line, _ in rendered], [conversation for _, conversation in rendered]
        begin, cpu = time.perf_counter(), time.process_time()
        tokens = [encode(conversation, chosen(tagged, conversation), True) for conversation in ready]
        times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        other = [
            number
            for number, conversation in enumerate(ready)
            if oracle.render(conversation, chosen(tagged, conversation))[0]
            != oracle.render(conversation, chosen(own, conversation))[0]
        ]
        for number in other:
            tokens[number] = encode(ready[number], chosen(own, ready[number]), False)
        hashes = [
            (xxhash.xxh3_128_hexdigest(line), token_hash(ids).hex()) for line, ids in zip(lines, tokens, strict=True)
        ]
        return {**times, "bytes": sum(map(len, lines)), "rows": hashes, "other_text": len(other)}

    return work


def gigatoken(model: str) -> Callable[[Answer], Answer]:
    """Runs the fast encoder alone, on text that it has not seen before: gigatoken, or the engine used in its place."""
    folder = load_tokenizer(model)
    oracle, own = Oracle(Path(model)), dict(folder.templates)
    try:
        encoder: FastEngine = Gigatoken(folder.tokenizer_json)
    except RuntimeError:  # it refuses the tokenizer
        encoder = Splintr(folder.tokenizer_json)

    def work(request: Answer) -> Answer:
        lines, ready = conversations(model, stretch(request))
        texts = [oracle.render(conversation, chosen(own, conversation))[0].encode() for conversation in ready]
        begin, cpu = time.perf_counter(), time.process_time()
        encoder.encode(texts)
        times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        return {**times, "bytes": sum(map(len, lines)), "text": sum(map(len, texts))}

    return work


def main() -> None:
    kind, *arguments = sys.argv[1:]
    match kind:
        case "penstock":
            penstock(answers(), *arguments)
        case "transformers":
            serve(transformers(*arguments))
        case "gigatoken":
            serve(gigatoken(*arguments))


if __name__ == "__main__":
    main()
