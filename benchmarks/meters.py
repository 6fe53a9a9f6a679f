"""What Penstock is compared with, each in a process of its own that works on command and reports its time.

    python -m benchmarks.meters peer TOKENIZER TEMPLATE | limit TOKENIZER

In: lines of JSON, {"path", "offset", "bytes"}: a stretch of a JSON lines file. Out: lines of JSON with seconds (wall
and CPU) and bytes. `peer` is transformers' `apply_chat_template(tokenize=True)` with its masks, row by row, parsing not
counted; it also gives a hash of each row's tokens. `limit` is gigatoken alone on text that is rendered already and that
it has seen once before (warm).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from penstock.build.options import prepare_options
from penstock.build.pipeline import Pipeline
from penstock.build.recipe import make_recipe
from penstock.chat.conversation import Conversation
from penstock.chat.formats_detect import detect
from penstock.sources import model_folder

Answer = dict[str, Any]
ROOT = Path(__file__).parent.parent


class Meter:
    """The other end of such a process."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "benchmarks.meters", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._read()  # it says when it is ready

    def measure(self, **request: Any) -> Answer:
        """Ask for a stretch of work, and wait for it to be done."""
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(request) + b"\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        answer: Answer = json.loads(self._process.stdout.readline())
        return answer


def token_hash(ids: Any) -> int:
    """A hash of a row's tokens."""
    return xxhash.xxh3_64_intdigest(np.asarray(ids, np.uint32).tobytes())


def lines_at(path: str, offset: int, size: int) -> list[bytes]:
    """The whole lines in a stretch of a file."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        if offset:
            file.readline()
        return file.read(size).splitlines()[:-1]


def pipeline_of(tokenizer: str, lines: list[bytes]) -> Pipeline:
    """Penstock's own stages for such rows; used to give the others conversations and texts that are ready to use."""
    model = model_folder.load(tokenizer)
    options = prepare_options({"tokenizer": tokenizer})
    mapping = detect([orjson.loads(line) for line in lines[:100]], options)
    return Pipeline(make_recipe(options, mapping, model), model.tokenizer_json)


def conversations(pipeline: Pipeline, lines: list[bytes]) -> list[Conversation]:
    """The rows as the template can take them, which is what `Dataset.conversation` shows."""
    adapt = pipeline.renderings["default"].adapter.adapt
    return [adapt(conversation) for line in lines for conversation in pipeline.reader.conversations(line)]


def peer(tokenizer: str, template: str) -> Callable[[Answer], Answer]:
    """transformers, with masks from a template with {% generation %}."""
    from benchmarks.conformance import reference_tokenizer

    oracle = reference_tokenizer(Path(tokenizer))
    text = Path(template).read_text()
    pipeline: Pipeline | None = None

    def work(request: Answer) -> Answer:
        nonlocal pipeline
        lines = lines_at(request["path"], request["offset"], request["bytes"])
        pipeline = pipeline or pipeline_of(tokenizer, lines)
        ready = conversations(pipeline, lines)
        tokens = []
        begin, cpu = time.perf_counter(), time.process_time()
        for conversation in ready:
            encoded = oracle.apply_chat_template(
                conversation.messages, tools=conversation.tools, chat_template=text, tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
            tokens.append(encoded["input_ids"])
        times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        hashes = [(xxhash.xxh3_64_intdigest(line), token_hash(ids)) for line, ids in zip(lines, tokens, strict=True)]
        return {**times, "bytes": sum(map(len, lines)), "rows": hashes}

    return work


def limit(tokenizer: str) -> Callable[[Answer], Answer]:
    """The fast encoder alone."""
    from gigatoken import Tokenizer

    encoder = Tokenizer.from_json(model_folder.load(tokenizer).tokenizer_json).backend
    pipeline: Pipeline | None = None

    def work(request: Answer) -> Answer:
        nonlocal pipeline
        lines = lines_at(request["path"], request["offset"], request["bytes"])
        pipeline = pipeline or pipeline_of(tokenizer, lines)
        regions = pipeline.renderings["default"].engine.render(conversations(pipeline, lines))
        ends = regions.text_ends.tolist()
        texts = [regions.data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        encoder.encode_batch(texts, parallel=False)
        begin, cpu = time.perf_counter(), time.process_time()
        encoder.encode_batch(texts, parallel=False)
        times = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        return {**times, "bytes": sum(map(len, lines)), "text": len(regions.data)}

    return work


def main() -> None:
    make: dict[str, Callable[..., Callable[[Answer], Answer]]] = {"peer": peer, "limit": limit}
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not mix with our answers
    work = make[sys.argv[1]](*sys.argv[2:])
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
