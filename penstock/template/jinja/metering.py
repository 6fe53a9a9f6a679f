"""Adds nodes to a syntax tree that charge for loops, macros, comparisons, keys and slices.

jinja2's sandbox has hooks for everything else. The added nodes are filters that return their input.
"""

# ruff: noqa: N802, N815 (jinja2 finds visitors by name)
from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

STEP: Final = "penstock_step"
COMPARED: Final = "penstock_compared"
SEARCHED: Final = "penstock_searched"
SLICED: Final = "penstock_sliced"
FILTER_NODES: Final = 6  # a filter takes about as long as 6 other nodes


def call_filter(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    """Builds the node for `node|name(*args)`."""
    return nodes.Filter(node, name, list(args), [], None, None)


class Metering(NodeTransformer):
    """Adds the charging nodes to a tree, in place."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        steps = _count(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(steps)))
        if node.test is not None:
            node.test = nodes.And(_step(_count([node.test])), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        steps = _count(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(steps)))
        return node

    visit_CallBlock = visit_Macro
    visit_Block = visit_Macro

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """A comparison costs no more than its cheaper side, so a constant side makes it free."""
        left = node.expr
        self.generic_visit(node)
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                operand.expr = _charged(SEARCHED, right)
                node.expr = _charged(COMPARED, node.expr)
            elif not is_constant(left):
                operand.expr = _charged(COMPARED, right)
            left = right
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _charged(COMPARED, node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if is_constant(node.node):
            return node  # it is small, and the compiler must still be able to fold it
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _charged(COMPARED, node.arg)
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return call_filter(SLICED, node.node, *(bound or nodes.Const(None) for bound in bounds))


def is_constant(node: nodes.Node) -> bool:
    """Whether an expression is a literal."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(is_constant, node.items))
    return isinstance(node, nodes.Const)


def _charged(name: str, node: nodes.Expr) -> nodes.Expr:
    return node if is_constant(node) else call_filter(name, node)


def _step(count: int) -> nodes.Filter:
    return call_filter(STEP, nodes.Const(count))


def _count(body: Iterable[nodes.Node]) -> int:
    """The largest number of nodes that one run of a body evaluates; nested loops and macros are charged separately."""
    count, todo = 1, list(body)
    for node in todo:  # grows while it is iterated
        count += FILTER_NODES if isinstance(node, nodes.Filter | nodes.Test) else 1
        counts_itself = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
        todo += node.iter_child_nodes(exclude=("body", "test") if counts_itself else ())
    return count
