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
from tests.store.conftest import Forks

ROOT = Path(__file__).parent.parent.parent
EXITS = Path(os.environ.get("PENSTOCK_EXITS", ROOT / ".exits")) / "bin" / "python"
Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder on tmpfs if available: syncing to disk would take most of the test time."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="penstock-export-", dir=base))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # other runs may clean up here too


@pytest.fixture
def place(memory: Path) -> Iterator[Path]:
    """An empty folder on tmpfs."""
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """A fork server shared by these tests."""
    server = Forks(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def dataset(forks: Forks, memory: Path, examples: Path, tokenizer: Path) -> ps.Dataset:
    """The bundled conversations in about twenty shards."""
    chats = examples / "data" / "chats.jsonl"
    code, said = forks.run("prepare", chats, "--tokenizer", tokenizer, "--cache", memory / "cache", "--no-fast")
    assert code == 0, said
    (manifest,) = (memory / "cache").glob("datasets/*/manifest.json")
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
