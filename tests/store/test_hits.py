"""A cache hit is fast: it imports neither numpy nor an engine, and reads no data."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import penstock as ps
from tests.store.conftest import Prepare
from tests.support.forks import ROOT

ENGINES = {"numpy", "pyarrow", "tokenizers", "gigatoken", "jinja2", "transformers", "torch", "datasets"}
HEAVY = {*ENGINES, "typer", "pydantic"}
CODE = """
import atexit, sys
from penstock.cli import main
atexit.register(lambda: print("modules:", *sys.modules, file=sys.stderr))
main()
"""


def test_a_hit_by_command_imports_nothing_heavy(prepare: Prepare, data: Path, model: Path, cache: Path) -> None:
    time.sleep(0.06)  # files younger than the clock tick are not memoized
    prepare(data)
    command = ["prepare", str(data), "--tokenizer", str(model), "--cache", str(cache), "--json"]
    done = subprocess.run([sys.executable, "-c", CODE, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert '"hit": true' in done.stdout
    modules = set(done.stderr.rpartition("modules:")[2].split())
    assert modules & HEAVY == set()


def test_a_hit_in_a_program_takes_milliseconds(prepare: Prepare, data: Path, model: Path, cache: Path) -> None:
    time.sleep(0.06)
    prepare(data)
    times = []
    for _ in range(10):
        began = time.process_time()
        ps.prepare(data, tokenizer=model, cache=cache, on_miss="error")
        times.append(time.process_time() - began)
    assert min(times) < 0.025
