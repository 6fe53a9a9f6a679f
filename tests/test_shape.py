"""The shape of the package: stages import only what is to their left, public names are pinned, nothing is too large."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys

import pytest

import penstock
from penstock.native import native
from tools import graph
from tools.arguments import generated
from tools.mutations import MUTATIONS, PIPELINE


def test_a_stage_imports_only_what_is_to_its_left() -> None:
    assert graph.backward_edges() == []


def test_packages_and_modules_are_of_a_size_to_read() -> None:
    assert graph.large() == []


def test_no_public_class_name_is_used_twice() -> None:
    assert graph.repeated_classes() == []


def test_exports_need_no_loader() -> None:
    needed = {"example", "gather", "index", "options", "packing", "parts", "plan", "policy", "view", "windows"}
    for path in sorted((graph.ROOT / "exchange").rglob("*.py")):
        used = set(re.findall(r"penstock\.load\.(\w+)", path.read_text()))
        assert used <= needed, f"{path.relative_to(graph.ROOT)} imports {sorted(used - needed)}"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_what_is_compiled_was_compiled() -> None:
    """All else passes without it, in Python."""
    assert native is not None


def test_public_names() -> None:
    assert penstock.__all__ == sorted(penstock.__all__)
    classes = ["Count", "Dataset", "Loader", "Mixture", "PenstockError", "View"]
    assert penstock.__all__ == [*classes, "adopt", "estimate", "mix", "open", "prepare", "train"]
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert not hasattr(penstock, "nothing")


def test_keyword_arguments_are_those_of_the_records() -> None:
    written = (graph.ROOT / "arguments.py").read_text()
    assert written == generated(), "run: python -m tools.arguments > penstock/arguments.py"


def test_editors_complete_options() -> None:
    assert {"tokenizer", "template", "workers", "on_bad_row"} <= set(inspect.signature(penstock.prepare).parameters)
    assert {"train_on", "max_length", "holdout"} <= set(inspect.signature(penstock.Dataset.view).parameters)
    assert {"batch_size", "capacity"} <= set(inspect.signature(penstock.View.loader).parameters)
    assert {"part_tokens", "weights"} <= set(inspect.signature(penstock.View.export).parameters)


def test_the_walk_of_a_row_is_short() -> None:
    """From reading its slice to the report, with the spot check: not by more functions, files and doors than these."""
    ran = subprocess.run(
        [sys.executable, "-m", "tools.walk", "--json"], capture_output=True, check=True, cwd=graph.ROOT.parent
    )
    found = json.loads(ran.stdout)["with spot check"]
    most = {"functions": 200, "files": 48, "packages": 50, "stages": 77}
    assert {name: found[name] for name in most if found[name] > most[name]} == {}


def test_every_mutation_still_has_its_place() -> None:
    """`tools.mutation_test` counts those whose code has changed as missed."""
    texts = {file: (graph.ROOT.parent / file).read_text() for file, _, _ in (*MUTATIONS, *PIPELINE)}
    assert [(file, old) for file, old, _ in (*MUTATIONS, *PIPELINE) if texts[file].count(old) != 1] == []
