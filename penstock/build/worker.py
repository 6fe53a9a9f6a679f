"""A worker process: `python -m penstock.build.worker`, driven over its standard streams.

In: one line of JSON with the recipe and the cache, then for each slice a line of JSON and, for streamed sources, its
bytes; an empty object asks for what has not been reported. Out: a line of JSON for each slice, and one after each
request when the next may come: a slice is reported once its shard is written, while the next one is being prepared.
Started as a plain process rather than through multiprocessing, so that a
user's script needs no `__main__` guard and notebooks work. It ends when its input ends, so it can't outlive its parent.
"""

from __future__ import annotations

import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import IO, Any

import orjson

from penstock.build.progress import SliceReport
from penstock.build.recipe import Recipe
from penstock.build.slices.job import SliceJob
from penstock.build.workers.overlap import Behind
from penstock.encode.memory import map_large_blocks
from penstock.errors import PenstockError
from penstock.sources import Slice, TextRows
from penstock.store.cache import Cache
from penstock.store.trust import Trust


def main() -> None:
    """Serve slices until the input ends."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not mix with our replies
    map_large_blocks()
    setup = _read(stdin)
    if setup is None:
        return
    cache = Cache(setup["cache"], trust=Trust(setup["trust"]))
    try:
        tokenizer_json = cache.tokenizer_json(setup["recipe"]["tokenizer"])
        job = SliceJob(Recipe.from_json(setup["recipe"]), tokenizer_json, cache, fast=setup["fast"])
        with Behind[SliceReport]() as behind:
            while (task := _read(stdin)) is not None:
                if task:
                    data = TextRows(stdin.read(task["bytes"]).split(b"\n")) if task["bytes"] else None
                    make = partial(job.make, Slice.from_json(task["slice"]), Path(task["path"]), data)
                    behind.do(make, lambda report: _reply(stdout, {"report": report.as_json()}))
                else:
                    behind.settle()
                _reply(stdout, {"ready": True})
    except PenstockError as error:
        _reply(stdout, {"error": str(error), "kind": type(error).__name__})
    except BrokenPipeError:
        return  # nobody is left to tell
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
    os._exit(0)  # all is written; to take the engines down piece by piece would keep the parent waiting
