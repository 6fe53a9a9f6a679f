"""The sorts of values that the expressions of a template may hold, as far as locality is concerned (see `locality`).

An expression enters, its sorts leave; `NotLocal` is raised where it does what a local template does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Flag, auto
from typing import Final

from jinja2 import nodes

from penstock.chat.syntax import constant_key
from penstock.chat.truths import Truths


class NotLocal(Exception):
    """Why a template is not local."""


class Sort(Flag):
    """What an expression may hold. Nothing of this: a fact."""

    FACT = 0
    LIST = auto()  # the messages, or all but the first of them
    OWN = auto()  # the loop's message
    NEAR = auto()  # the one before or after it
    FIRST = auto()  # one of the first messages
    LOOP = auto()  # the loop's own counter
    INNER_LOOP = auto()  # that of a loop inside it
    CONTENT = auto()  # of the loop's message, whole or trimmed: never blank
    FIRST_CONTENT = auto()
    CALLS = auto()  # the loop's message's
    CALL = auto()
    FUNCTION = auto()
    ARGUMENTS = auto()
    TEXT = auto()  # some of the loop's message, with other text around it: to be printed
    FIRST_TEXT = auto()
    TOOLS = auto()  # of the row: a list that is not empty
    TOOL = auto()
    TOOL_TEXT = auto()  # JSON of tools


_CONTENTS = Sort.CONTENT | Sort.FIRST_CONTENT
TEXTS = _CONTENTS | Sort.TEXT | Sort.FIRST_TEXT | Sort.TOOL_TEXT
_TRUE_OR_KNOWN = ~(Sort.ARGUMENTS | Sort.TOOL | Sort.LOOP | Sort.INNER_LOOP)  # what may be tested for truth
_TYPE_TESTS: Final = frozenset(
    ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number", "true", "false")
)
STATEFUL: Final = frozenset(("cycler", "joiner", "random", "lipsum"))
_METHODS: Final = frozenset(name for name in dir(dict) if not name.startswith("_"))
_AROUND_FIRST: Final = {("eq", 0), ("ne", 0), ("gt", 0), ("lteq", 0), ("gteq", 1), ("lt", 1)}


class Sorts:
    """Tells the sorts of expressions; what names hold is filled in by whoever reads the statements."""

    def __init__(self, loop: nodes.For, truths: Truths, *, calls: bool, tools: bool) -> None:
        self._loop, self._truths, self._calls = loop, truths, calls
        self._sorts = {"messages": Sort.LIST, "tools": Sort.TOOLS if tools else Sort.FACT}
        self._known: dict[
            int, tuple[nodes.Node, Sort]
        ] = {}  # of this reading; holds on to nodes, so that ids stay theirs
        self._read: set[str] = set()  # keys of messages that were asked for
        self._in_loop = False
        self._counter = Sort.FACT  # what `loop` is

    def only(self, node: nodes.Node, allowed: Sort) -> Sort:
        """The sort of an expression that may be a fact or one of these."""
        sort = self.sort(node)
        if sort & ~allowed:
            raise NotLocal(f"it does more with {(sort & ~allowed).name} than print it")
        return sort

    def truth(self, node: nodes.Node) -> None:
        self.only(node, _TRUE_OR_KNOWN)

    def sort(self, node: nodes.Node) -> Sort:
        """The sort of an expression; each is looked at once in a reading, however often it is asked for."""
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = (node, self._sort(node))
        return known[1]

    def _sort(self, node: nodes.Node) -> Sort:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return Sort.FACT
            case nodes.Name(name="loop"):
                return self._counter
            case nodes.Name():
                if node.name in STATEFUL:
                    raise NotLocal(f"it uses {node.name}")
                return self._sorts.get(node.name, Sort.FACT)
            case nodes.Getattr() | nodes.Getitem():
                return self.member(node)
            case nodes.Filter():
                return self.filtered(node)
            case nodes.Test():
                if node.name in _TYPE_TESTS and not node.args:
                    self.only(node.node, ~(Sort.LOOP | Sort.INNER_LOOP | TEXTS) | _CONTENTS)
                    return Sort.FACT
            case nodes.Not():
                self.truth(node.node)
                return Sort.FACT
            case nodes.And() | nodes.Or():
                if self._truths.of(node.left) is isinstance(node, nodes.Or):
                    return self.sort(node.left)  # the right side is never looked at
                self.truth(node.left)
                return self.sort(node.left) | self.sort(node.right)
            case nodes.CondExpr():
                self.truth(node.test)
                return self.sort(node.expr1) | (self.sort(node.expr2) if node.expr2 is not None else Sort.FACT)
            case nodes.Compare():
                return self.comparison(node)
            case nodes.Mod(right=nodes.Const(value=2)) if self.place(node.left) is not None:
                return Sort.FACT
            case nodes.Add() | nodes.Concat():
                parts = [node.left, node.right] if isinstance(node, nodes.Add) else node.nodes
                return _joined(self.only(part, TEXTS) for part in parts)
            case nodes.Call():
                return self.call(node)
        for child in node.iter_child_nodes():
            self.only(child, Sort.FACT)
        return Sort.FACT

    def member(self, node: nodes.Getattr | nodes.Getitem) -> Sort:
        owner, key = self.sort(node.node), constant_key(node)
        if owner & Sort.LIST:
            return self.element(node, owner)
        if isinstance(node, nodes.Getitem) and owner == Sort.CALLS and node.arg == nodes.Const(0):
            return Sort.CALL
        if key is None:
            self.only(node.node, Sort.FACT)
            if isinstance(node, nodes.Getitem):
                self.only(node.arg, Sort.FACT)
            return Sort.FACT
        result = Sort.FACT
        for one in owner:
            result |= self.value(one, key)
        return result

    def element(self, node: nodes.Getattr | nodes.Getitem, owner: Sort) -> Sort:
        if isinstance(node, nodes.Getitem) and owner == Sort.LIST:
            if isinstance(node.arg, nodes.Slice):
                if (node.arg.start, node.arg.stop, node.arg.step) == (nodes.Const(1), None, None):
                    return Sort.LIST
            elif node.arg == nodes.Const(0):
                return Sort.FIRST
            elif self._in_loop and isinstance(self._loop.iter, nodes.Name) and node.node == self._loop.iter:
                place = self.place(node.arg)
                if place in (-1, 0, 1):
                    return Sort.NEAR if place else Sort.OWN
        raise NotLocal("it looks at messages far away")

    def value(self, owner: Sort, key: str) -> Sort:
        """What a value of one sort has under a key."""
        if key in _METHODS:
            raise NotLocal(f"it calls {key}")
        match owner, key:
            case ((Sort.OWN | Sort.FIRST | Sort.NEAR), "role"):
                return Sort.FACT
            case Sort.LOOP, "first" | "last":
                return Sort.FACT
            case Sort.LOOP, "previtem" | "nextitem":
                return Sort.NEAR
            case Sort.INNER_LOOP, "first" | "last" | "index" | "index0" | "length":
                return Sort.FACT
            case ((Sort.LOOP | Sort.INNER_LOOP | Sort.NEAR), _):
                raise NotLocal(f"it looks at {key} of {owner.name}")
            case Sort.OWN, "content":
                return Sort.CONTENT
            case Sort.FIRST, "content" if not self._in_loop:
                return Sort.FIRST_CONTENT
            case Sort.OWN, "tool_calls" if self._calls:
                return Sort.CALLS
            case Sort.FIRST, "content" | "tool_calls":
                raise NotLocal("it looks back at the first message")
            case ((Sort.OWN | Sort.FIRST), _):
                self._read.add(key)
                return Sort.FACT
            case Sort.CALL, "function":
                return Sort.FUNCTION
            case Sort.CALL, "id":
                raise NotLocal("it prints the ids of calls")
            case Sort.FUNCTION, "name":
                return Sort.TEXT
            case Sort.FUNCTION, "arguments":
                return Sort.ARGUMENTS
            case ((Sort.CALL | Sort.FUNCTION), _):
                return Sort.FACT  # is not there
        raise NotLocal(f"it looks into {owner.name}")

    def filtered(self, node: nodes.Filter) -> Sort:
        if node.node is None or node.name in STATEFUL:
            raise NotLocal(f"it uses the filter {node.name}")
        sort = self.sort(node.node)
        plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        if plain and node.name == "trim" and not sort & ~_CONTENTS:
            return sort
        if plain and node.name == "tojson" and sort == Sort.ARGUMENTS:
            return Sort.TEXT
        if plain and node.name == "tojson" and sort in (Sort.TOOLS, Sort.TOOL):
            return Sort.TOOL_TEXT
        if plain and node.name in ("length", "count") and sort in (Sort.CALLS, Sort.TOOLS):
            return Sort.FACT
        for child in node.iter_child_nodes():
            self.only(child, Sort.FACT)
        return Sort.FACT

    def comparison(self, node: nodes.Compare) -> Sort:
        (first, *more) = node.ops
        place = self.place(node.expr)
        if place is not None and not more and isinstance(first.expr, nodes.Const) and type(first.expr.value) is int:
            if (first.op, first.expr.value - place) in _AROUND_FIRST:
                return Sort.FACT
        elif not more and first.op in ("in", "notin") and isinstance(node.expr, nodes.Const):
            found = self.only(first.expr, Sort.OWN | Sort.FIRST | Sort.CALL | Sort.FUNCTION)
            for one in found:
                self.value(one, str(node.expr.value))
            return Sort.FACT
        elif not more and first.op in ("eq", "ne") and isinstance(first.expr, nodes.Const):
            # contents are strings that are not blank, or their kind is among the facts; tools are neither
            known = first.expr.value in ("", None, False, True)
            self.only(node.expr, _CONTENTS | Sort.TOOLS if known else Sort.FACT)
            return Sort.FACT
        for part in (node.expr, *(operand.expr for operand in node.ops)):
            self.only(part, Sort.FACT)
        return Sort.FACT

    def place(self, node: nodes.Node) -> int | None:
        """The k of `loop.index0 + k`, however it is written; None of all else."""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index") if self._counter is Sort.LOOP:
                return int(node.attr == "index")
            case nodes.Add(right=nodes.Const(value=int(number))) | nodes.Sub(right=nodes.Const(value=int(number))):
                place = self.place(node.left)
                return None if place is None else place + (number if isinstance(node, nodes.Add) else -number)
        return None

    def call(self, node: nodes.Call) -> Sort:
        given = [*node.args, *(keyword.value for keyword in node.kwargs)]
        spread = [*filter(None, (node.dyn_args, node.dyn_kwargs))]
        match node.node:
            case nodes.Getattr(node=owner, attr="strip") if not given and not spread and self.sort(owner):
                return self.only(owner, _CONTENTS)
            case nodes.Getattr(node=owner, attr="get") if self.sort(owner) and node.args and not spread:
                default = self.only(given[1], Sort.FACT) if len(given) == 2 else Sort.FACT
                if len(given) < 3 and not node.kwargs:
                    return self.member(nodes.Getitem(owner, given[0], "load")) | default
        for child in (node.node, *given, *spread):
            self.only(child, Sort.FACT)
        return Sort.FACT


def _joined(parts: Iterable[Sort]) -> Sort:
    """What texts are together."""
    found = Sort.FACT
    for part in parts:
        found |= part
    own = Sort.TEXT if found & (Sort.TEXT | Sort.CONTENT) else Sort.FACT
    first = Sort.FIRST_TEXT if found & (Sort.FIRST_TEXT | Sort.FIRST_CONTENT) else Sort.FACT
    return own | first | found & Sort.TOOL_TEXT
