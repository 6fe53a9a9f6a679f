"""Runs many commands quickly, in processes that can be killed, and checks the files they leave."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.prepare.sources.slices import SliceSizes

ROOT = Path(__file__).parent.parent.parent
CLOCK_TICK = 0.05  # seconds; kernels timestamp files with a clock that ticks every 1 to 10 ms
SMALL = SliceSizes(1_500, 5_000, 20_000)


class Forks:
    """Runs commands in killable processes (see fork_server.py). With `host`, they appear to run on another host."""

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
        server = Path(__file__).parent / "fork_server.py"
        command = [sys.executable, "-W", "ignore", str(server), *map(str, slices or ())]
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
