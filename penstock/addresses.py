"""Detects URLs given as paths: `s3://bucket/data` is not a local file and must not create a folder named `s3:`.

Sources may be URLs of the schemes listed here; everywhere else, and for other schemes, a URL is refused by name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import UsageError

AZURE_SCHEMES = ("az", "azure", "adl", "abfs", "abfss")
OBJECT_SCHEMES = ("s3", "s3a", "gs", *AZURE_SCHEMES, "http", "https", "file")
SOURCE_SCHEMES = (*OBJECT_SCHEMES, "hf")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")  # one slash, since Path collapses two; C:/ is a drive


def scheme_of(given: str | os.PathLike[str]) -> str:
    """The scheme of a URL, such as `s3`; empty for paths and names."""
    found = _SCHEME.match(os.fspath(given))
    return found[1] if found else ""


def check_source(given: str | os.PathLike[str], what: str = "") -> str:
    """The scheme of a source, or '' for a path; refuses schemes that are not served."""
    scheme = scheme_of(given).lower()
    if scheme and scheme not in SOURCE_SCHEMES:
        raise UsageError(
            f"{what}{what and ' '}{os.fspath(given)}: {scheme} addresses are not supported. Supported are s3://, "
            "gs://, az://, hf://, https:// and file:// addresses; copy other data there or to a local disk first."
        )
    return scheme


def local_path(given: str | os.PathLike[str], what: str) -> Path:
    """Converts to a path; refuses URLs. `what` names the option or key in the error."""
    scheme = scheme_of(given)
    if scheme:
        raise UsageError(
            f"{what} {os.fspath(given)}: {scheme} addresses are not supported. Use a path on a local or mounted disk."
        )
    return Path(given).expanduser()
