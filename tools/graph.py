"""Prints the import graph of the package, and fails on what the layout forbids.

    python -m tools.graph

One line per package: its modules, its longest module, the packages it imports. Stages form a pipeline, so a stage may
import only stages to its left; modules that belong to no stage are open to all. Exits with 1 on a backward edge, a
package with more than 15 modules, a module with more than 500 lines, or a class name that stands twice.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "penstock"
STAGES = (
    "sources", "tokenizer", "chat", "template", "regions", "encode", "store", "build", "view", "pack", "feed", "train",
)  # fmt: skip
SHARED = (  # no stage
    "addresses", "arguments", "arrays", "child", "config_files", "errors", "literals", "native", "notebook", "objects",
    "options", "other_names", "printable", "spelling", "transient",
)  # fmt: skip
MAX_MODULES, MAX_LINES = 15, 500


def imported(path: Path) -> set[str]:
    """The packages and top-level modules of penstock that a module imports."""
    tree = ast.parse(path.read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return {name.split(".")[1] for name in names if name.startswith("penstock.")}


def packages() -> dict[str, list[Path]]:
    """Each package and its modules, stages first and in order."""
    found = {
        folder.name: sorted(folder.rglob("*.py")) for folder in ROOT.iterdir() if (folder / "__init__.py").exists()
    }
    return {name: found[name] for name in sorted(found, key=lambda n: (STAGES.index(n) if n in STAGES else 99, n))}


def backward_edges() -> list[str]:
    """Imports of a stage from a stage to its right, or from what stands beside the pipeline."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for number, stage in enumerate(STAGES)
        for path in sorted((ROOT / stage).rglob("*.py"))
        for name in sorted(imported(path) - {*STAGES[: number + 1], *SHARED})
    ]


def large() -> list[str]:
    """Packages with too many modules, counted per folder, and modules with too many lines."""
    folders = Counter(path.parent for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    wrong = [f"{f.relative_to(ROOT.parent)} has {n} modules" for f, n in folders.items() if n > MAX_MODULES]
    for path in ROOT.rglob("*.py"):
        lines = path.read_text().count("\n")
        if lines > MAX_LINES:
            wrong.append(f"{path.relative_to(ROOT.parent)} has {lines} lines")
    return sorted(wrong)


def repeated_classes() -> list[str]:
    """Public class names that stand in more than one module."""
    homes: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return [f"class {name} stands in {', '.join(where)}" for name, where in sorted(homes.items()) if len(where) > 1]


def main() -> int:
    for name, modules in packages().items():
        uses = sorted({used for path in modules for used in imported(path)} - {name})
        longest = max(modules, key=lambda path: path.read_text().count("\n"))
        lines = longest.read_text().count("\n")
        print(f"{name:10} {len(modules):3} modules, longest {lines:3} lines ({longest.stem}) ← {', '.join(uses)}")
    wrong = [*backward_edges(), *large(), *repeated_classes()]
    print("\n".join(["", *wrong]) if wrong else "\nno backward edge, no cycle between stages, nothing too large")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
