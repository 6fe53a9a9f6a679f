"""The probe process: `python -m penstock.train.verify.probe FD`.

Reads one job per line as JSON from standard input and writes one JSON answer per line to the file descriptor FD. Heavy
imports happen once; each job runs in its own fork, because patches affect a whole process. A fork that dies or times
out is a failure, which says nothing about what it was meant to observe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from penstock.train.verify.probe_jobs import ProbeJob, run_job

HEAVY = ("torch", "transformers.trainer", "transformers.models.auto.modeling_auto")


def main() -> None:
    """Serves jobs until standard input is closed."""
    answers = int(sys.argv[1])
    for name in HEAVY:
        with contextlib.suppress(Exception):  # the job will hit the same error and report it
            __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        answer = run_in_fork(ProbeJob.from_json(request["job"]), request["until"] - time.monotonic())
        os.write(answers, json.dumps(answer).encode() + b"\n")


def run_in_fork(job: ProbeJob, limit: float) -> dict[str, Any]:
    """Runs a job in a fork; returns `{"facts": …}`, or `{"failure": …}` with how the process ended."""
    with tempfile.TemporaryDirectory(prefix="penstock-probe-", ignore_cleanup_errors=True) as folder:
        place, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        child = os.fork()
        if child == 0:
            _child(job, place, log)
        status = _wait(child, limit)
        text = log.read_text(errors="replace") if log.is_file() else ""
        if status is None:
            return {"failure": f"no answer within {limit:.0f} s; its process was killed{_last(text)}"}
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return {"failure": f"its process died of {name}{_last(text)}"}
        if not place.is_file():
            return {"failure": f"its process exited with code {os.waitstatus_to_exitcode(status)}{_last(text)}"}
        found: dict[str, Any] = json.loads(place.read_text())
        return found


def _child(job: ProbeJob, place: Path, log: Path) -> None:
    """Runs the job and exits without returning."""
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(file=2)
        result = {"facts": run_job(job)}
        text = json.dumps(result)
        place.with_suffix(".part").write_text(text)
        place.with_suffix(".part").rename(place)
        code = 0
    except BaseException as error:  # whatever went wrong is the answer
        traceback.print_exc()
        last = f"{type(error).__name__}: {error}"
        place.write_text(json.dumps({"failure": last}))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, limit: float) -> int | None:
    """Waits for a fork and returns its status; kills it and returns None if it exceeds the limit."""
    handle = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([handle], [], [], max(limit, 0.0))
    finally:
        os.close(handle)
    if ready:
        _, status = os.waitpid(child, 0)
    _end_group(child)
    if ready:
        return status
    os.waitpid(child, 0)
    return None


def _end_group(child: int) -> None:
    """Kills the fork's process group, including anything it started."""
    for _ in range(20):
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:
            return
        time.sleep(0.01)


def _last(text: str) -> str:
    """The last lines of a log, or those of a fatal error, which may explain a failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fault = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    kept = lines[fault : fault + 4] if fault is not None else lines[-2:]
    return f": {' | '.join(kept)[:400]}" if kept else ""


if __name__ == "__main__":
    main()
