"""Files of modules and versions of packages, found without importing anything.

Enters: dotted names and folders to look in first. Leaves: paths of source files, and versions as the packages' own
metadata (or a `__version__` in their source) state them. Costs a few directory look-ups.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Module:
    """A module's source: its dotted name, its file, and whether it is a package."""

    name: str
    file: Path

    @property
    def is_package(self) -> bool:
        """Whether relative names in it start at the module itself."""
        return self.file.name == "__init__.py"

    @property
    def root(self) -> Path:
        """The folder or file of the top-level package."""
        return self.file.parents[self.name.count(".") + (1 if self.is_package else 0)]


def find_module(name: str, search: tuple[Path, ...]) -> Module | None:
    """The source of a module: in the given folders first, then where Python would look. None: there is none."""
    relative = Path(*name.split("."))
    top = name.partition(".")[0]
    for folder in search:
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return _in_folder(name, folder / relative)
    folder_of_top = _installed(top)
    return None if folder_of_top is None else _in_folder(name, folder_of_top / relative)


def module_of_file(file: Path) -> Module:
    """The module that a file is, as far up as folders are packages."""
    file = file.resolve()
    parts = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return Module(".".join(parts), file)


def version_of(module: Module) -> str | None:
    """The version of the package that a file belongs to, as stated beside that very file."""
    top, above = module.name.partition(".")[0], module.root
    beside = next(iter(sorted(above.glob(f"{_any_case(top)}-*.dist-info"))), None)
    if beside is not None:
        return beside.name.removesuffix(".dist-info").partition("-")[2]
    stated = above / top / "VERSION"
    if stated.is_file():
        return stated.read_text(encoding="utf-8").strip()
    first = above / top / "__init__.py"
    found = re.search(r'^__version__ = "([^"]+)"', first.read_text("utf-8"), re.MULTILINE) if first.is_file() else None
    if found:
        return found[1]
    return _version_of_editable(top, above)


def _in_folder(name: str, base: Path) -> Module | None:
    for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        if file.is_file():
            return Module(name, file.resolve())
    return None


@cache
def _installed(top: str) -> Path | None:
    """The folder that an installed top-level name stands in. Finding its spec does not run it."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file.parent.parent if spec.submodule_search_locations is not None else file.parent


def _any_case(name: str) -> str:
    return "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in name)


def _version_of_editable(top: str, above: Path) -> str | None:
    """A checkout installed in place has its metadata elsewhere; it counts only if it is this very folder."""
    if _installed(top) != above:
        return None
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return None
