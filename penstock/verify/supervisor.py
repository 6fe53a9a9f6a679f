"""Starts the probe process, sends it jobs and waits for answers, within a time limit.

The supervising process imports neither torch nor transformers. Whatever happens to a probe is returned as a `Failure`
with a reason; when time runs out, the probe is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock import child
from penstock.verify.jobs import ProbeJob

GRACE = 5.0  # seconds for the probe process to report that it killed a fork


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job produced no facts."""

    reason: str


class Supervisor:
    """Runs jobs in other processes, one at a time, within a total time limit."""

    def __init__(self, limit: float) -> None:
        self._ends = time.monotonic() + limit
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._buffer = b""
        self._jobs = 0

    def observe(self, job: ProbeJob, limit: float | None = None) -> dict[str, Any] | Failure:
        """Runs a job and returns its facts; `limit`: seconds for this job alone."""
        self._jobs += 1
        left = self._ends - time.monotonic()
        ends = self._ends if limit is None else min(self._ends, time.monotonic() + limit)
        if left <= 0:
            return Failure(f"the time limit of {self._limit:.0f} s expired before it could run")
        try:
            process = self._started()
            assert process.stdin is not None
            request = {"job": self._with_port(job).to_json(), "until": ends - min(GRACE, left / 4)}
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = self._answer(left)
        except (OSError, ValueError) as error:
            self.close()
            return Failure(f"lost the connection to the probe process: {error}")
        if answer is None:
            code = process.poll()
            self.close()
            ended = "no answer within the time limit" if code is None else f"the probe process exited with code {code}"
            return Failure(f"{ended} of {self._limit:.0f} s" if code is None else ended)
        return Failure(str(answer["failure"])) if "failure" in answer else dict(answer["facts"])

    def _with_port(self, job: ProbeJob) -> ProbeJob:
        """Under a launcher, gives each job its own rendezvous port; all ranks count alike."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return job
        base = int(os.environ.get("MASTER_PORT", "29500"))
        return replace(job, port=1024 + (base + 7 + self._jobs - 1024) % 60000)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        reading, writing = os.pipe()
        environment = child.environment({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
        environment.setdefault("TRITON_INTERPRET", "1")  # removed below if there is a GPU
        if _has_gpu():
            environment.pop("TRITON_INTERPRET")
        self._process = subprocess.Popen(
            child.command("penstock.verify.probe", str(writing)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            env=environment,
            start_new_session=True,
        )
        os.close(writing)
        self._answers, self._buffer = reading, b""
        return self._process

    def _answer(self, patience: float) -> dict[str, Any] | None:
        """The next answer; None if it doesn't arrive in time."""
        ends = time.monotonic() + patience
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, ends - time.monotonic()))
            read = os.read(self._answers, 1 << 16) if ready else b""
            if not read:
                return None
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Kills the probe process and anything it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._process = None
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1


def _has_gpu() -> bool:
    """Whether the probes can use a GPU, determined without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(os.path.exists(place) for place in ("/dev/nvidia0", "/dev/kfd"))  # noqa: PTH110


@contextmanager
def supervised(limit: float) -> Iterator[Supervisor]:
    """A supervisor whose processes end with the `with` block."""
    supervisor = Supervisor(limit)
    try:
        yield supervisor
    finally:
        supervisor.close()
