"""Leases: the shards that a build is about to commit, named before it relies on them, so that `gc` leaves them alone.

The order makes it safe between hosts. A build writes its lease, lists the shards' folders, commits the manifest, and
releases the lease. `gc` puts shards aside, reads the leases, then the manifests, and deletes. Either `gc` sees the
lease (or the manifest that replaced it), or the build sees that shards are gone and makes them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from penstock.store.claims import ServerClock
from penstock.store.files import explained, writer_is_dead
from penstock.store.tree import Tree, temporary_name

EXPIRY = 86400.0  # seconds; of a build that died on a host we can't ask


@contextlib.contextmanager
def lease(tree: Tree, names: Iterable[str]) -> Iterator[None]:
    """Keep shards and tokenizers, given by their names, from `gc`."""
    path = tree.root / "leases" / temporary_name()
    tree.write(path, "\n".join(names).encode(), "lease")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            tree.remove(path)


def leased(tree: Tree) -> set[str]:
    """All names under lease. Raises where a lease can't be read: what it keeps must not be deleted."""
    clock, folder = ServerClock(tree), tree.root / "leases"
    found: set[str] = set()
    with explained(folder, "can't be read"), contextlib.suppress(FileNotFoundError):  # no build ever came this far
        for path in map(folder.joinpath, tree.names(folder)):
            if not tree.owns(path) or writer_is_dead(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # released meanwhile
                if clock.age(path) < EXPIRY:
                    found.update(tree.read(path).decode(errors="replace").split("\n"))
    return found


def clean_leases(tree: Tree) -> None:
    """Remove what dead builds have left."""
    clock = ServerClock(tree)
    for path in tree.files(tree.root / "leases"):
        with contextlib.suppress(OSError):
            if writer_is_dead(path.name) or clock.age(path) > EXPIRY:
                tree.remove(path)
