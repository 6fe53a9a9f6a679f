"""A worker process: `python -m penstock.build.worker`, driven over its standard streams.

In: one line of JSON with the recipe and the cache, then for each slice a line of JSON and, for streamed sources, its
bytes. Out: a line of JSON for each slice. Started as a plain process rather than through multiprocessing, so that a
user's script needs no `__main__` guard and notebooks work. It ends when its input ends, so it can't outlive its parent.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import IO, Any

import orjson

from penstock.build.recipe import Recipe
from penstock.build.slice_job import SliceJob
from penstock.errors import PenstockError
from penstock.sources import Slice
from penstock.store.cache import Cache


def main() -> None:
    """Serve slices until the input ends."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not mix with our replies
    setup = _read(stdin)
    if setup is None:
        return
    cache = Cache(setup["cache"])
    try:
        tokenizer_json = cache.tokenizer_path(setup["recipe"]["tokenizer"]).read_bytes()
        job = SliceJob(Recipe.from_json(setup["recipe"]), tokenizer_json, cache, fast=setup["fast"])
        _reply(stdout, {"ready": True, "warnings": job.pipeline.warnings, "engines": job.pipeline.engines})
        while (task := _read(stdin)) is not None:
            data = stdin.read(task["bytes"]) if task["bytes"] else None
            _reply(stdout, {"report": job.run(Slice.from_json(task["slice"]), Path(task["path"]), data).as_json()})
    except PenstockError as error:
        _reply(stdout, {"error": str(error), "kind": type(error).__name__})
    except MemoryError:
        _reply(stdout, {"error": "out of memory", "kind": "MemoryError"})
    except Exception as error:
        _reply(stdout, {"error": f"{error!r}\n{traceback.format_exc()}", "kind": type(error).__name__})


def _read(stream: IO[bytes]) -> dict[str, Any] | None:
    line = stream.readline()
    return orjson.loads(line) if line else None


def _reply(stream: IO[bytes], value: dict[str, Any]) -> None:
    stream.write(orjson.dumps(value) + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
