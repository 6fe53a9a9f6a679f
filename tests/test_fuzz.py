"""Half a minute of the fuzzer, from a fixed seed: nothing is found, and it did look. The core compiles cleanly."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from penstock.native import native
from tools.fuzz import WARNINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(native is None, reason="installed without a compiler")
def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.fuzz", "--seconds", "30", "--seed", "20", "--finds", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = {what: int(count.replace(",", "")) for count, what in re.findall(r"^ *([\d,]+) (.+)$", done.stdout, re.M)}
    assert counts["served by the machine"] > 200
    assert counts["equal"] > 200
    if shutil.which("gcc"):
        rows = re.search(r"sanitizer: +([\d,]+) rows", done.stdout)
        assert rows is not None
        assert int(rows[1].replace(",", "")) > 100
        assert re.search(r"sanitizer: +[\d,]+ damaged programs refused", done.stdout)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_core_compiles_without_warnings(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    include = f"-I{sysconfig.get_paths()['include']}"
    for source in sorted((ROOT / "penstock" / "native").glob("*.c")):
        command = [compiler, "-O2", *WARNINGS, include, "-fPIC", "-c", str(source), "-o", str(tmp_path / "object.o")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
