"""Finds the source file of a module and the version of its package without importing anything.

Versions come from the package's metadata, or from a `VERSION` file or `__version__` in its source. Costs a few
directory look-ups.
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
    """A module's dotted name and source file."""

    name: str
    file: Path

    @property
    def is_package(self) -> bool:
        """Whether this is a package, so that relative imports start at the module itself."""
        return self.file.name == "__init__.py"

    @property
    def root(self) -> Path:
        """The folder that contains the top-level package or module."""
        return self.file.parents[self.name.count(".") + (1 if self.is_package else 0)]


def find_module(name: str, search: tuple[Path, ...]) -> Module | None:
    """Finds a module in the `search` folders, then where Python would look; None if it has no source."""
    relative = Path(*name.split("."))
    top = name.partition(".")[0]
    for folder in search:
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return _in_folder(name, folder / relative)
    folder_of_top = _installed(top)
    return None if folder_of_top is None else _in_folder(name, folder_of_top / relative)


def module_of_file(file: Path) -> Module:
    """Derives a file's dotted module name from the packages that enclose it."""
    file = file.resolve()
    parts = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return Module(".".join(parts), file)


def version_of(module: Module) -> str | None:
    """The version of the package that contains the file, as stated next to that file."""
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
    """The folder that contains an installed top-level module. Finding its spec does not run it."""
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
    """The version of an editable install, whose metadata lives elsewhere; used only if it points to this folder."""
    if _installed(top) != above:
        return None
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return None
