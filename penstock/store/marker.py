"""The marker that makes a folder a cache: `penstock-cache.json`, with the version of the format.

It is the first file in a cache. A folder that holds other files and no marker is never written to nor cleaned up, so a
mistyped `--cache` can't mix Penstock's files with anybody's own.
"""

from __future__ import annotations

import time

import orjson

from penstock.errors import CorruptError, StoreError
from penstock.store.files import explained
from penstock.store.format import FORMAT_VERSION, canonical, check_format
from penstock.store.tree import TEMPORARY, Tree

MARKER = "penstock-cache.json"
FOLDERS = {"claims", "datasets", "leases", "memo", "retired", "shards", "tmp", "tokenizers"}
NOBODYS = {"lost+found", ".snapshot"}  # what file systems themselves put into an empty one
_LOOK_AGAIN = (0.05, 0.2, 0.5)  # seconds; an NFS client may take a moment to see what another host has just made


def is_marked(tree: Tree) -> bool:
    """Is the folder a cache? False where it is missing or empty, so that it can become one; others are refused."""
    for pause in (*_LOOK_AGAIN, None):
        if has_marker(tree):
            return True
        names = _content(tree)
        if not names:
            return False
        if pause is None or names - FOLDERS - {MARKER}:
            break
        time.sleep(pause)  # it looks like a cache that another process began since we looked for the marker
    raise StoreError(
        f"{tree.root} is not a Penstock cache: it holds other files and no {MARKER}. Nothing was changed. "
        "Choose a new or empty folder with --cache or PENSTOCK_CACHE."
    )


def mark(tree: Tree) -> None:
    """Make an empty folder a cache. Processes may do so at once: they write the same bytes."""
    with explained(tree.root, "can't be read"):
        readers = tree.root.stat().st_mode & 0o444  # everybody who may use the cache must see what it is
    data = canonical({"format": FORMAT_VERSION})
    tree.write(tree.root / MARKER, data, "marker", beside=True, mode=readers | 0o200)


def has_marker(tree: Tree) -> bool:
    """Is there a marker, of the format that this Penstock reads?"""
    path = tree.root / MARKER
    with explained(path, "can't be read"):
        try:
            data = tree.read(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise CorruptError(
            f"{path}: the marker is damaged. If the folder is a Penstock cache, "
            f"""put it back: echo '{{"format":{FORMAT_VERSION}}}' > {path}"""
        )
    check_format(value.get("format"), path)
    return True


def _content(tree: Tree) -> set[str]:
    with explained(tree.root, "can't be read"):
        try:
            names = set(tree.names(tree.root))
        except (FileNotFoundError, NotADirectoryError):
            return set()
    return {name for name in names - NOBODYS if not TEMPORARY.fullmatch(name)}
