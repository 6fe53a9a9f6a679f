"""Conditions of a template that are the same for every row: `tools` of rows without tools, variables never given.

A syntax tree and the values of its variables enter; `Truths.of(test)` answers True, False, or None: not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import nodes
from jinja2.defaults import DEFAULT_NAMESPACE

from penstock.chat.syntax import find

# Names that a template did not assign and may find all the same: constants, functions, what macros are given.
_OFTEN_DEFINED = frozenset(
    (
        *("messages", "loop", "true", "false", "none", "True", "False", "None", "self", "super"),
        *("varargs", "kwargs", "caller", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE),
    )
)
_UNKNOWN = object()
_UNDEFINED = object()


class Truths:
    """What is known of a template's conditions before any row is."""

    def __init__(self, tree: nodes.Template, variables: Mapping[str, Any]) -> None:
        self._variables = variables
        self._changing = {name.name for name in find(tree, nodes.Name) if name.ctx != "load"}
        self._changing |= {macro.name for macro in find(tree, nodes.Macro)} | _OFTEN_DEFINED

    def of(self, node: nodes.Node) -> bool | None:
        match node:
            case nodes.Not():
                truth = self.of(node.node)
                return None if truth is None else not truth
            case nodes.And() | nodes.Or():
                sides = self.of(node.left), self.of(node.right)
                decisive = isinstance(node, nodes.Or)
                if decisive in sides:
                    return decisive
                return None if None in sides else not decisive
            case nodes.Test(name="defined" | "undefined" | "none", node=nodes.Name()):
                value = self._value(node.node)
                if value is _UNKNOWN:
                    return None
                if node.name == "none":
                    return value is None
                return (value is _UNDEFINED) == (node.name == "undefined")
            case nodes.Compare(expr=nodes.Name(), ops=[nodes.Operand(op="eq" | "ne", expr=nodes.Const() as other)]):
                value = self._value(node.expr)
                known = value is not _UNKNOWN and value is not _UNDEFINED
                return (value == other.value) == (node.ops[0].op == "eq") if known else None
            case nodes.Const():
                return bool(node.value)
            case nodes.Name():
                value = self._value(node)
                return None if value is _UNKNOWN else value is not _UNDEFINED and bool(value)
        return None

    def _value(self, name: nodes.Expr) -> Any:
        assert isinstance(name, nodes.Name)
        if name.name in self._changing:
            return _UNKNOWN
        return self._variables.get(name.name, _UNDEFINED)
