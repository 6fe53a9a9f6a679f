"""The on-disk format version, and canonical JSON with a digest of itself. Imports no numpy or pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from penstock.errors import CorruptError, FormatError
from penstock.store.files import digest

FORMAT_VERSION = 1


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, so that equal values have equal bytes."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def seal(kind: bytes, value: Mapping[str, Any], field: str = "seal") -> bytes:
    """Canonical JSON with a digest of itself in `field`."""
    return canonical({**value, field: digest(kind, canonical(value))})


def unseal(kind: bytes, data: bytes, field: str = "seal") -> dict[str, Any]:
    """Parse what `seal` wrote; ValueError if it has been changed."""
    value = orjson.loads(data)
    if not isinstance(value, dict) or value.pop(field, None) != digest(kind, canonical(value)):
        raise ValueError("it has changed since it was written")
    return value


def check_format(version: object, path: Path | str) -> None:
    """Raise FormatError for files of another format version; `path` may be a URL."""
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path}: format version {version!r}, but this Penstock reads version {FORMAT_VERSION}. "
            "Use the Penstock that wrote it, or prepare again into another cache."
        )


def check_marker(data: bytes, path: Path | str, remedy: str) -> None:
    """Raise CorruptError if the marker of a cache is damaged, FormatError if it is of another format version."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise CorruptError(f"{path}: the marker is damaged. {remedy}")
    check_format(value.get("format"), path)
