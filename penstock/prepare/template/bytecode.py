"""Bytecode under construction: instructions, constants, jump labels and the slots of variables."""

from __future__ import annotations

import array
import re
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, NamedTuple

from jinja2 import nodes

from penstock.native import native

_SURROGATE = re.compile("[\ud800-\udfff]")
UNDEFINED = ...  # the constant that stands for an undefined value


class NotCompiled(Exception):
    """A construct that the machine does not evaluate exactly as jinja2 does."""


@dataclass(slots=True)
class Label:
    """A jump target, known once `mark` reaches it."""

    at: int | None = None
    pending: list[int] = field(default_factory=list)  # positions of operands to patch


@dataclass(slots=True)
class Scope:
    """The template itself or a macro: its slots, and the level of jinja2's symbols at which its own names begin."""

    level: int
    slots: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # parameters of blocks, which are missing once their block has ended


class Takes(IntFlag):
    """What a macro receives after its arguments, in this order."""

    CALLER = 1
    KWARGS = 2
    VARARGS = 4


class Starred(IntFlag):
    """Which of `*args` and `**kwargs` a call has."""

    LIST = 1
    DICT = 2


@dataclass(slots=True)
class Function:
    """A macro, the body of a call block, or a recursive loop; compiled after the code that defines it."""

    node: nodes.Macro | nodes.CallBlock | nodes.For
    frame: Any  # the `Frame` that defines it
    scopes: list[Scope]  # the template, the macros around it, and last its own
    parent: int
    entry: int = 0
    arguments: tuple[str, ...] = ()
    takes: Takes = Takes(0)


class Position(NamedTuple):
    """A place in the bytecode to return to."""

    code: int
    branches: int
    functions: int
    given_up: int


class Bytecode:
    """Collects the instructions of one template."""

    def __init__(self) -> None:
        assert native is not None
        self.ops = {name: number for number, name in enumerate(native.OPS)}
        self.filters = {name: number for number, name in enumerate(native.FILTERS)}
        self.tests = {name: number for number, name in enumerate(native.TESTS)}
        self.methods = {name: number for number, name in enumerate(native.METHODS)}
        self.code: list[int] = []
        self.constants: list[Any] = []
        self.functions: list[Function] = []
        self.given_up: list[str] = []  # why parts of the template were not compiled
        self.branches = 0
        self.scopes = [Scope(0)]  # of the template, and of the macros that are being compiled
        self._current = -1  # the innermost of these macros
        self._numbers: dict[tuple[str, str], int] = {}

    def op(self, name: str, *operands: int) -> None:
        self.code.append(self.ops[name])
        self.code.extend(operands)

    def constant(self, value: Any) -> int:
        """The index of a constant in the constant table."""
        key = type(value).__name__, repr(value)
        if key not in self._numbers:
            if not _is_value(value):
                raise NotCompiled("a constant beyond what the machine holds")
            self._numbers[key] = len(self.constants)
            self.constants.append(value)
        return self._numbers[key]

    def push(self, value: Any) -> None:
        self.op("CONST", self.constant(value))

    # ---- what can't be compiled

    @property
    def position(self) -> Position:
        return Position(len(self.code), self.branches, len(self.functions), len(self.given_up))

    def give_up(self, since: Position, reason: NotCompiled) -> None:
        """Replace what was emitted since a position: rows that reach it are left to the reference."""
        del self.code[since.code :], self.functions[since.functions :], self.given_up[since.given_up :]
        self.branches = since.branches
        self.given_up.append(str(reason))
        self.op("GIVE_UP", self.constant(f"the template uses {reason}"))

    # ---- jumps

    def mark(self, label: Label) -> None:
        """Set a label to the current position, and patch the jumps to it."""
        label.at = len(self.code)
        for place in label.pending:
            self.code[place] = label.at

    def _target(self, label: Label) -> int:
        if label.at is None:
            label.pending.append(len(self.code))
        return label.at or 0

    def jump(self, label: Label, name: str = "JUMP") -> None:
        self.code.append(self.ops[name])
        self.code.append(self._target(label))

    def branch(self, name: str, label: Label, *before: int) -> None:
        """Emit a conditional jump, numbered so that the machine can record which way it went."""
        self.code.append(self.ops[name])
        self.code.extend(before)
        self.code.append(self._target(label))
        self.code.append(self.branches)
        self.branches += 1

    # ---- variables

    def _slot(self, reference: str) -> tuple[int, int]:
        """Resolve one of jinja2's symbols (`l_2_name`): a scope by its number, and a slot in it."""
        level = int(reference.split("_")[1])
        number = next(n for n in range(len(self.scopes) - 1, -1, -1) if level >= self.scopes[n].level)
        slots = self.scopes[number].slots
        return number, slots.setdefault(reference, len(slots))

    def variable(self, action: str, reference: str) -> int:
        """Emit LOAD, STORE, CLEAR or LOOP for a variable, and return its slot."""
        number, slot = self._slot(reference)
        hops = len(self.scopes) - 1 - number
        if number == 0:
            self.op(f"{action}_GLOBAL", slot)
        elif hops == 0:
            self.op(f"{action}_LOCAL", slot)
        else:
            assert action == "LOAD"
            self.op("LOAD_OUTER", hops, slot)
        return slot

    def load(self, reference: str) -> None:
        """Push a variable. A macro can read a parameter of a block around it only until the block ends."""
        self.variable("LOAD", reference)
        number, _ = self._slot(reference)
        if number < len(self.scopes) - 1 and reference in self.scopes[number].ended:
            self.op("IN_SCOPE")

    def slot(self, reference: str) -> int:
        return self._slot(reference)[1]

    # ---- macros

    def define(self, node: nodes.Macro | nodes.CallBlock | nodes.For, frame: Any) -> int:
        """Add a macro, or what is compiled like one, and return its number. Its own names begin below the frame."""
        scopes = [*self.scopes, Scope(frame.symbols.level + 1)]
        self.functions.append(Function(node, frame, scopes, self._current))
        return len(self.functions) - 1

    def enter(self, number: int) -> Function:
        """Begin the code of a macro."""
        function = self.functions[number]
        self._current, self.scopes, function.entry = number, function.scopes, len(self.code)
        return function

    def assemble(self) -> tuple[bytes, list[Any], list[tuple[Any, ...]], int, int]:
        """The arguments of `native.Program`: code, constants, macros, and the numbers of globals and branches."""
        code = array.array("i", self.code).tobytes()
        macros: list[tuple[Any, ...]] = [
            (f.entry, len(f.arguments), len(f.scopes[-1].slots), f.parent, int(f.takes), f.arguments)
            for f in self.functions
        ]
        return code, self.constants, macros, len(self.scopes[0].slots), self.branches


def _is_value(value: Any) -> bool:
    """Whether the machine can hold a constant."""
    match value:
        case None | bool() | float() | frozenset():
            return True
        case int():
            return abs(value) < 10**3999
        case str():
            return value.isascii() or _SURROGATE.search(value) is None
        case list() | tuple():
            return all(map(_is_value, value))
        case dict():
            return all(isinstance(key, str) and _is_value(key) and _is_value(item) for key, item in value.items())
    return value is UNDEFINED
