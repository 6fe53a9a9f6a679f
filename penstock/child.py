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
    """PYTHONPATH of a child: the folder of this Penstock, however it was found, then the given entries, absolute.

    Empty entries, which Python reads as the current folder, are usually an accident: `PYTHONPATH=$PYTHONPATH:/mine`.
    """
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    entries = [Path(entry) for entry in given.split(os.pathsep)]
    folders = [Path(penstock.__file__).parent.parent, *(entry for entry in entries if entry != Path())]
    return os.pathsep.join(str(folder.absolute()) for folder in folders)
