"""Runs `penstock` commands in processes forked from one that has everything imported, so that starting takes ms.

Commands come as JSON lines on standard input, answers go out the same way. Every run leads a process group of its own,
so it can be killed with its workers. Slices are cut small (or to the three sizes given as arguments), so that little
data makes many of them; this changes no stage: a shard is named by the bytes of its slice, however that was cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from penstock import transient
from penstock.build import run as prepare
from penstock.build import slice_plans
from penstock.cli import app
from penstock.errors import PenstockError
from penstock.prepare.sources import columnar, reading, text_slices
from penstock.prepare.sources.slices import SliceSizes
from penstock.spelling import speaking_flags
from penstock.store import claims
from tests.support.forks import SMALL

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def cut_small(sizes: SliceSizes = SMALL) -> None:
    """Cut all sources into small slices."""
    text_slices.cut_text.__kwdefaults__["sizes"] = sizes
    columnar.cut_units.__defaults__ = (sizes,)
    reading.SLICE_SIZES = sizes


def run(job: dict) -> None:
    """Run one command in a forked process."""
    os.setsid()
    log = os.open(job["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["env"])
    tempfile.tempdir = None  # a cached path may be stale
    if "umask" in job:
        os.umask(job["umask"])
    if "user" in job:
        os.setgroups([])
        os.setgid(job["user"])
        os.setuid(job["user"])
    if job.get("workers"):
        prepare.SMALL_BYTES = 0
    claims.EXPIRY = job.get("expiry", claims.EXPIRY)
    shim = _armed_shim() if "PENSTOCK_FAULTS" in job["env"] else None
    code = 3
    with speaking_flags(lambda: app):  # as in `penstock.cli.main`
        try:
            code = app(job["args"], standalone_mode=False) or 0  # from `typer.Exit`
        except PenstockError as error:
            print(f"penstock: {error}", flush=True)
            code = 1
        except BaseException:
            traceback.print_exc()
    if shim is not None:
        print(f"calls: {shim.faults_count()}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _armed_shim() -> ctypes.CDLL:
    """The preloaded library of tools/faults.py, armed; retries don't wait."""
    shim = ctypes.CDLL(None)
    shim.faults_count.restype = ctypes.c_long
    shim.faults_arm()
    transient.RETRY_PAUSES = (0.0, 0.0, 0.0)
    return shim


def warm_up() -> None:
    """Import everything a build needs, except the fast engine, whose threads would not survive a fork."""
    data, tokenizer = EXAMPLES / "data" / "chats.jsonl", EXAMPLES / "tokenizer"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        command = ["prepare", str(data), "--tokenizer", str(tokenizer), "--cache", folder, "--no-fast"]
        with contextlib.redirect_stderr(io.StringIO()):
            app(command, standalone_mode=False)


def main() -> None:
    """Serve until the input ends."""
    warm_up()
    slice_plans.SETTLED, slice_plans.WITHOUT_TIMES = 0.05, frozenset()  # the files of tests are young, and on tmpfs
    cut_small(SliceSizes(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else SMALL)
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "start":
            pid = os.fork()
            if pid == 0:
                run(job)
            answer = pid
        elif job["do"] == "kill":
            try:
                os.killpg(job["pid"], signal.SIGKILL)
            except ProcessLookupError:  # it has not created its group yet, or is gone
                os.kill(job["pid"], signal.SIGKILL)
            answer = 0
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(job["pid"], 0)[1])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
