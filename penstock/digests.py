"""Digests and what they name: canonical JSON, sealed records, the format version. Imports neither numpy nor pyarrow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3
import orjson

from penstock.errors import CorruptError, FormatError
from penstock.transient import retry_transient

FORMAT_VERSION = 1  # of what is stored in a cache
NAME = r"b3-[0-9a-f]{64}"


def digest(*parts: bytes) -> str:
    """Digest of length-prefixed parts, as `b3-` and 64 hexadecimal digits."""
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return f"b3-{hasher.hexdigest()}"


@retry_transient
def file_digest(path: Path) -> str:
    """Digest of a file's bytes, read through mmap."""
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return f"b3-{hasher.hexdigest()}"


def bytes_digest(data: Any) -> str:
    """Digest of bytes in memory; equal to `file_digest` of a file with the same bytes."""
    return f"b3-{blake3.blake3(data).hexdigest()}"


def validate_name(name: object) -> str:
    """Return a digest read from a file if it is safe to use in a path; raise CorruptError otherwise."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise CorruptError(f"{name!r} is not the name of a shard or dataset: names are b3- and 64 hexadecimal digits")
    return name


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
