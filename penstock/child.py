"""How every Python process that Penstock starts is started: its command line and its import path.

A child runs the same Penstock as this process and imports from where this process was told to import, but nothing from
the current folder, which holds data. `-P` keeps Python from putting that folder first on the path, as it does for `-m`;
entries of PYTHONPATH that mean the current folder are left out. SECURITY.md states the policy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import penstock


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in a child."""
    flags = ("-P", "-s") if sys.flags.no_user_site else ("-P",)
    return [sys.executable, *flags, "-m", module, *arguments]


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: that of this process with the child's import path, and `variables`."""
    return {**os.environ, "PYTHONPATH": import_path(), **(variables or {})}


def import_path() -> str:
    """PYTHONPATH of a child: the given entries, absolute, and the folder of this Penstock, however that was found.

    Empty entries, which Python reads as the current folder, are usually an accident: `PYTHONPATH=$PYTHONPATH:/mine`.
    The current folder stays only if this Penstock is in it.
    """
    root = Path(penstock.__file__).parent.parent
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    named = (entry for entry in given.split(os.pathsep) if entry and (Path(entry) != Path() or Path.cwd() == root))
    return os.pathsep.join(dict.fromkeys([*(str(Path(entry).absolute()) for entry in named), str(root)]))
