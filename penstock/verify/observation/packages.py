"""The packages that a process imported, with version, file and, in a checkout, git commit."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.verify.certificate import PackageInfo

PACKAGES = ("penstock", "torch", "transformers", "trl", "accelerate", "peft", "liger_kernel", "triton")


def imported_packages(extra: Iterable[str] = ()) -> list[PackageInfo]:
    """Describes the relevant packages, and any `extra` modules, that this process has imported."""
    return [_describe(name) for name in (*PACKAGES, *extra) if name in sys.modules]


def _describe(name: str) -> PackageInfo:
    file = getattr(sys.modules[name], "__file__", None)
    return PackageInfo(name, _version(name), file, commit_of(Path(file)) if file else None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = getattr(sys.modules[name], "__version__", None)
        return None if found is None else str(found)


def commit_of(file: Path) -> str | None:
    """The commit that a file is checked out from; None outside a checkout or if git doesn't track it."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return None  # an environment inside a checkout is not part of it
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
    # Without optional locks: a probe that is killed must not leave an index.lock in the user's checkout.
    command = ["git", "--no-optional-locks", "-C", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10)
