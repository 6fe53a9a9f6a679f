"""Processes that answer requests as JSON lines, to isolate memory, timing and crashes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
ROOT = Path(__file__).parent.parent


class ServerDiedError(Exception):
    """The process died or timed out; the next request starts a new one."""


class Server:
    """The client of such a process."""

    def __init__(self, command: Sequence[str], folder: Path = ROOT, seconds: float | None = None) -> None:
        self._command, self._folder, self._seconds = [sys.executable, *command], folder.resolve(), seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Answer:
        """Starts the process with the folder's packages on its path; returns its first line."""
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self._folder, env=environment
        )
        return self._read(self._process)

    def ask(self, request: Answer) -> Answer:
        """Sends a request and waits for the answer."""
        if self._process is None:
            self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        return self._read(process)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self, process: subprocess.Popen[bytes]) -> Answer:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._seconds)
        line = process.stdout.readline() if ready else b""
        if not line:
            if ready:
                process.wait()
            self.close()
            raise ServerDiedError(f"exit code {process.returncode}" if ready else f"no answer in {self._seconds:.0f} s")
        answer: Answer = json.loads(line)
        return answer


def answers() -> Callable[[Answer], None]:
    """Returns a function that writes answers, and redirects other output to standard error."""
    stdout, sys.stdout = sys.stdout, sys.stderr

    def answer(value: Answer) -> None:
        print(json.dumps(value), file=stdout, flush=True)

    return answer


def serve(work: Callable[[Answer], Answer]) -> None:
    """Answers requests until standard input is closed. An exception becomes the answer {"error": …}."""
    answer = answers()
    answer({})
    for line in sys.stdin:
        try:
            found = work(json.loads(line))
        except Exception as error:
            traceback.print_exc()  # to standard error
            found = {"error": f"{type(error).__name__}: {error}"}
        answer(found)
