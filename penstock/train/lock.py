"""One trainer at a time in an output folder: `OUTPUT/run.lock` names the process that has it.

The lock of a process of this host that is gone is taken over. Whether a process of another host still runs can't be
known, so its lock stays until somebody removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.store.files import host_id, read_regular, writer_is_dead, writer_name
from penstock.train.errors import TrainError

log = logging.getLogger("penstock")
NAME = "run.lock"
ATTEMPTS = 10


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Have the folder to ourselves, or raise TrainError. In a distributed run the first rank has it for all."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    path, own, is_new = output / NAME, writer_name(), not output.exists()
    _take(path, own)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _owner(path) == own:
                path.unlink()
            if is_new:
                output.rmdir()  # if the run has left nothing there


def _take(path: Path, own: str) -> None:
    """Give the lock its name by a link, which fails where there is one; so it is never seen half-written."""
    draft = path.with_name(f".{NAME}.{own}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(own)
        for _ in range(ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
                return
            owner = _owner(path)
            if owner is not None and not writer_is_dead(owner):
                raise TrainError(_refusal(path, owner))
            _set_aside(path, owner, own)
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}. Choose another output folder.") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    raise TrainError(f"{path}: other trainers keep taking it. Choose another output folder.")


def _owner(path: Path) -> str | None:
    """Who has the lock; None where nobody has."""
    try:
        return read_regular(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _set_aside(path: Path, owner: str | None, own: str) -> None:
    """Remove the lock of a dead process. By a rename, which only one of several does."""
    if owner is None:
        return
    aside = path.with_name(f".{NAME}.{own}.old")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _owner(aside) == owner:
            log.warning("%s: the trainer that had this folder is gone (%s); taken over", path, owner)
            aside.unlink()
        else:  # another one has taken it over meanwhile: it gets it back
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
            aside.unlink()


def _refusal(path: Path, owner: str) -> str:
    name, _, rest = owner.partition(".")
    pid = rest.partition(".")[0]
    where = "this host" if name == host_id() else f"host {name.rpartition('-')[0] or name}"
    return (
        f"{path.parent} is in use: process {pid} on {where} trains there. Choose another output folder, or wait. "
        f"If that process is gone, remove {path}."
    )
