"""The wheel of this tree, in a new environment: the first hour of docs/start.md, and the check before a release.

`make wheel` does the whole check, on every Python and with the dependencies installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import penstock
from tools import wheel_check

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel, and nothing else on its path but our dependencies."""
    folder = tmp_path_factory.mktemp("fresh")
    wheel = wheel_check.build(folder / "dist", isolated=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = folder / "venv" / "bin" / "penstock"
    command.write_text(f"#!{command.parent / 'python'}\nfrom penstock.cli import main\n\nmain()\n")
    command.chmod(0o755)
    return folder


def test_the_wheel_runs_without_a_compiler(fresh: Path, tmp_path: Path) -> None:
    assert len(wheel_check.smoke(fresh / "venv" / "bin" / "python", tmp_path)) == 64
    (wheel,) = (fresh / "dist").glob("*.whl")
    assert wheel.name.startswith(f"penstock-{penstock.__version__}-cp311-abi3-")


def test_the_source_distribution_has_the_tests(fresh: Path) -> None:
    (source,) = (fresh / "dist").glob("*.tar.gz")
    names = subprocess.run(["tar", "-tzf", source], capture_output=True, text=True, check=True).stdout
    for wanted in ("penstock/native/values.h", "tests/test_release.py", "examples/data/chats.jsonl", "Makefile"):
        assert f"penstock-{penstock.__version__}/{wanted}\n" in names


def test_a_check_that_fails_says_what_was_printed() -> None:
    with pytest.raises(wheel_check.CheckFailed, match=r"exit\(\'no\'\)\nno"):
        wheel_check.run([sys.executable, "-c", "exit('no')"])


def test_the_version_is_in_one_place() -> None:
    assert version("penstock") == penstock.__version__
    assert f"version: {penstock.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_first_hour_runs(fresh: Path, tmp_path: Path) -> None:
    work, binaries = tmp_path / "work", fresh / "venv" / "bin"
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    page = (ROOT / "docs" / "start.md").read_text()
    printed = []
    for language, code in re.findall(r"^```(bash|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        command = ["bash", "-euc", code] if language == "bash" else [binaries / "python", "-c", code]
        done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr[-3000:]}"
        printed.append(done.stdout + done.stderr)
    told = "\n".join(printed)
    for words in (
        f"penstock {penstock.__version__}",
        "nothing to do",
        "tokens cut",
        "stopped, as it should be",
        "role 'bot' is unknown",
    ):
        assert words in told, words
    assert "resuming from step 4 of 6" in told
    assert "all_messages: " in told
