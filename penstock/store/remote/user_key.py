"""A secret by which a user recognises what he wrote to an object store, where files have no owner.

It comes from `PENSTOCK_CACHE_KEY`, or is created once in the user's state folder. Without a writable home it lasts as
long as the process: then everything counts as written by others, and is checked.
"""

from __future__ import annotations

import hmac
import os
import secrets
from functools import cache
from pathlib import Path

import blake3

from penstock.store.files import read_regular
from penstock.store.trust import state_folder

KEY_VARIABLE = "PENSTOCK_CACHE_KEY"


def keyed_digest(data: bytes) -> str:
    """A digest that only holders of the user's key can compute."""
    return blake3.blake3(data, key=user_key()).hexdigest()


def is_keyed(data: bytes, mac: object) -> bool:
    """Whether a keyed digest was computed with the user's key."""
    return isinstance(mac, str) and hmac.compare_digest(mac.encode(), keyed_digest(data).encode())


@cache
def user_key() -> bytes:
    """The user's key."""
    if given := os.environ.get(KEY_VARIABLE):
        return blake3.blake3(given.encode(), derive_key_context="penstock cache key").digest()
    path = state_folder() / "cache.key"
    try:
        return _stored_key(path)
    except FileNotFoundError:
        pass
    except OSError:
        return secrets.token_bytes(32)
    made = secrets.token_bytes(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"cache.key.{secrets.token_hex(6)}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made)
        try:
            os.link(temporary, path)  # the first process wins
        finally:
            temporary.unlink()
    except FileExistsError:
        return _stored_key(path)
    except OSError:
        return made
    return made


def _stored_key(path: Path) -> bytes:
    found, data = path.lstat(), read_regular(path)
    if found.st_uid != os.geteuid() or len(data) != 32:
        raise PermissionError(13, "not a key of this user", str(path))
    return data
