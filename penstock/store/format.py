"""The version of what is on disk, and the one way JSON is written there. Light: a hit needs no more of the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from penstock.errors import FormatError

FORMAT_VERSION = 1


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: equal values have equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def check_format(version: object, path: Path) -> None:
    """Refuse what another format version wrote."""
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: format version {version!r}, but this Penstock reads version {FORMAT_VERSION}. "
            "Use the Penstock that wrote it, or prepare again into another cache."
        )
