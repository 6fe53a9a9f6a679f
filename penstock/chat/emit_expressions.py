"""jinja2 expressions in, source text for the fast engine out, with the same value or an error.

Where the engines differ on some values only, the text carries a guard that refuses those values, which sends the row to
the reference; where they differ altogether, a Python function does it (fast.py); the rest is `NotServed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from jinja2 import nodes

from penstock.chat.emit_markup import Markup
from penstock.chat.emit_rules import (
    DICT_ATTRIBUTES,
    LISTING_FILTERS,
    LOOP_ATTRIBUTES,
    LOOP_NUMBERS,
    PREFIX,
    REFUSE,
    UNSERVED_NAMES,
    VALUE_ATTRIBUTES,
    NotServed,
)
from penstock.chat.syntax import constant_key, is_text
from penstock.chat.taint import Kind, Taint, is_call_of

OPERATORS: Final[dict[type[nodes.BinExpr], str]] = {
    nodes.Add: "+",
    nodes.Sub: "-",
    nodes.Mul: "*",
    nodes.FloorDiv: "//",
    nodes.Mod: "%",
    nodes.And: "and",
    nodes.Or: "or",
}
COMPARISONS: Final = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}
ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def quote(value: str) -> str:
    """A string literal."""
    return '"' + "".join(ESCAPES.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 else c) for c in value) + '"'


class Operators(ABC):
    """Emits the expressions of one template, apart from calls, filters and tests."""

    def __init__(self, taint: Taint, macros: dict[str, nodes.Macro], markup: Markup) -> None:
        self.taint, self.macros, self.markup = taint, macros, markup
        self.refused: list[str] = []  # what is not served, where it is reached
        self.hoisted: list[tuple[str, dict[str, str]]] = []  # loop variable -> its attributes kept in variables

    # ---- what is known without running

    def is_number(self, node: nodes.Node) -> bool:
        """Certainly an integer."""
        match node:
            case nodes.Const():
                return type(node.value) is int
            case nodes.Filter():
                return node.name in ("length", "count")
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return node.attr in LOOP_NUMBERS
            case nodes.Add() | nodes.Sub():
                return self.is_number(node.left) and self.is_number(node.right)
            case nodes.Neg():
                return self.is_number(node.node)
        return False

    def is_list(self, node: nodes.Node) -> bool:
        """Certainly a list."""
        kind = self.taint.kind(node)
        if isinstance(node, nodes.Name) and node.name == "messages" and kind is Kind.MESSAGES:
            return True
        return isinstance(node, nodes.List) or (isinstance(node, nodes.Filter) and node.name in LISTING_FILTERS)

    def maybe_undefined(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Name() | nodes.Getattr():
                return True
            case nodes.Getitem():
                return not isinstance(node.arg, nodes.Slice)
            case nodes.CondExpr():
                branches = [node.expr1, node.expr2]
                return node.expr2 is None or any(self.maybe_undefined(b) for b in branches if b is not None)
            case nodes.And() | nodes.Or():
                return self.maybe_undefined(node.left) or self.maybe_undefined(node.right)
            case nodes.Filter():
                if node.name in ("first", "last"):
                    return True
                return node.name in ("default", "d") and any(map(self.maybe_undefined, node.args))
            case nodes.Call():
                return isinstance(node.node, nodes.Getattr) and any(map(self.maybe_undefined, node.args))
        return False

    def defined(self, node: nodes.Node) -> str:
        """The expression, refusing an undefined value (which Python functions and literals would get as None)."""
        source = self.emit(node)
        return f"({source} if {source} is defined else {REFUSE})" if self.maybe_undefined(node) else source

    def not_none(self, node: nodes.Node) -> str:
        """The expression, refusing None, which the engine would take for an empty list."""
        source = self.emit(node, lazy=True)
        if self.is_list(node) or isinstance(node, nodes.Tuple) or is_call_of(node, "range"):
            return source
        return f"({source} if {source} is not none else {REFUSE})"

    # ---- expressions

    def emit(self, node: nodes.Node, lazy: bool = False) -> str:
        """The source of an expression. `lazy`: its consumer takes a generator, which the engine knows as a list.

        What is not served refuses the row when it is evaluated: many such things lie in branches that few rows take.
        """
        try:
            return self.served(node, lazy)
        except NotServed as reason:
            self.refused.append(str(reason))
            return REFUSE

    def served(self, node: nodes.Node, lazy: bool) -> str:
        match node:
            case nodes.Name():
                if node.name in UNSERVED_NAMES:
                    raise NotServed(f"the name {node.name!r}")
                return node.name
            case nodes.NSRef():
                return f"{node.name}.{node.attr}"
            case nodes.Const():
                return self.constant(node.value)
            case nodes.TemplateData():
                return quote(node.data)
            case nodes.BinExpr():
                return self.binary(node)
            case nodes.Concat():
                return "(" + " ~ ".join(map(self.emit, node.nodes)) + ")"
            case nodes.Not():
                return f"(not {self.emit(node.node)})"
            case nodes.Neg():
                return f"(-{self.emit(node.node)})"
            case nodes.Compare():
                return self.compare(node)
            case nodes.CondExpr():
                other = f" else {self.emit(node.expr2)}" if node.expr2 is not None else ""
                return f"({self.emit(node.expr1)} if {self.emit(node.test)}{other})"
            case nodes.Getattr():
                return self.attribute(node)
            case nodes.Getitem():
                return self.item(node)
            case nodes.Call():
                if is_call_of(node, "range") and not lazy:
                    raise NotServed("a range that is kept")
                return self.call(node, lazy)
            case nodes.Filter():
                return self.filter(node, lazy)
            case nodes.Test():
                return self.test(node)
            case nodes.List():
                return "[" + ", ".join(map(self.defined, node.items)) + "]"
            case nodes.Tuple():
                return "(" + "".join(self.defined(item) + ", " for item in node.items) + ")"
            case nodes.Dict():
                return "{" + ", ".join(f"{self.emit(p.key)}: {self.defined(p.value)}" for p in node.items) + "}"
        raise NotServed(f"the expression {type(node).__name__}")

    def constant(self, value: object) -> str:
        match value:
            case None:
                return "none"
            case bool():
                return "true" if value else "false"
            case str():
                return quote(value)
            case int() if abs(value) < 1 << 62:
                return str(value) if value >= 0 else f"({value})"
        raise NotServed(f"the constant {value!r}")

    def binary(self, node: nodes.BinExpr) -> str:
        operator = OPERATORS.get(type(node))
        if operator is None:
            raise NotServed(f"the operator {node.operator}")
        if isinstance(node, nodes.Mod) and is_text(node.left):
            return f"{PREFIX}percent({self.emit(node.left)}, {self.defined(node.right)})"
        left, right = self.emit(node.left), self.emit(node.right)
        if isinstance(node, nodes.Mul):  # repeated strings have no limit
            return f"(({left} * {right}) if {left} is integer and {right} is integer else {REFUSE})"
        return f"({left} {operator} {right})"

    def compare(self, node: nodes.Compare) -> str:
        parts, left = [], node.expr
        for operand in node.ops:
            parts.append(self.comparison(left, operand.op, operand.expr))
            left = operand.expr
        return parts[0] if len(parts) == 1 else "(" + " and ".join(parts) + ")"

    def comparison(self, left: nodes.Node, operator: str, right: nodes.Node) -> str:
        a, b = self.emit(left), self.emit(right, lazy=operator in ("in", "notin"))
        source = f"({a} {COMPARISONS[operator]} {b})"
        if operator in ("eq", "ne"):
            return source
        if operator in ("in", "notin"):
            if is_text(left) or isinstance(right, nodes.List | nodes.Tuple):
                return source
            hashed = "" if isinstance(right, nodes.Call) else f" or ({b} is not string and {b} is not mapping)"
            guard = f"{a} is string{hashed}"
        else:
            guard = " and ".join(f"{x} is integer" for n, x in ((left, a), (right, b)) if not self.is_number(n))
        return f"({source} if {guard} else {REFUSE})" if guard else source

    def attribute(self, node: nodes.Getattr) -> str:
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            if node.attr not in LOOP_ATTRIBUTES:
                raise NotServed(f"loop.{node.attr}")
            return f"loop.{node.attr}"
        if (kept := self.kept(node)) is not None:
            return kept
        owner = self.emit(node.node)
        if node.attr.startswith("_"):
            raise NotServed(f"the attribute {node.attr!r}")
        if node.attr in DICT_ATTRIBUTES:
            return f"{PREFIX}attribute({owner}, {quote(node.attr)})"
        source = f"{owner}.{node.attr}"
        return f"({source} if {owner} is mapping else {REFUSE})" if node.attr in VALUE_ATTRIBUTES else source

    def kept(self, node: nodes.Getattr | nodes.Getitem) -> str | None:
        """The variable that keeps this attribute of the loop's message."""
        if isinstance(node.node, nodes.Name) and (key := constant_key(node)) is not None:
            for name, attributes in reversed(self.hoisted):
                if name == node.node.name:
                    return attributes.get(key)
        return None

    def item(self, node: nodes.Getitem) -> str:
        if (kept := self.kept(node)) is not None:
            return kept
        owner = self.emit(node.node)
        if not isinstance(node.arg, nodes.Slice):
            if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) and node.arg.value.startswith("_"):
                raise NotServed(f"the item {node.arg.value!r}")
            return f"{owner}[{self.emit(node.arg)}]"
        start, stop, step = (
            self.emit(x) if x is not None else "" for x in (node.arg.start, node.arg.stop, node.arg.step)
        )
        source = f"{owner}[{start}:{stop}" + (f":{step}]" if step else "]")
        if step:  # natively an empty list turned round is true
            whole = f"({source} if {owner} else {owner})"
            return f"({whole} if {owner} is defined and ({owner} is string or {owner} is sequence) else {REFUSE})"
        if self.is_list(node.node):
            return source
        return f"({source} if {owner} is defined and {owner} is not none else {REFUSE})"

    @abstractmethod
    def call(self, node: nodes.Call, lazy: bool) -> str: ...

    @abstractmethod
    def filter(self, node: nodes.Filter, lazy: bool) -> str: ...

    @abstractmethod
    def test(self, node: nodes.Test) -> str: ...
