"""Whether a template treats messages locally: each is printed for itself, whatever the others say.

A syntax tree enters; `Locality` leaves, or `NotLocal` with the reason. In a local template, what the loop over the
messages prints for one of them is its content (and the names and arguments of its calls) between fixed texts; these
texts depend on *facts* alone: the roles of the message and its neighbours, the kinds of the first three messages,
whether it is the first or the last, its number's parity. Then texts learned on one conversation hold for all others
(`stencils`). Every expression is given the sorts of values that it may hold; what is not known to be harmless is not
local. Names are not told apart by scope or order, which errs on the safe side. Costs some milliseconds per template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Flag, auto
from typing import Any, Final, NamedTuple

from jinja2 import nodes

from penstock.chat.loops import ordered_loop
from penstock.chat.syntax import constant_key, find, is_generation
from penstock.chat.taint import Key, Taint, target_key
from penstock.chat.truths import Truths

SLICES: Final = 2  # a loop may leave out so many messages at the start


class NotLocal(Exception):
    """Why a template is not local."""


class Locality(NamedTuple):
    """What a local template reads of messages, besides role and content."""

    read: frozenset[str]  # keys; a message that has one of them is not served
    calls: bool  # tool calls are printed call by call: names, and arguments as JSON


class Sort(Flag):
    """What an expression may hold. Nothing of this: a fact."""

    FACT = 0
    LIST = auto()  # the messages, or all but the first of them
    OWN = auto()  # the loop's message
    NEAR = auto()  # the one before or after it
    FIRST = auto()  # one of the first messages
    LOOP = auto()
    CONTENT = auto()  # of the loop's message, whole or trimmed: never blank
    FIRST_CONTENT = auto()
    CALLS = auto()  # the loop's message's
    CALL = auto()
    FUNCTION = auto()
    ARGUMENTS = auto()
    TEXT = auto()  # some of the loop's message, with other text around it: to be printed
    FIRST_TEXT = auto()


_CONTENTS = Sort.CONTENT | Sort.FIRST_CONTENT
_TEXTS = _CONTENTS | Sort.TEXT | Sort.FIRST_TEXT
_TRUE_OR_KNOWN = ~(Sort.ARGUMENTS | Sort.LOOP)  # what may be tested for truth
_TYPE_TESTS: Final = frozenset(
    ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number", "true", "false")
)
_STATEFUL: Final = frozenset(("cycler", "joiner", "random", "lipsum"))
_AROUND_FIRST: Final = {("eq", 0), ("ne", 0), ("gt", 0), ("lteq", 0), ("gteq", 1), ("lt", 1)}


def find_locality(tree: nodes.Template, variables: Mapping[str, Any]) -> Locality:
    """The locality of a template under these variables (and no tools). Raises NotLocal."""
    loop = ordered_loop(tree, Taint(tree))
    if loop is None:
        raise NotLocal("it has no single loop over the messages")
    truths = Truths(tree, {"tools": None, **variables})
    try:
        return _Analysis(tree, loop, truths, calls=True).run()
    except NotLocal:
        return _Analysis(tree, loop, truths, calls=False).run()


class _Analysis:
    def __init__(self, tree: nodes.Template, loop: nodes.For, truths: Truths, *, calls: bool) -> None:
        self._tree, self._loop, self._truths, self._calls = tree, loop, truths, calls
        self._sorts: dict[Key, Sort] = {("messages",): Sort.LIST}
        self._read: set[str] = set()
        self._in_loop = False
        self._own_counter = False  # whether `loop` is that of the loop over the messages
        self._printable = _TEXTS

    def run(self) -> Locality:
        size = -1
        while size != (size := sum(sort.value for sort in self._sorts.values())):
            self.block(self._tree.body)
        if sum(isinstance(node.arg, nodes.Slice) for node in find(self._tree, nodes.Getitem)) > SLICES:
            raise NotLocal("it leaves out messages in many places")
        return Locality(frozenset(self._read), self._calls)

    # ---- statements

    def block(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self.statement(node)

    def statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                for child in node.nodes:
                    self.only(child, self._printable)
            case nodes.If():
                self.condition(node)
            case nodes.For():
                self.loop(node)
            case nodes.Assign():
                self.assign(node)
            case nodes.CallBlock() if is_generation(node):
                self.block(node.body)
            case nodes.AssignBlock(filter=None, target=nodes.Name()) | nodes.Macro():
                printable, self._printable = self._printable, Sort.FACT
                self.block(node.body)
                self._printable = printable
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    self.put(target, self.sort(value))
                self.block(node.body)
            case nodes.Scope():
                self.block(node.body)
            case nodes.Continue():
                pass
            case _:
                raise NotLocal(f"it uses {type(node).__name__}")

    def condition(self, node: nodes.If) -> None:
        for branch in (node, *node.elif_):
            truth = self._truths.of(branch.test)
            if truth is not False:
                self.truth(branch.test)
                self.block(branch.body)
            if truth is True:
                return
        self.block(node.else_)

    def loop(self, node: nodes.For) -> None:
        outer = self._in_loop, self._own_counter, self._printable
        if node is self._loop:
            self.only(node.iter, Sort.LIST)
            self.put(node.target, Sort.OWN)
            self._in_loop = self._own_counter = True
            self._printable &= Sort.CONTENT | Sort.TEXT
        else:
            over = self.only(node.iter, Sort.CALLS)
            for name in find(node.target, nodes.Name):
                self.put(name, Sort.CALL if over else Sort.FACT)
            self._own_counter = False
        if node.test is not None:
            self.truth(node.test)
        self.block(node.body)
        self._in_loop, self._own_counter, self._printable = outer
        self.block(node.else_)

    def assign(self, node: nodes.Assign) -> None:
        match node.target:
            case nodes.Tuple(items=targets) if isinstance(node.node, nodes.Tuple):
                for target, value in zip(targets, node.node.items, strict=True):
                    self.put(target, self.sort(value))
            case nodes.NSRef() if self._in_loop:
                raise NotLocal("its loop keeps a state")
            case target:
                sort = self.sort(node.node)
                if self._in_loop and sort & Sort.LIST:
                    raise NotLocal("its loop changes the messages")
                self.put(target, sort)

    def put(self, target: nodes.Node, sort: Sort) -> None:
        key = target_key(target)
        if sort:
            if key is None or key == ("loop",):
                raise NotLocal("it takes messages apart")
            self._sorts[key] = self._sorts.get(key, Sort.FACT) | sort

    # ---- expressions

    def only(self, node: nodes.Node, allowed: Sort) -> Sort:
        """The sort of an expression that may be a fact or one of these."""
        sort = self.sort(node)
        if sort & ~allowed:
            raise NotLocal(f"it does more with {(sort & ~allowed).name} than print it")
        return sort

    def truth(self, node: nodes.Node) -> None:
        self.only(node, _TRUE_OR_KNOWN)

    def sort(self, node: nodes.Node) -> Sort:
        match node:
            case nodes.Const() | nodes.TemplateData():
                return Sort.FACT
            case nodes.Name(name="loop"):
                return Sort.LOOP if self._own_counter else Sort.FACT
            case nodes.Name():
                if node.name in _STATEFUL:
                    raise NotLocal(f"it uses {node.name}")
                return self._sorts.get((node.name,), Sort.FACT)
            case nodes.Getattr() | nodes.Getitem():
                return self.member(node)
            case nodes.Filter():
                return self.filtered(node)
            case nodes.Test():
                if node.name in _TYPE_TESTS and not node.args:
                    self.only(node.node, ~(Sort.LOOP | Sort.TEXT | Sort.FIRST_TEXT))
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
                return _joined(self.only(part, _TEXTS) for part in parts)
            case nodes.Call():
                return self.call(node)
        for child in node.iter_child_nodes():
            self.only(child, Sort.FACT)
        return Sort.FACT

    def member(self, node: nodes.Getattr | nodes.Getitem) -> Sort:
        if isinstance(node.node, nodes.Name) and isinstance(node, nodes.Getattr):
            known = self._sorts.get((node.node.name, node.attr))
            if known is not None:
                return known
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
        match owner, key:
            case ((Sort.OWN | Sort.FIRST | Sort.NEAR), "role"):
                return Sort.FACT
            case Sort.LOOP, "first" | "last":
                return Sort.FACT
            case Sort.LOOP, "previtem" | "nextitem":
                return Sort.NEAR
            case ((Sort.LOOP | Sort.NEAR), _):
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
        if node.node is None or node.name in _STATEFUL:
            raise NotLocal(f"it uses the filter {node.name}")
        sort = self.sort(node.node)
        plain = not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
        if plain and node.name == "trim" and not sort & ~_CONTENTS:
            return sort
        if plain and node.name == "tojson" and sort == Sort.ARGUMENTS:
            return Sort.TEXT
        if plain and node.name in ("length", "count") and sort == Sort.CALLS:
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
            # contents are strings that are not blank, or their kind is among the facts
            self.only(node.expr, Sort.FACT if first.expr.value not in ("", None, False, True) else _CONTENTS)
            return Sort.FACT
        for part in (node.expr, *(operand.expr for operand in node.ops)):
            self.only(part, Sort.FACT)
        return Sort.FACT

    def place(self, node: nodes.Node) -> int | None:
        """The k of `loop.index0 + k`, however it is written; None of all else."""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index") if self._own_counter:
                return int(node.attr == "index")
            case nodes.Add(right=nodes.Const(value=int(number))) | nodes.Sub(right=nodes.Const(value=int(number))):
                place = self.place(node.left)
                return None if place is None else place + (number if isinstance(node, nodes.Add) else -number)
        return None

    def call(self, node: nodes.Call) -> Sort:
        given = [*node.args, *(keyword.value for keyword in node.kwargs)]
        match node.node:
            case nodes.Getattr(node=owner, attr="strip") if not given and self.sort(owner):
                return self.only(owner, _CONTENTS)
            case nodes.Getattr(node=owner, attr="get") if given and self.sort(owner):
                return self.member(nodes.Getitem(owner, given[0], "load"))
        for child in (node.node, *given, *filter(None, (node.dyn_args, node.dyn_kwargs))):
            self.only(child, Sort.FACT)
        return Sort.FACT


def _joined(parts: Iterable[Sort]) -> Sort:
    """What texts are together."""
    found = Sort.FACT
    for part in parts:
        found |= part
    own = Sort.TEXT if found & (Sort.TEXT | Sort.CONTENT) else Sort.FACT
    return own | (Sort.FIRST_TEXT if found & (Sort.FIRST_TEXT | Sort.FIRST_CONTENT) else Sort.FACT)
