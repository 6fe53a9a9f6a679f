"""The probes' process: `python -m penstock.verify.probe`.

Enters: one job as a JSON line on standard input at a time. Leaves: one JSON line each on the descriptor that the first
argument names. What is heavy to import is imported once; every job runs in a fork of its own, since patches leak
through a whole process. A fork that dies or takes too long says nothing about what it was to observe.
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

from penstock.verify.jobs import Job, done

HEAVY = ("torch", "transformers.trainer", "transformers.models.auto.modeling_auto")


def main() -> None:
    """Serve jobs until standard input ends."""
    answers = int(sys.argv[1])
    for name in HEAVY:
        with contextlib.suppress(Exception):  # the job itself meets the error, and reports it
            __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        answer = forked(Job.from_json(request["job"]), request["until"] - time.monotonic())
        os.write(answers, json.dumps(answer).encode() + b"\n")


def forked(job: Job, limit: float) -> dict[str, Any]:
    """The result of a job, or how its process ended: `{"facts": …}` or `{"failure": …}`."""
    with tempfile.TemporaryDirectory(prefix="penstock-probe-", ignore_cleanup_errors=True) as folder:
        place, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        child = os.fork()
        if child == 0:
            _child(job, place, log)
        status = _waited(child, limit)
        text = log.read_text(errors="replace") if log.is_file() else ""
        if status is None:
            return {"failure": f"no answer within {limit:.0f} s; its process was ended{_last(text)}"}
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            return {"failure": f"its process died of {name}{_last(text)}"}
        if not place.is_file():
            return {"failure": f"its process ended with {os.waitstatus_to_exitcode(status)}{_last(text)}"}
        found: dict[str, Any] = json.loads(place.read_text())
        return found


def _child(job: Job, place: Path, log: Path) -> None:
    """Do the job and leave without returning."""
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable(file=2)
        result = {"facts": done(job)}
        text = json.dumps(result)
        place.with_suffix(".part").write_text(text)
        place.with_suffix(".part").rename(place)
        code = 0
    except BaseException as error:  # whatever it is, it is the answer
        traceback.print_exc()
        last = f"{type(error).__name__}: {error}"
        place.write_text(json.dumps({"failure": last}))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(child: int, limit: float) -> int | None:
    """The exit status of a fork; None, and its end, when it takes longer than the limit."""
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
    """End a fork and what it started; the group is its own."""
    for _ in range(20):
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            return
        except PermissionError:
            return
        time.sleep(0.01)


def _last(text: str) -> str:
    """The last lines of a log, where they may tell why."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fault = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    kept = lines[fault : fault + 4] if fault is not None else lines[-2:]
    return f": {' | '.join(kept)[:400]}" if kept else ""


if __name__ == "__main__":
    main()
