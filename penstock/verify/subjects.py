"""What verdicts are about: the packages as this process really imported them, with file and, in a checkout, commit."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.verify.certificate import Subject

PACKAGES = ("penstock", "torch", "transformers", "trl", "accelerate", "peft", "liger_kernel", "triton")


def subjects(extra: Iterable[str] = ()) -> list[Subject]:
    """The packages that are imported here, and further modules by name."""
    return [_subject(name) for name in (*PACKAGES, *extra) if name in sys.modules]


def _subject(name: str) -> Subject:
    file = getattr(sys.modules[name], "__file__", None)
    return Subject(name, _version(name), file, commit_of(Path(file)) if file else None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = getattr(sys.modules[name], "__version__", None)
        return None if found is None else str(found)


def commit_of(file: Path) -> str | None:
    """The commit that a file is checked out from; None outside of checkouts, and for what git does not track."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return None  # an environment may lie inside a checkout without being of it
    folder = str(file.resolve().parent)
    try:
        tracked = _git(folder, "ls-files", "--error-unmatch", file.name)
        if tracked.returncode:
            return None
        commit = _git(folder, "rev-parse", "HEAD").stdout.strip()
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".").stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return f"{commit}+changes" if changed else commit or None


def _git(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
