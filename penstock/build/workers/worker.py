"""A worker process: `python -m penstock.build.workers.worker`, driven over its standard streams.

The input is one line of JSON with the recipe and the cache, then for each slice a line of JSON and, for streamed
sources, the slice's bytes; an empty object requests all outstanding reports. The output is one line of JSON for each
finished slice, and one line after each request when the worker is ready for the next. A shard is written, and then
reported, while the next slice is being prepared. The worker is a plain process rather than a multiprocessing child, so
a user's script needs no `__main__` guard and notebooks work. It exits when its input ends, so it can't outlive its
parent.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from typing import IO, Any

import orjson

from penstock.build.progress import SliceReport
from penstock.build.slice_job import SliceJob
from penstock.build.workers.local import Overlap
from penstock.build.workers.process import failure
from penstock.prepare.encode.process_memory import map_large_blocks
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.remote import path_from_json
from penstock.prepare.sources.slices import Slice, TextRows
from penstock.store.cache import Cache, open_cache


def main() -> None:
    """Prepares slices until the input ends."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # keeps what libraries print out of our replies
    map_large_blocks()
    setup = _read(stdin)
    if setup is None:
        return
    try:
        job = open_job(setup)
        with Overlap[SliceReport]() as commits:
            while (task := _read(stdin)) is not None:
                if task:
                    data = TextRows(stdin.read(task["bytes"]).split(b"\n")) if task["bytes"] else None
                    slice_, path = Slice.from_json(task["slice"]), path_from_json(task["path"])
                    commits.run(
                        partial(job.prepare, task["name"], slice_, path, data),
                        lambda report: _reply(stdout, {"report": report.as_json()}),
                    )
                else:
                    commits.flush()
                _reply(stdout, {"ready": True})
    except BrokenPipeError:
        return  # the parent is gone
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, or stops after another worker's error
            _reply(stdout, failure(error))


def cache_of(setup: dict[str, Any]) -> Cache:
    """Opens the cache of a build in a worker, which `Setup.to_json` describes."""
    return open_cache(*setup["cache"])


def open_job(setup: dict[str, Any]) -> SliceJob:
    """Creates the engines of a worker from its settings."""
    cache = cache_of(setup)
    tokenizer_json = cache.tokenizer_json(setup["recipe"]["tokenizer"])
    return SliceJob(Recipe.from_json(setup["recipe"]), tokenizer_json, cache, fast=setup["fast"])


def _read(stream: IO[bytes]) -> dict[str, Any] | None:
    line = stream.readline()
    return orjson.loads(line) if line else None


def _reply(stream: IO[bytes], value: dict[str, Any]) -> None:
    stream.write(orjson.dumps(value) + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # everything is written; tearing down the engines would only keep the parent waiting
