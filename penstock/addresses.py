"""Detects URLs given as paths: `s3://bucket/data` is not a local file and must not create a folder named `s3:`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import UsageError

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")  # one slash, since Path collapses two; C:/ is a drive


def scheme_of(given: str | os.PathLike[str]) -> str:
    """The scheme of a URL, such as `s3`; empty for paths and names."""
    found = _SCHEME.match(os.fspath(given))
    return found[1] if found else ""


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """Converts to a path; refuses URLs. `what` names the option or key in the error."""
    scheme = scheme_of(given)
    if scheme:
        raise UsageError(
            f"{what} {os.fspath(given)}: {scheme} addresses are not supported. Use a path on a local or mounted disk."
        )
    return Path(given).expanduser()
