"""Resolves a name to the class it refers to by following imports in the source.

Supports definitions, `import` and `from … import …` with or without `as` in any block (`if TYPE_CHECKING:` and `try:`
included), star imports, attributes of imported modules, and assignments of one name to another. Lazy packages repeat
their exports under `TYPE_CHECKING` or list them in `_import_structure`; both are read. Anything else resolves to None.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.lint.modules import Module, find_module


@dataclass(frozen=True, slots=True)
class ClassDefinition:
    """A class and the module that defines it."""

    node: ast.ClassDef
    module: Module


class NameResolver:
    """Looks names up in modules; `search` folders take precedence over installed packages."""

    def __init__(self, search: tuple[Path, ...] = ()) -> None:
        self._search = search

    def module(self, name: str) -> Module | None:
        """A module by its dotted name."""
        return find_module(name, self._search)

    def find(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> ClassDefinition | None:
        """The class that a (possibly dotted) name refers to in a module."""
        if (str(module.file), name) in seen:
            return None
        seen |= {(str(module.file), name)}
        first, _, rest = name.partition(".")
        for statement in _statements(parsed(module.file)):
            found = self._bound(statement, module, first, rest, seen)
            if found is not None:
                return found
        return self._lazily(module, name, seen)

    def _bound(
        self, statement: ast.stmt, module: Module, first: str, rest: str, seen: frozenset[tuple[str, str]]
    ) -> ClassDefinition | None:
        """The class that one statement binds `first.rest` to, if any."""
        match statement:
            case ast.ClassDef() if statement.name == first and not rest:
                return ClassDefinition(statement, module)
            case ast.ImportFrom():
                return self._imported(statement, module, first, rest, seen)
            case ast.Import() if rest:
                for alias in statement.names:
                    bound = alias.asname or alias.name
                    if f"{first}.{rest}".startswith(f"{bound}."):
                        inner = f"{first}.{rest}".removeprefix(f"{bound}.")
                        return self._in(alias.name, inner, seen)
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name() | ast.Attribute()) if target == first:
                return self.find(module, ".".join(filter(None, (ast.unparse(statement.value), rest))), seen)
            case _:
                pass
        return None

    def _imported(
        self, statement: ast.ImportFrom, module: Module, first: str, rest: str, seen: frozenset[tuple[str, str]]
    ) -> ClassDefinition | None:
        origin = _absolute(statement, module)
        for alias in statement.names if origin else ():
            if alias.name == "*":
                found = self._in(origin, ".".join(filter(None, (first, rest))), seen)
                if found is not None:
                    return found
            elif (alias.asname or alias.name) == first:
                inside = self._in(origin, ".".join(filter(None, (alias.name, rest))), seen)
                if inside is not None or not rest:
                    return inside
                return self._in(f"{origin}.{alias.name}", rest, seen)
        return None

    def _in(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> ClassDefinition | None:
        found = self.module(module)
        if found is not None:
            return self.find(found, name, seen)
        head, dot, last = module.rpartition(".")
        return self._in(head, f"{last}.{name}", seen) if dot else None

    def _lazily(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> ClassDefinition | None:
        """Looks a name up in a package's `_import_structure`, or in its submodules."""
        for submodule, names in _import_structure(parsed(module.file)).items():
            if name in names:
                found = self.module(f"{module.name}.{submodule}")
                if found is not None:
                    return self.find(found, name, seen)
        first, _, rest = name.partition(".")
        inner = self.module(f"{module.name}.{first}") if rest and module.is_package else None
        return None if inner is None else self.find(inner, rest, seen)


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_bytes(), filename=str(file))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, including those in `if`, `try` and `with`, last first: the last binding wins."""

    def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            yield statement
            for block in ("body", "orelse", "finalbody"):
                if isinstance(statement, (ast.If, ast.Try, ast.With)):
                    yield from flat(getattr(statement, block, []))
            if isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    yield from flat(handler.body)

    return reversed(list(flat(tree.body)))


def _absolute(statement: ast.ImportFrom, module: Module) -> str:
    if not statement.level:
        return statement.module or ""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    kept = package[: len(package) - (statement.level - 1)]
    return ".".join([*kept, statement.module] if statement.module else kept)


def _import_structure(tree: ast.Module) -> dict[str, list[str]]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="_import_structure")], value=ast.Dict() as table):
                try:
                    return {str(key): list(names) for key, names in ast.literal_eval(table).items()}
                except (ValueError, TypeError):
                    return {}
            case _:
                continue
    return {}
