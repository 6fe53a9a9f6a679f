"""Whether a template treats messages locally: each is printed for itself, whatever the others say.

A syntax tree enters; `Locality` leaves, or `NotLocal` with the reason. In a local template, what the loop over the
messages prints for one of them is its content (and the names and arguments of its calls) between fixed texts; these
texts depend on *facts* alone: the roles of the message and its neighbours, the kinds of the first three messages,
whether it is the first or the last, its number's parity, and how many tools the row has. Tools may be printed anywhere,
as JSON. Then texts learned on one conversation hold for all others
(`stencils`). Every expression is given the sorts of values that it may hold; what is not known to be harmless is not
local. Names are not told apart by scope or order, which errs on the safe side. Costs some milliseconds per template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from jinja2 import nodes

from penstock.chat.iterators import check_iterators
from penstock.chat.loops import ordered_loop
from penstock.chat.sorts import TEXTS, NotLocal, Sort, Sorts
from penstock.chat.syntax import find, is_generation
from penstock.chat.taint import Taint
from penstock.chat.truths import Truths

SLICES: Final = 2  # a loop may leave out so many messages at the start


class Locality(NamedTuple):
    """What a local template reads of messages, besides role and content."""

    read: frozenset[str]  # keys; a message that has one of them is not served
    calls: bool  # tool calls are printed call by call: names, and arguments as JSON
    tools: bool  # the template is local for rows with tools, too


def find_locality(tree: nodes.Template, variables: Mapping[str, Any]) -> Locality:
    """The locality of a template under these variables. Raises NotLocal if it is not even local without tools."""
    loop = ordered_loop(tree, Taint(tree))
    if loop is None:
        raise NotLocal("it has no single loop over the messages")
    if any(name.name == "loop" and name.ctx != "load" for name in find(tree, nodes.Name)):
        raise NotLocal("it has another thing named loop")
    check_iterators(tree)
    truths = Truths(tree, {**variables, "tools": None})  # rows decide about tools, whatever a variable says
    try:
        found = _Analysis(tree, loop, truths, calls=True, tools=False).run()
    except NotLocal:
        found = _Analysis(tree, loop, truths, calls=False, tools=False).run()
    try:
        others = [
            _Analysis(
                tree, loop, Truths(tree, {**variables, "tools": tools}), calls=found.calls, tools=bool(tools)
            ).run()
            for tools in ([], ["some"])
        ]
    except NotLocal:
        return found
    return found._replace(tools=all(other.read <= found.read for other in others))


class _Analysis(Sorts):
    """Reads the statements."""

    def __init__(self, tree: nodes.Template, loop: nodes.For, truths: Truths, *, calls: bool, tools: bool) -> None:
        super().__init__(loop, truths, calls=calls, tools=tools)
        self._tree = tree
        self._printable = TEXTS

    def run(self) -> Locality:
        size = -1
        while size != (size := sum(sort.value for sort in self._sorts.values())):
            self._known.clear()
            self.block(self._tree.body)
        if sum(isinstance(node.arg, nodes.Slice) for node in find(self._tree, nodes.Getitem)) > SLICES:
            raise NotLocal("it leaves out messages in many places")
        return Locality(frozenset(self._read), self._calls, tools=False)

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
                outer = self._printable, self._in_loop
                self._printable = Sort.FACT
                if isinstance(node, nodes.Macro):
                    self._in_loop = True  # wherever it may be called
                    for default in node.defaults:
                        self.only(default, Sort.FACT)
                self.block(node.body)
                self._printable, self._in_loop = outer
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    self.assign(nodes.Assign(target, value))
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
            self.truth(branch.test)
            if truth is not False:
                self.block(branch.body)
            if truth is True:
                return
        self.block(node.else_)

    def loop(self, node: nodes.For) -> None:
        outer = self._in_loop, self._counter, self._printable
        if node.test is not None:
            self.truth(node.test)  # where `loop` is the loop around this one
        if node is self._loop:
            self.only(node.iter, Sort.LIST)
            self.put(node.target, Sort.OWN)
            self._in_loop, self._counter = True, Sort.LOOP
            self._printable &= Sort.CONTENT | Sort.TEXT | Sort.TOOL_TEXT
        else:
            over = self.only(node.iter, Sort.CALLS | Sort.TOOLS)
            for one in over:
                self.put(node.target, Sort.CALL if one is Sort.CALLS else Sort.TOOL)
            self._counter = Sort.INNER_LOOP
        self.block(node.body)
        self._in_loop, self._counter, self._printable = outer
        self.block(node.else_)

    def assign(self, node: nodes.Assign) -> None:
        match node.target:
            case nodes.Name() as target:
                sort = self.sort(node.node)
                if self._in_loop and sort & Sort.LIST:
                    raise NotLocal("its loop changes the messages")
                self.put(target, sort)
            case target:
                if self._in_loop and any(True for _ in find(target, nodes.NSRef)):
                    raise NotLocal("its loop keeps a state")
                self.only(node.node, Sort.FACT)

    def put(self, target: nodes.Node, sort: Sort) -> None:
        if sort:
            if not isinstance(target, nodes.Name) or target.name == "loop":
                raise NotLocal("it takes messages apart")
            self._sorts[target.name] = self._sorts.get(target.name, Sort.FACT) | sort
