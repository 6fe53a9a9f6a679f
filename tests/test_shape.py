"""The shape of the package: stages import only what is to their left, public names are pinned, files are short."""

from __future__ import annotations

import ast
import inspect
import shutil
from pathlib import Path

import pytest

import penstock
from penstock.native import native
from tools.arguments import generated

ROOT = Path(penstock.__file__).parent
STAGES = (
    "sources",
    "tokenizer",
    "chat",
    "template",
    "regions",
    "encode",
    "store",
    "build",
    "view",
    "pack",
    "feed",
    "train",
)
SHARED = (
    "addresses",
    "arguments",
    "arrays",
    "errors",
    "native",
    "notebook",
    "options",
    "other_names",
)  # no stage: anybody may use them
BESIDE = ("export", "adoption", "look", "verify", "cli", "api")


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {name.split(".")[1] for name in names if name.startswith("penstock.")}


def test_a_stage_imports_only_what_is_to_its_left() -> None:
    for number, stage in enumerate(STAGES):
        for path in sorted((ROOT / stage).rglob("*.py")):
            wrong = imports(path) - {*STAGES[: number + 1], *SHARED}
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_exports_need_no_feed() -> None:
    for stage, upto in (("export", "pack"), ("adoption", "view")):
        for path in sorted((ROOT / stage).rglob("*.py")):
            allowed = {*STAGES[: STAGES.index(upto) + 1], stage, *SHARED}
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


def test_keyword_arguments_are_those_of_the_records() -> None:
    written = (ROOT / "arguments.py").read_text()
    assert written == generated(), "run: python -m tools.arguments > penstock/arguments.py"


def test_editors_complete_options() -> None:
    assert {"tokenizer", "template", "workers", "on_bad_row"} <= set(inspect.signature(penstock.prepare).parameters)
    assert {"train_on", "max_length", "holdout"} <= set(inspect.signature(penstock.Dataset.view).parameters)
    assert {"batch_size", "capacity"} <= set(inspect.signature(penstock.View.loader).parameters)
    assert {"part_tokens", "weights"} <= set(inspect.signature(penstock.View.export).parameters)


def test_files_are_short() -> None:
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().count("\n")
        assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines"
