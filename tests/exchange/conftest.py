"""Prepared datasets to export, killable commands, and the environment with the trainers' own packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.support.forks import Forks

ROOT = Path(__file__).parent.parent.parent
EXITS = Path(os.environ.get("PENSTOCK_EXITS", ROOT / ".exits")) / "bin" / "python"
Ask = Callable[..., Any]


@pytest.fixture
def place(memory: Path) -> Iterator[Path]:
    """An empty folder on tmpfs."""
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def dataset(forks: Forks, memory: Path, examples: Path, tokenizer: Path) -> ps.Dataset:
    """The bundled conversations in about twenty shards."""
    chats = examples / "data" / "chats.jsonl"
    code, said = forks.run("prepare", chats, "--tokenizer", tokenizer, "--cache", memory / "exported", "--no-fast")
    assert code == 0, said
    (manifest,) = (memory / "exported").glob("datasets/*/manifest.json")
    found = ps.open(manifest.parent)
    assert len(found.shards) > 15
    return found


@pytest.fixture(scope="session")
def pairs(memory: Path, examples: Path, tokenizer: Path) -> ps.Dataset:
    """The bundled preference pairs."""
    return ps.prepare(examples / "data" / "pairs.jsonl", tokenizer=tokenizer, cache=memory / "pairs", workers=1)


@pytest.fixture(scope="session")
def ask() -> Ask:
    """Runs a script from `packages/` with the trainers' own packages and returns the JSON it prints."""
    if not EXITS.exists():
        pytest.skip("the trainers' packages are not installed: run `make exits`")

    def run(script: str, *arguments: object) -> Any:
        command = [str(EXITS), str(Path(__file__).parent / "packages" / f"{script}.py"), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
