"""The git commit that a source file is checked out from, so that a report says which state of a trainer it is about.

A checkout may be anyone's, and git runs commands that a checkout's own configuration names: filters, file system
monitors, signature checks, remote helpers. Only commands that read objects are used, and fetching is off.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

_QUIET = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "", "GIT_OPTIONAL_LOCKS": "0"}


def commit_of(file: Path) -> str | None:
    """Commit and date of a file's checkout, with `+changes` if the file differs; None if git doesn't track it."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return None  # an environment inside a checkout is not part of it
    found = _git(file.parent, "rev-parse", "HEAD", f"HEAD:./{file.name}")
    if found is None:
        return None
    commit, blob = found.split()
    changed = "" if blob == _blob(file.read_bytes(), len(blob)) else "+changes"
    return f"{commit[:12]}{changed}{_date(_git(file.parent, 'cat-file', 'commit', commit) or '')}"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, **_QUIET})
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return None if done.returncode else done.stdout


def _blob(data: bytes, length: int) -> str:
    """The object id of a file's content, in a repository whose ids have this length."""
    digest = hashlib.sha1(usedforsecurity=False) if length == 40 else hashlib.sha256()
    digest.update(b"blob %d\0" % len(data) + data)
    return digest.hexdigest()


def _date(commit: str) -> str:
    found = re.search(r"^committer .*> (\d{1,12}) ", commit, re.MULTILINE)
    return "" if found is None else f" of {datetime.fromtimestamp(int(found[1]), UTC):%Y-%m-%d}"
