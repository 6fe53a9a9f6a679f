"""Paths that are addresses: `s3://bucket/data` names no file here, and must not become a folder called `s3:`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import UsageError

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")  # one slash is left where a Path was made of it; C:/ is a drive


def scheme_of(given: str | os.PathLike[str]) -> str:
    """The scheme of an address, such as `s3`; empty for paths and names."""
    found = _SCHEME.match(os.fspath(given))
    return found[1] if found else ""


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """The path that is meant; an address is refused. `what` names the option or key."""
    scheme = scheme_of(given)
    if scheme:
        raise UsageError(
            f"{what} {os.fspath(given)}: {scheme} addresses are not supported. Use a path on a local or mounted disk."
        )
    return Path(given).expanduser()
