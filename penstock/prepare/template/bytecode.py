"""Bytecode under construction: instructions, constants, jump labels and the slots of variables."""

from __future__ import annotations

import array
from dataclasses import dataclass, field
from typing import Any

from penstock.native import native

UNDEFINED = ...  # the constant that stands for an undefined value


class NotCompiled(Exception):
    """The template uses a construct that the machine does not evaluate exactly as jinja2 does."""


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
        self.macros: list[tuple[int, int, int, tuple[str, ...]]] = []
        self.branches = 0
        self.scopes = [Scope(0)]
        self._numbers: dict[tuple[str, str], int] = {}

    def op(self, name: str, *operands: int) -> None:
        self.code.append(self.ops[name])
        self.code.extend(operands)

    def constant(self, value: Any) -> int:
        """The index of a constant in the constant table."""
        key = type(value).__name__, repr(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.constants)
            self.constants.append(value)
        return self._numbers[key]

    def push(self, value: Any) -> None:
        self.op("CONST", self.constant(value))

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

    def _slot(self, reference: str) -> tuple[str, int]:
        """Resolve one of jinja2's symbols (`l_2_name`) to a slot of the globals or of the current macro's locals."""
        level = int(reference.split("_")[1])
        for depth in range(len(self.scopes) - 1, -1, -1):
            scope = self.scopes[depth]
            if level >= scope.level:
                if 0 < depth < len(self.scopes) - 1:
                    raise NotCompiled("a macro that reads the variables of a macro around it")
                return "GLOBAL" if depth == 0 else "LOCAL", scope.slots.setdefault(reference, len(scope.slots))
        raise AssertionError(reference)

    def variable(self, action: str, reference: str) -> int:
        """Emit LOAD, STORE, CLEAR or LOOP for a variable, and return its slot."""
        where, slot = self._slot(reference)
        self.op(f"{action}_{where}", slot)
        return slot

    def slot(self, reference: str) -> int:
        return self._slot(reference)[1]

    def enter_macro(self, level: int) -> None:
        """Begin a macro: symbols at this level or above are its locals."""
        self.scopes.append(Scope(level))

    def leave_macro(self) -> int:
        """End a macro and return the number of its locals."""
        return len(self.scopes.pop().slots)

    def assemble(self) -> tuple[bytes, list[Any], list[tuple[int, int, int, tuple[str, ...]]], int, int]:
        """The arguments of `native.Program`: code, constants, macros, and the numbers of globals and branches."""
        code = array.array("i", self.code).tobytes()
        return code, self.constants, self.macros, len(self.scopes[0].slots), self.branches
