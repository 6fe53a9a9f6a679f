"""The folder of an export, which appears complete or not at all.

An export to DATA is written to `DATA.partial/data`, and renaming that folder is the commit. `DATA.partial` also holds
the settings and a record per finished part, written after the part's files are synced; a part without a record is
written again. Two processes running the same export write the same bytes to the same files; the last one finds it done.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from penstock.digests import canonical
from penstock.errors import StoreError, UsageError
from penstock.store.files import fault, read_regular, sync_folder
from penstock.store.storage import TEMPORARY, temporary_name

MANIFEST = "penstock.json"
SETTINGS = "settings.json"


class ExportFolder:
    """The folder an export is written to, and its final location."""

    def __init__(self, target: Path) -> None:
        self.target = target.expanduser().absolute()
        self.partial = self.target.with_name(f"{self.target.name}.partial")
        self.data = self.partial / "data"

    # -- reading --------------------------------------------------------------------------------------------------

    def finished(self) -> dict[str, Any] | None:
        """The manifest of a finished export, or None; other files in the folder are an error."""
        manifest = _read_json(self.target / MANIFEST)
        if manifest is None and self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
            raise UsageError(
                f"{self.target} contains files but no finished export. Choose another folder with -o, or empty it."
            )
        return manifest

    def begun(self) -> dict[str, Any] | None:
        """The settings of an unfinished export, or None; other files in the folder are an error."""
        if not self.partial.exists():
            return None
        settings = _read_json(self.partial / SETTINGS)
        if settings is None and not all(TEMPORARY.fullmatch(path.name) for path in self.partial.iterdir()):
            raise UsageError(
                f"{self.partial} is needed for the unfinished export but contains other files. "
                "Choose another folder with -o."
            )
        return settings

    def whole(self) -> bool:
        """Whether everything is written and only the final rename is missing."""
        return (self.data / MANIFEST).exists()

    def record(self, number: int) -> dict[str, Any] | None:
        """The record of a finished part, if its files exist."""
        record = _read_json(self.partial / f"part-{number:05}.json")
        return record if record is not None and self._has(record["files"]) else None

    def check_whole(self, manifest: Mapping[str, Any]) -> None:
        """Raises an error if a file of a finished export is missing or truncated."""
        for name, size in manifest["files"].items():
            path = self.target / name
            if not path.is_file() or path.stat().st_size != size:
                raise StoreError(
                    f"{path} is missing, or its size differs from the manifest. Remove {self.target} and export again."
                )

    def _has(self, files: Mapping[str, int]) -> bool:
        paths = {self.data / name: size for name, size in files.items()}
        return all(path.is_file() and path.stat().st_size >= size for path, size in paths.items())

    # -- writing --------------------------------------------------------------------------------------------------

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Creates the folder, or continues with an existing one."""
        self.partial.mkdir(parents=True, exist_ok=True)
        if not (self.partial / SETTINGS).exists():
            self._put(self.partial / SETTINGS, canonical(settings), "settings")
        self.data.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a new file, which appears under its name once it is complete and synced."""
        temporary = self.partial / temporary_name()
        path = self.data / name
        try:
            with temporary.open("xb") as file:
                yield file
                fault("part.write")
                file.flush()
                os.fsync(file.fileno())
            fault("part.sync")
            if path.parent != self.data:
                path.parent.mkdir(exist_ok=True)
            temporary.replace(path)
            fault("part.rename")
            if path.parent != self.data:
                sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def at(self, name: str, offset: int) -> Iterator[IO[bytes]]:
        """Opens a file that several parts write, at this part's offset; only recorded parts count."""
        descriptor = os.open(self.data / name, os.O_WRONLY | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(offset)
            yield file
            fault("part.write")
            file.flush()
            os.fdatasync(descriptor)
        fault("part.sync")

    def put_record(self, number: int, record: Mapping[str, Any]) -> None:
        """Records a finished part, after syncing the folder that holds its files."""
        sync_folder(self.data)
        self._put(self.partial / f"part-{number:05}.json", canonical(record), "record")

    def put_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest, which marks the data as complete."""
        self._put(self.data / MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2), "manifest")

    def commit(self) -> None:
        """Renames the finished folder to its final name."""
        self.data.rename(self.target)  # may replace an empty folder
        fault("commit.rename")
        sync_folder(self.target.parent)
        self.clear()

    def clear(self) -> None:
        """Removes the partial folder."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _put(self, path: Path, data: bytes, point: str) -> None:
        temporary = self.partial / temporary_name()
        fault(f"{point}.open")
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fault(f"{point}.sync")
        temporary.replace(path)
        fault(f"{point}.rename")
        sync_folder(path.parent)


@contextlib.contextmanager
def store_errors(folder: ExportFolder) -> Iterator[None]:
    """Turns OS errors into store errors that state the remedy."""
    try:
        yield
    except OSError as error:
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        remedy = f"Finished parts are kept in {folder.partial}; run the same command again once this is fixed"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            remedy = "Choose a folder you can write to with -o"
        raise StoreError(f"{error.filename or folder.partial} can't be written: {why}. {remedy}.") from error


def _read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object from a file; None if there is none."""
    try:
        value = orjson.loads(read_regular(path))
    except (OSError, orjson.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None
