"""Reads the keys that a class accepts from its source and that of its bases.

A dataclass (or pydantic model) accepts its annotated fields, except class variables and those with `init=False`; any
other class accepts the parameters of its `__init__`. Bases are followed through imports. If a base can't be found, or
`__init__` swallows `**kwargs`, the list is incomplete and keys not on it are unknown rather than refused.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from penstock.errors import UsageError

# ---- modules ---------------------------------------------------------------------------------------------------------
#
# Finds the source file of a module and the version of its package without importing anything.
#
# Versions come from the package's metadata, or from a `VERSION` file or `__version__` in its source. Costs a few
# directory look-ups.


@dataclass(frozen=True, slots=True)
class Module:
    """A module's dotted name and source file."""

    name: str
    file: Path

    @property
    def is_package(self) -> bool:
        """Whether this is a package, so that relative imports start at the module itself."""
        return self.file.name == "__init__.py"

    @property
    def root(self) -> Path:
        """The folder that contains the top-level package or module."""
        return self.file.parents[self.name.count(".") + (1 if self.is_package else 0)]


def find_module(name: str, search: tuple[Path, ...]) -> Module | None:
    """Finds a module in the `search` folders, then where Python would look; None if it has no source."""
    relative = Path(*name.split("."))
    top = name.partition(".")[0]
    for folder in search:
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return _in_folder(name, folder / relative)
    folder_of_top = _installed(top)
    return None if folder_of_top is None else _in_folder(name, folder_of_top / relative)


def module_of_file(file: Path) -> Module:
    """Derives a file's dotted module name from the packages that enclose it."""
    file = file.resolve()
    parts = [] if file.name == "__init__.py" else [file.stem]
    folder = file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return Module(".".join(parts), file)


def version_of(module: Module) -> str | None:
    """The version of the package that contains the file, as stated next to that file."""
    top, above = module.name.partition(".")[0], module.root
    beside = next(iter(sorted(above.glob(f"{_any_case(top)}-*.dist-info"))), None)
    if beside is not None:
        return beside.name.removesuffix(".dist-info").partition("-")[2]
    stated = above / top / "VERSION"
    if stated.is_file():
        return stated.read_text(encoding="utf-8").strip()
    first = above / top / "__init__.py"
    found = re.search(r'^__version__ = "([^"]+)"', first.read_text("utf-8"), re.MULTILINE) if first.is_file() else None
    if found:
        return found[1]
    return _version_of_editable(top, above)


def _in_folder(name: str, base: Path) -> Module | None:
    for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        if file.is_file():
            return Module(name, file.resolve())
    return None


@cache
def _installed(top: str) -> Path | None:
    """The folder that contains an installed top-level module. Finding its spec does not run it."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    return file.parent.parent if spec.submodule_search_locations is not None else file.parent


def _any_case(name: str) -> str:
    return "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in name)


def _version_of_editable(top: str, above: Path) -> str | None:
    """The version of an editable install, whose metadata lives elsewhere; used only if it points to this folder."""
    if _installed(top) != above:
        return None
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- resolver --------------------------------------------------------------------------------------------------------
# Resolves a name to the class it refers to by following imports in the source.
#
# Supports definitions, `import` and `from … import …` with or without `as` in any block (`if TYPE_CHECKING:` and `try:`
# included), star imports, attributes of imported modules, and assignments of one name to another. Lazy packages repeat
# their exports under `TYPE_CHECKING` or list them in `_import_structure`; both are read. Anything else resolves to
# None.


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


# ---- config class ----------------------------------------------------------------------------------------------------


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


# ---- commits ---------------------------------------------------------------------------------------------------------
#
# The git commit that a source file is checked out from, so that a report says which state of a trainer it is about.
#
# A checkout may be anyone's, and git runs commands that a checkout's own configuration names: filters, file system
# monitors, signature checks, remote helpers. Only commands that read objects are used, and fetching is off.


_QUIET = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "", "GIT_OPTIONAL_LOCKS": "0"}


def commit_of(file: Path) -> str | None:
    """Commit and date of a file's checkout, with `+changes` if the file differs; None if git doesn't track it."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return None  # an environment inside a checkout is not part of it
    found = _git(file.parent, "rev-parse", "HEAD", f"HEAD:./{file.name}")
    if found is None:
        return None
    commit, blob = found.split()
    changed = "" if blob == _blob(file.read_bytes(), len(blob)) else "+changes"
    return f"{commit[:12]}{changed}{_date(_git(file.parent, 'cat-file', 'commit', commit) or '')}"


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env={**os.environ, **_QUIET})
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return None if done.returncode else done.stdout


def _blob(data: bytes, length: int) -> str:
    """The object id of a file's content, in a repository whose ids have this length."""
    digest = hashlib.sha1(usedforsecurity=False) if length == 40 else hashlib.sha256()
    digest.update(b"blob %d\0" % len(data) + data)
    return digest.hexdigest()


def _date(commit: str) -> str:
    found = re.search(r"^committer .*> (\d{1,12}) ", commit, re.MULTILINE)
    return "" if found is None else f" of {datetime.fromtimestamp(int(found[1]), UTC):%Y-%m-%d}"
