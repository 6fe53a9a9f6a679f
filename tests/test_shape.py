"""The shape of the package: stages import only what is to their left, public names are pinned, files are short."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

import penstock
from penstock.native import native

ROOT = Path(penstock.__file__).parent
STAGES = ("sources", "chat", "template", "regions", "encode", "store", "build", "view", "pack", "feed", "train")
BESIDE = ("export", "adoption", "look", "verify", "cli", "api")


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {name.split(".")[1] for name in names if name.startswith("penstock.")}


def test_a_stage_imports_only_what_is_to_its_left() -> None:
    for number, stage in enumerate(STAGES):
        for path in sorted((ROOT / stage).rglob("*.py")):
            wrong = imports(path) - {*STAGES[: number + 1], "addresses", "arrays", "errors", "native", "notebook"}
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_exports_need_no_feed() -> None:
    for stage, upto in (("export", "pack"), ("adoption", "view")):
        for path in sorted((ROOT / stage).rglob("*.py")):
            allowed = {*STAGES[: STAGES.index(upto) + 1], stage, "arrays", "errors"}
            assert imports(path) <= allowed, f"{path.relative_to(ROOT)} imports {sorted(imports(path) - allowed)}"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_what_is_compiled_was_compiled() -> None:
    """All else passes without it, in Python."""
    assert native is not None


def test_public_names() -> None:
    assert penstock.__all__ == sorted(penstock.__all__)
    classes = ["Count", "Dataset", "Loader", "Mixture", "PenstockError", "View"]
    assert penstock.__all__ == [*classes, "adopt", "mix", "open", "prepare"]
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert not hasattr(penstock, "nothing")


def test_files_are_short() -> None:
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().count("\n")
        assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines"
