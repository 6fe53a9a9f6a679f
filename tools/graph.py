"""Prints the import graph of the package, and fails on what the layout forbids.

    python -m tools.graph

One line per package: its modules, its longest module, the packages it imports. Stages form a pipeline, so a stage may
import only stages to its left; modules that belong to no stage are open to all. Exits with 1 on a backward edge, a
package with more than 15 modules, a module with more than 500 lines, or a public class name in two modules.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "penstock"
STAGES = (
    "prepare.modes", "prepare.sources", "prepare.tokenizer", "prepare.chat", "prepare.template", "prepare.regions",
    "prepare.encode", "prepare.faithful", "prepare", "store", "load", "build", "exchange", "look", "train",
)  # fmt: skip
SHARED = (  # no stage
    "addresses", "arguments", "arrays", "child", "config_files", "digests", "errors", "literals", "native",
    "objects", "options", "other_names", "printable", "ranks", "spelling", "surface", "transient",
)  # fmt: skip
MAX_MODULES, MAX_LINES = 15, 500
MAX_ROOT = 17  # fewer once options, other names and config files are joined


def stage_of(module: str) -> str:
    """The stage that a module belongs to, or its first name: `prepare.chat.rows` is of `prepare.chat`."""
    return next(
        (s for s in sorted(STAGES, key=len, reverse=True) if f"{module}.".startswith(f"{s}.")), module.split(".")[0]
    )


def imported(path: Path) -> set[str]:
    """The stages and shared modules of penstock that a module imports."""
    tree = ast.parse(path.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return {stage_of(name.removeprefix("penstock.")) for name in names if name.startswith("penstock.")}


def modules(stage: str) -> list[Path]:
    """The modules of a stage."""
    return [path for path in sorted(ROOT.rglob("*.py")) if stage_of(_dotted(path)) == stage]


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def packages() -> dict[str, list[Path]]:
    """Each package and its modules, stages first and in order."""
    others = {folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists()} - {*STAGES}
    return {name: modules(name) for name in (*STAGES, *sorted(others))}


def backward_edges() -> list[str]:
    """Imports of a stage from a stage to its right, or from what is beside the pipeline."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for number, stage in enumerate(STAGES)
        for path in modules(stage)
        for name in sorted(imported(path) - {*STAGES[: number + 1], *SHARED, "__version__"})
    ]


def large() -> list[str]:
    """Packages with too many modules, counted per folder, and modules with too many lines."""
    folders = Counter(path.parent for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    wrong = [
        f"{f.relative_to(ROOT.parent)} has {n} modules"
        for f, n in folders.items()
        if n > (MAX_ROOT if f == ROOT else MAX_MODULES)
    ]
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().count("\n")
        if lines > MAX_LINES:
            wrong.append(f"{path.relative_to(ROOT.parent)} has {lines} lines")
    return sorted(wrong)


def repeated_classes() -> list[str]:
    """Public class names in more than one module."""
    homes: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return [f"class {name} is in {', '.join(where)}" for name, where in sorted(homes.items()) if len(where) > 1]


def main() -> int:
    for name, found in packages().items():
        uses = sorted({used for path in found for used in imported(path)} - {name})
        longest = max(found, key=lambda path: path.read_text().count("\n"))
        lines = longest.read_text().count("\n")
        print(f"{name:17} {len(found):3} modules, longest {lines:3} lines ({longest.stem}) ← {', '.join(uses)}")
    wrong = [*backward_edges(), *large(), *repeated_classes()]
    print("\n".join(["", *wrong]) if wrong else "\nno backward edge, no cycle between stages, nothing too large")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
