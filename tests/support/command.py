"""Runs `penstock` as a shell does, but forked from a process that has everything imported: it starts in milliseconds.

The test of the wheel and the examples of the docs run the command in processes of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
_servers: list[subprocess.Popen[str]] = []


def run(
    *arguments: object,
    cache: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    seconds: int | None = None,
    memory: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command. `seconds` of processor time and bytes of `memory` are limits."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"} if env is None else dict(env)
    if cache is not None:
        variables["PENSTOCK_CACHE"] = str(cache)
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_DATA: memory}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        line = [str(argument) for argument in arguments]
        place = {"cwd": str(cwd or Path.cwd()), "out": str(out), "err": str(err)}
        code = _ask({"line": line, "env": variables, "limits": [(k, v) for k, v in limits.items() if v], **place})
        return subprocess.CompletedProcess(line, code, out.read_text(), err.read_text())


def _ask(job: dict[str, Any]) -> int:
    if not _servers:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__))]
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        _servers.append(made)
        atexit.register(made.communicate)
    server = _servers[0]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def _serve() -> None:
    import penstock.api
    import penstock.build.run
    import penstock.look.compare
    import penstock.look.report
    import penstock.look.terminal
    import penstock.store.verify  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _command(job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _command(job: dict[str, Any]) -> None:
    """Run one command in a forked process, and end it."""
    from penstock.cli import main

    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), stream)
    for limit, most in job["limits"]:
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv[1:] = job["line"]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
