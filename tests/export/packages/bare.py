"""Imports modules of a package whose `__init__` can't run here (it needs CUDA, or conflicting packages)."""

import ast
import importlib.util
import sys
import types
from pathlib import Path


def without_init(*packages: str) -> None:
    """Registers packages by their location on disk without running their `__init__`."""
    for name in packages:
        top = importlib.util.find_spec(name.split(".")[0])
        folder = Path(next(iter(top.submodule_search_locations))).joinpath(*name.split(".")[1:])
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
        module.__spec__.submodule_search_locations = [str(folder)]
        sys.modules[name] = module


def functions(module: str, names: set[str], namespace: dict) -> dict:
    """Compiles functions from the source of a module that can't be imported here."""
    top = importlib.util.find_spec(module.split(".")[0])
    path = Path(next(iter(top.submodule_search_locations))).joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in tree.body} == names
    exec(compile(tree, str(path), "exec"), namespace)
    return namespace
