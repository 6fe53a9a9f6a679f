"""Imports modules of a package whose `__init__` can't run here (it needs CUDA, or conflicting packages)."""

import __future__

import ast
import importlib.util
import sys
import types
from collections.abc import Collection, Iterator
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


def definitions(module: str, names: Collection[str], namespace: dict) -> dict:
    """Compiles functions, classes, constants and methods (Class.method) of a module that can't be imported here.

    Annotations are not evaluated; whatever else the definitions refer to must be in the namespace.
    """
    top = importlib.util.find_spec(module.split(".")[0])
    path = Path(next(iter(top.submodule_search_locations))).joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text())
    found = dict(_named(tree.body))
    tree.body = [found[name] for name in sorted(names, key=lambda name: found[name].lineno)]
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), namespace)
    return namespace


def _named(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                yield prefix + name, node
            case ast.ClassDef(name=name):
                yield prefix + name, node
                yield from _named(node.body, f"{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield prefix + name, node
