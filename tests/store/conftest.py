"""Fixtures that run many commands quickly, and checks of the files they leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.build import slice_plans
from penstock.build.options import prepare_options
from penstock.build.outcome import Outcome
from penstock.build.run import Builder
from penstock.prepare.sources import reading, text_slices
from penstock.prepare.sources.slices import SliceSizes

CLOCK_TICK = 0.05  # seconds; kernels timestamp files with a clock that ticks every 1 to 10 ms
Prepare = Callable[..., Outcome]
SMALL = SliceSizes(1_500, 5_000, 20_000)
ROOT = Path(__file__).parent.parent.parent


class Forks:
    """Runs commands in killable processes (see forks.py). With `host`, they appear to run on another host."""

    def __init__(
        self, logs: Path, host: str = "", preload: Path | None = None, slices: SliceSizes | None = None
    ) -> None:
        self._logs = logs
        self._copies = Path(tempfile.mkdtemp(prefix="penstock-copies-"))  # of users without a home
        self._copies.chmod(0o777)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false"}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "forks.py"), *map(str, slices or ())]
        if host:
            command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._count = 0

    def _ask(self, **job: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, *args: object, fault: str = "", workers: bool = False, **more: Any) -> int:
        """Start a command; `fault` is the commit step to die at, `workers` forces worker processes for small data."""
        self._count += 1
        env = {"PENSTOCK_FAULT": fault, "PENSTOCK_LOCAL_CACHE": str(self._copies), **more.pop("env", {})}
        log = self._logs / f"{self._count}.log"
        pid: int = self._ask(do="start", args=[str(a) for a in args], env=env, log=str(log), workers=workers, **more)
        (self._logs / f"{pid}.pid").write_text(str(log))
        return pid

    def kill(self, pid: int) -> None:
        """Kill a run with its whole process group."""
        self._ask(do="kill", pid=pid)

    def wait(self, pid: int) -> int:
        """The exit code of a run; negative if a signal killed it."""
        code: int = self._ask(do="wait", pid=pid)
        return code

    def output(self, pid: int) -> str:
        """The output of a run."""
        return Path((self._logs / f"{pid}.pid").read_text()).read_text()

    def run(self, *args: object, **more: Any) -> tuple[int, str]:
        """Run a command to completion."""
        pid = self.start(*args, **more)
        return self.wait(pid), self.output(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        shutil.rmtree(self._copies)


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory if possible: tests that kill processes need no disk, and syncing to one is slow."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=base))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cache(memory: Path) -> Iterator[Path]:
    """An empty cache."""
    folder = Path(tempfile.mkdtemp(prefix="cache-", dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """One fork server for all tests."""
    server = Forks(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def chats(memory: Path) -> Path:
    """The bundled conversations, which make about twenty small slices, where every user can read them."""
    path = memory / "chats.jsonl"
    path.write_bytes((ROOT / "examples" / "data" / "chats.jsonl").read_bytes())
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


@pytest.fixture(scope="session")
def public_tokenizer(memory: Path, tokenizer: Path) -> Path:
    """A copy of the tokenizer that every user can read."""
    return Path(shutil.copytree(tokenizer, memory / "tokenizer"))


def result(cache: Path) -> dict[str, bytes]:
    """The files that must not depend on how a build went: shards and manifests."""
    files = [*cache.glob("shards/*/*.arrow"), *cache.glob("datasets/*/manifest.json")]
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(files)}


def leftovers(cache: Path) -> list[Path]:
    """Files that a finished build must not leave."""
    known = {"claims", "datasets", "leases", "memo", "penstock-cache.json", "retired", "shards", "tmp", "tokenizers"}
    unknown = [path for path in cache.glob("*") if path.name not in known]
    temporary = [path for folder in ("claims", "leases", "tmp") for path in (cache / folder).glob("*")]
    return [*unknown, *temporary, *cache.rglob("*.bad")]


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store plans of files that are young or on tmpfs, as all files of tests are, in this process (see forks.py)."""
    monkeypatch.setattr(slice_plans, "SETTLED", CLOCK_TICK)
    monkeypatch.setattr(slice_plans, "WITHOUT_TIMES", frozenset())


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut sources into small slices, in this process."""
    monkeypatch.setitem(text_slices.cut_text.__kwdefaults__, "sizes", SMALL)
    monkeypatch.setattr(reading, "SLICE_SIZES", SMALL)


@pytest.fixture
def data(chats: Path, tmp_path: Path) -> Path:
    """A modifiable copy of the conversations."""
    path = tmp_path / "rows.jsonl"
    shutil.copy2(chats, path)
    return path


@pytest.fixture
def model(tokenizer: Path, tmp_path: Path) -> Path:
    """A modifiable copy of the tokenizer's folder."""
    return Path(shutil.copytree(tokenizer, tmp_path / "model"))


@pytest.fixture
def prepare(cache: Path, model: Path) -> Prepare:
    """Prepare in this process with the reference engines: same shards, no start-up time."""

    def run(*sources: Path, **options: Any) -> Outcome:
        given = {"tokenizer": model, "cache": cache, "fast": False} | options
        return Builder(list(sources), prepare_options(given), None).run()

    return run
