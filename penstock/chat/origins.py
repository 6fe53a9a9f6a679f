"""Whose text an expression carries, also outside of the loops over the messages.

A template may keep a message's text in a variable and print it later (a system prompt, the first user's text).
Such a variable gets a *shadow* beside it that holds the message's number. `Origins.of(expression)` gives the expression
that yields the number, or None where the expression carries no message's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2 import nodes

from penstock.chat.sandbox import NUMBER_FILTER
from penstock.chat.syntax import call_filter, constant_key, find
from penstock.chat.taint import LENGTH_FILTERS, Key, Kind, Taint, target_key

TEXT_KEYS = frozenset(("content", "tool_calls", "reasoning_content", "reasoning", "thinking"))
SHADOW_SUFFIX = "_penstock"


def message_of_loop(loop: nodes.For, taint: Taint) -> nodes.Expr | None:
    """The expression that gives the message of the current step, if this is a loop over messages."""
    if not isinstance(loop.target, nodes.Name):
        return None
    kind = taint.kind(loop.iter)
    if kind is Kind.MESSAGES:
        return nodes.Name(loop.target.name, "load")
    if kind is Kind.RANGE:
        for item in find(loop.body, nodes.Getitem):
            if (
                taint.kind(item.node) is Kind.MESSAGES
                and isinstance(item.arg, nodes.Name)
                and item.arg.name == loop.target.name
            ):
                return item
    return None


class Origins:
    """The shadows one syntax tree needs, and the origin of each expression in it."""

    def __init__(self, tree: nodes.Template, taint: Taint, accumulators: frozenset[Key]) -> None:
        self.taint = taint
        self.constant = not any(name.name == "messages" and name.ctx != "load" for name in find(tree, nodes.Name))
        self.shadowed: set[Key] = set()  # these carry the text of one message
        known = -1
        while known != len(self.shadowed):
            known = len(self.shadowed)
            for assign in find(tree, nodes.Assign):
                key = target_key(assign.target)
                if key and key not in accumulators and taint.kind(assign.node) is None and self.of(assign.node):
                    self.shadowed.add(key)
        self.set_outside: set[Key] = set(self._outside(tree.body, False))

    def _outside(self, body: Iterable[nodes.Node], in_loop: bool) -> Iterator[Key]:
        """What is assigned outside of the loops over the messages."""
        for node in body:
            match node:
                case nodes.Assign() if not in_loop and (key := target_key(node.target)):
                    yield key
                case nodes.For():
                    yield from self._outside(
                        node.body, in_loop or self.taint.kind(node.iter) in (Kind.MESSAGES, Kind.RANGE)
                    )
                case nodes.If():
                    for branch in (node.body, node.elif_, node.else_):
                        yield from self._outside(branch, in_loop)
                case nodes.With() | nodes.CallBlock() | nodes.AssignBlock():
                    yield from self._outside(node.body, in_loop)

    def is_shadow(self, node: nodes.Expr | None, outside: bool = False) -> bool:
        """Whether this origin is read from a shadow (`outside`: from one that is also set outside of the loops)."""
        key = target_key(node) if node is not None else None
        if key is None or not key[-1].endswith(SHADOW_SUFFIX):
            return False
        return not outside or (*key[:-1], key[-1].removesuffix(SHADOW_SUFFIX)) in self.set_outside

    def of(self, node: nodes.Node, without: Key | None = None) -> nodes.Expr | None:
        """The expression that yields the number of the message whose text this carries."""
        match node:
            case nodes.Getattr() | nodes.Getitem() if self.taint.kind(node.node) is Kind.MESSAGE:
                return self.number(node.node) if constant_key(node) in TEXT_KEYS else None
            case nodes.Call(node=nodes.Getattr(node=owner, attr="get")) if self.taint.kind(owner) is Kind.MESSAGE:
                key = node.args[0].value if node.args and isinstance(node.args[0], nodes.Const) else None
                return self.number(owner) if key in TEXT_KEYS else None
            case nodes.Name() | nodes.Getattr() if (key := target_key(node)) in self.shadowed and key != without:
                return shadow_read(node)
        for part in carriers(node):
            origin = self.of(part, without)
            if origin is not None:
                return origin
        return None

    def number(self, message: nodes.Expr) -> nodes.Expr:
        """The expression that yields the number of a message; known beforehand for `messages[0]` and the like."""
        match message:
            case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=int(number))) if self.constant:
                return nodes.Const(number) if number >= 0 else call_filter(NUMBER_FILTER, message)
            case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Name() as number) if self.constant:
                if self.taint.kind(number) is Kind.NUMBER:
                    return number
        return call_filter(NUMBER_FILTER, message)

    def number_in_loop(self, loop: nodes.For, message: nodes.Expr) -> nodes.Expr:
        """The same at the start of a loop's body, where the loop's counter may tell it."""
        if self.constant and loop.test is None and loop.iter == nodes.Name("messages", "load"):
            return nodes.Getattr(nodes.Name("loop", "load"), "index0", "load")
        return self.number(message)

    def shadow_assign(self, assign: nodes.Assign) -> nodes.Assign | None:
        """The assignment that keeps the shadow of this one's target true, if it has one."""
        key = target_key(assign.target)
        if key is None or key not in self.shadowed:
            return None
        origin = self.of(assign.node, without=key) or self.of(assign.node) or nodes.Const("")
        if target_key(origin) == (*key[:-1], key[-1] + SHADOW_SUFFIX):
            return None
        return nodes.Assign(shadow_target(assign.target), origin)

    def tested(self, test: nodes.Node) -> list[nodes.Expr]:
        """The messages a condition looks at."""
        found: list[nodes.Expr] = []
        for node in find(test, nodes.Expr):
            if (key := target_key(node)) in self.shadowed and key is not None:
                found.append(shadow_read(node))
            if self.taint.kind(node) is Kind.MESSAGE:
                found.append(self.number(node))
        return found

    def printed(self, body: list[nodes.Node]) -> list[nodes.Expr]:
        """The origins of what a block prints or loops over; empty where it loops over messages itself."""
        found: list[nodes.Expr] = []
        for loop in find(body, nodes.For):
            if self.taint.kind(loop.iter) in (Kind.MESSAGES, Kind.RANGE, Kind.GROUPS):
                return []
            found += filter(None, [self.of(loop.iter)])
        for output in find(body, nodes.Output):
            found += filter(None, [self.of(child) for child in output.nodes])
        return found


def carriers(node: nodes.Node) -> list[nodes.Node]:
    """The operands whose text the value of an expression may contain."""
    match node:
        case nodes.Compare() | nodes.Test() | nodes.Not() | nodes.Name() | nodes.TemplateData() | nodes.Const():
            return []
        case nodes.CondExpr():
            return [part for part in (node.expr1, node.expr2) if part is not None]
        case nodes.Filter():
            return [] if node.name in LENGTH_FILTERS or node.node is None else [node.node]
        case nodes.Call():
            owner = [node.node.node] if isinstance(node.node, nodes.Getattr) else []
            return [*owner, *node.args, *(keyword.value for keyword in node.kwargs)]
        case nodes.Getitem() | nodes.Getattr():
            return [node.node]
        case nodes.Expr():
            return list(node.iter_child_nodes())
    return []


def shadow_read(node: nodes.Node) -> nodes.Expr:
    match node:
        case nodes.Getattr():
            return nodes.Getattr(node.node, node.attr + SHADOW_SUFFIX, "load")
        case nodes.Name():
            return nodes.Name(node.name + SHADOW_SUFFIX, "load")
    raise AssertionError(node)


def shadow_target(target: nodes.Node) -> nodes.Expr:
    match target:
        case nodes.NSRef():
            return nodes.NSRef(target.name, target.attr + SHADOW_SUFFIX)
        case nodes.Name():
            return nodes.Name(target.name + SHADOW_SUFFIX, "store")
    raise AssertionError(target)
