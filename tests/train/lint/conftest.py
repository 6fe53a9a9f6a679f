"""Two releases of TRL, unpacked side by side."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trl_release(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Returns the folder of an unpacked TRL wheel; wheels are downloaded once and kept in pytest's cache."""

    def unpacked(version: str) -> Path:
        assert pytestconfig.cache is not None
        folder = pytestconfig.cache.mkdir("trl") / version
        if not folder.is_dir():
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"trl=={version}"]
            partial = Path(tempfile.mkdtemp(dir=folder.parent))  # of this process: others may download the same release
            done = subprocess.run([*download, "--dest", str(partial)], capture_output=True, text=True, timeout=120)
            if done.returncode:
                pytest.skip(f"trl {version} can't be downloaded: {done.stderr[-200:]}")
            with zipfile.ZipFile(next(partial.glob("*.whl"))) as wheel:
                wheel.extractall(partial)
            with contextlib.suppress(OSError):  # another process was first
                partial.rename(folder)
        return folder

    return unpacked
