"""Reads the keys that a class accepts from its source and that of its bases.

A dataclass (or pydantic model) accepts its annotated fields, except class variables and those with `init=False`; any
other class accepts the parameters of its `__init__`. Bases are followed through imports. If a base can't be found, or
`__init__` swallows `**kwargs`, the list is incomplete and keys not on it are unknown rather than refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import UsageError
from penstock.lint.commits import commit_of
from penstock.lint.modules import Module, module_of_file, version_of
from penstock.lint.resolver import ClassDefinition, NameResolver

# Bases that declare no keys.
MODELS = ("BaseModel", "BaseSettings", "NamedTuple", "TypedDict")
EMPTY = {"object", "ABC", "Protocol", "Generic", "Enum", "abc.ABC", *MODELS}


@dataclass(frozen=True, slots=True)
class Key:
    """An accepted key: where it is declared, and its default as source text if it is a literal."""

    name: str
    file: Path
    line: int
    default: str | None


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """The keys that one class accepts, and the files they were read from."""

    spec: str
    name: str
    package: str
    version: str | None
    file: Path
    line: int
    keys: Mapping[str, Key]
    read: tuple[str, ...]  # `package version file:line` of the class and each base, with the commit of a checkout
    unresolved: tuple[str, ...] = field(default=())  # bases not found, and swallowed **kwargs
    lineage: Mapping[str, str | None] = field(default_factory=dict)  # versions of the class and bases, by package.Class
    commit: str | None = None  # of the class's file, in a checkout

    @property
    def complete(self) -> bool:
        """Whether a key that is not listed is certain to be refused."""
        return not self.unresolved


def read_config_class(spec: str, search: tuple[Path, ...] = ()) -> ConfigClass:
    """Reads the class named by `trl.SFTConfig` or `path/to/file.py:Class`."""
    names = NameResolver(_with_own_folder(spec, search))
    found = _definition(spec, names)
    keys: dict[str, Key] = {}
    read: list[str] = []
    unresolved: list[str] = []
    lineage: dict[str, str | None] = {}
    for entry in _with_bases(found, names, unresolved):
        package, version, commit = _package(entry.module), version_of(entry.module), commit_of(entry.module.file)
        lineage[f"{package}.{entry.node.name}"] = version
        place = f"{entry.module.file}:{entry.node.lineno}"
        read.append(f"{package} {version or '(version unknown)'} {place}{f' at commit {commit}' if commit else ''}")
        keys = _fields(entry) | keys
        init = _own_init(entry)
        if init is not None:
            keys = _parameters(init, entry) | keys
            if not _forwards_kwargs(init):
                unresolved += _swallowed(init, entry)
                break  # keys of its bases can't be passed
    file = found.module.file
    return ConfigClass(
        spec=spec,
        name=found.node.name,
        package=_package(found.module),
        version=version_of(found.module),
        file=file,
        line=found.node.lineno,
        keys=keys,
        read=tuple(read),
        unresolved=tuple(unresolved),
        lineage=lineage,
        commit=commit_of(file),
    )


def _with_own_folder(spec: str, search: tuple[Path, ...]) -> tuple[Path, ...]:
    """Puts the file's own folder first, so that its siblings shadow installed packages of the same name."""
    path, colon, _ = spec.rpartition(":")
    return (module_of_file(Path(path)).root, *search) if colon else search


def _definition(spec: str, names: NameResolver) -> ClassDefinition:
    path, colon, name = spec.rpartition(":")
    if colon:
        if not Path(path).is_file():
            raise UsageError(f"--for {spec}: no such file: {path}. Use PATH.py:Class, or a name such as trl.SFTConfig.")
        module: Module | None = module_of_file(Path(path))
    else:
        top, dot, name = spec.partition(".")
        module = names.module(top)
        if not dot:
            raise UsageError(f"--for {spec}: expected package.Class, such as trl.SFTConfig, or PATH.py:Class.")
        if module is None:
            raise UsageError(
                f"--for {spec}: no source found for {top!r}. Install it, or pass its folder with --search."
            )
    assert module is not None
    found = names.find(module, name)
    if found is None:
        raise UsageError(f"--for {spec}: no class {name!r} in {module.file} or its imports.")
    return found


def _package(module: Module) -> str:
    return module.name.partition(".")[0]


def _with_bases(found: ClassDefinition, names: NameResolver, unresolved: list[str]) -> Iterator[ClassDefinition]:
    """Yields the class and all its bases, nearest first."""
    seen: set[tuple[Path, str]] = set()
    queue = [found]
    while queue:
        entry = queue.pop(0)
        if (entry.module.file, entry.node.name) in seen:
            continue
        seen.add((entry.module.file, entry.node.name))
        yield entry
        for base in entry.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if name.rpartition(".")[2] in EMPTY or name in EMPTY:
                continue
            parent = names.find(entry.module, name)
            if parent is None:
                unresolved.append(f"base {name} of {entry.node.name} ({entry.module.file}:{entry.node.lineno})")
            else:
                queue.append(parent)


def _fields(entry: ClassDefinition) -> dict[str, Key]:
    """The fields declared by a dataclass or pydantic model itself; annotations in other classes are not fields."""
    if not _is_dataclass(entry.node) and not any(ast.unparse(b).endswith(MODELS) for b in entry.node.bases):
        return {}
    found: dict[str, Key] = {}
    for statement in entry.node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) if _is_field(statement):
                found[name] = Key(name, entry.module.file, statement.lineno, _default(statement.value))
            case _:
                continue
    return found


def _own_init(entry: ClassDefinition) -> ast.FunctionDef | None:
    """The `__init__` defined in the class body; a dataclass doesn't replace one either."""
    return next((n for n in entry.node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_field(statement: ast.AnnAssign) -> bool:
    kind = ast.unparse(statement.annotation)
    if "ClassVar" in kind or "KW_ONLY" in kind:
        return False
    match statement.value:
        case ast.Call(keywords=keywords):
            return not any(k.arg == "init" and ast.unparse(k.value) == "False" for k in keywords)
        case _:
            return True


def _default(value: ast.expr | None) -> str | None:
    match value:
        case None:
            return None
        case ast.Call(keywords=keywords):
            return next((ast.unparse(k.value) for k in keywords if k.arg == "default"), None)
        case _:
            return ast.unparse(value)


def _parameters(init: ast.FunctionDef, entry: ClassDefinition) -> dict[str, Key]:
    arguments = init.args
    named = [*arguments.posonlyargs, *arguments.args][1:] + arguments.kwonlyargs
    return {a.arg: Key(a.arg, entry.module.file, a.lineno, None) for a in named}


def _forwards_kwargs(init: ast.FunctionDef) -> bool:
    """Whether `__init__` passes its `**kwargs` on to `super().__init__`."""
    calls = (node for node in ast.walk(init) if isinstance(node, ast.Call))
    return any(
        ast.unparse(call.func).endswith("super().__init__") and any(k.arg is None for k in call.keywords)
        for call in calls
    )


def _swallowed(init: ast.FunctionDef, entry: ClassDefinition) -> list[str]:
    rest = init.args.kwarg
    return [] if rest is None else [f"**{rest.arg} of {entry.node.name}.__init__ ({entry.module.file}:{init.lineno})"]
