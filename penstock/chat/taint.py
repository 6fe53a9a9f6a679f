"""Which names of a template hold the messages, one message, or a range over their numbers.

A syntax tree enters; `Taint.kind(expression)` answers. Followed through aliases, slices, filters, namespaces, `with`,
macro arguments and `range(messages | length)`. Names are not told apart by scope or by order: a name that holds a
message anywhere counts as one everywhere. That is safe: values tell by themselves whether they are numbered messages.
"""

from __future__ import annotations

from enum import Enum, auto

from jinja2 import nodes

from penstock.chat.syntax import find

LIST_FILTERS = frozenset(("selectattr", "rejectattr", "select", "reject", "list", "reverse", "sort", "unique"))
LENGTH_FILTERS = frozenset(("length", "count"))


class Kind(Enum):
    MESSAGES = auto()
    MESSAGE = auto()
    GROUPS = auto()  # a list of lists of messages
    LENGTH = auto()  # how many messages
    RANGE = auto()  # message numbers
    NUMBER = auto()


ELEMENT = {Kind.MESSAGES: Kind.MESSAGE, Kind.GROUPS: Kind.MESSAGES, Kind.RANGE: Kind.NUMBER}

Key = tuple[str, ...]  # (name,) of a variable, (name, attribute) of a namespace's attribute


def target_key(target: nodes.Node) -> Key | None:
    """The key of what is assigned to or read: a variable or a namespace's attribute."""
    match target:
        case nodes.Name():
            return (target.name,)
        case nodes.NSRef():
            return (target.name, target.attr)
        case nodes.Getattr(node=nodes.Name(name=owner)):
            return (owner, target.attr)
    return None


class Taint:
    """The kinds of all names in one syntax tree."""

    def __init__(self, tree: nodes.Template) -> None:
        self._kinds: dict[Key, Kind] = {("messages",): Kind.MESSAGES}
        self._macros = {macro.name: macro for macro in find(tree, nodes.Macro)}
        sources = (*find(tree, nodes.Assign), *find(tree, nodes.For), *find(tree, nodes.Call), *find(tree, nodes.With))
        known = 0
        while known != len(self._kinds):
            known = len(self._kinds)
            for node in sources:
                self._learn(node)

    def _put(self, target: nodes.Node, kind: Kind | None) -> None:
        key = target_key(target)
        if key is not None and kind is not None:
            self._kinds.setdefault(key, kind)

    def _learn(self, node: nodes.Node) -> None:
        match node:
            case nodes.Assign(target=nodes.Tuple(items=targets), node=nodes.Tuple(items=values)):
                for target, value in zip(targets, values, strict=False):
                    self._put(target, self.kind(value))
            case nodes.Assign():
                self._put(node.target, self.kind(node.node))
                if isinstance(node.target, nodes.Name) and is_call_of(node.node, "namespace"):
                    for keyword in node.node.find_all(nodes.Keyword):
                        self._put(nodes.NSRef(node.target.name, keyword.key), self.kind(keyword.value))
            case nodes.For():
                kind = self.kind(node.iter)
                self._put(node.target, ELEMENT.get(kind) if kind else None)
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=False):
                    self._put(target, self.kind(value))
            case nodes.Call(node=nodes.Name(name=macro)) if macro in self._macros:
                for parameter, value in zip(self._macros[macro].args, node.args, strict=False):
                    self._put(parameter, self.kind(value))
                for keyword in node.kwargs:
                    self._put(nodes.Name(keyword.key, "param"), self.kind(keyword.value))

    def kind(self, node: nodes.Node | None) -> Kind | None:
        """What an expression holds, as far as the messages are concerned."""
        match node:
            case nodes.Name():
                return self._kinds.get((node.name,))
            case nodes.Getattr(node=nodes.Name(name="loop"), attr="previtem" | "nextitem"):
                return Kind.MESSAGE
            case nodes.Getattr(node=nodes.Name(name=owner)):
                return self._kinds.get((owner, node.attr))
            case nodes.Getitem():
                kind = self.kind(node.node)
                if kind is None or kind not in ELEMENT:
                    return None
                return kind if isinstance(node.arg, nodes.Slice) else ELEMENT[kind]
            case nodes.Filter():
                return self._filtered(node)
            case nodes.Add():
                return self._either(node.left, node.right, lists_only=True)
            case nodes.Or() | nodes.And():
                return self._either(node.left, node.right)
            case nodes.CondExpr():
                return self._either(node.expr1, node.expr2)
            case nodes.List():
                kinds = {self.kind(item) for item in node.items}
                if Kind.MESSAGE in kinds:
                    return Kind.MESSAGES
                return Kind.GROUPS if Kind.MESSAGES in kinds else None
            case nodes.Call() if is_call_of(node, "range"):
                return Kind.RANGE if self._counts_messages(node) else None
        return None

    def _filtered(self, node: nodes.Filter) -> Kind | None:
        kind = self.kind(node.node)
        if kind is Kind.MESSAGES and node.name in LENGTH_FILTERS:
            return Kind.LENGTH
        if kind in (Kind.MESSAGES, Kind.GROUPS):
            if node.name in LIST_FILTERS:
                return kind
            if node.name in ("first", "last"):
                return ELEMENT[kind]
        return None

    def _either(self, left: nodes.Node, right: nodes.Node | None, lists_only: bool = False) -> Kind | None:
        for side in (left, right):
            kind = self.kind(side)
            if kind is not None and (not lists_only or kind in (Kind.MESSAGES, Kind.GROUPS)):
                return kind
        return None

    def _counts_messages(self, call: nodes.Call) -> bool:
        parts = (*find(call, nodes.Filter), *find(call, nodes.Name))
        return any(self.kind(part) is Kind.LENGTH for part in parts)


def is_call_of(node: nodes.Node, name: str) -> bool:
    """Whether this calls the global function of that name."""
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == name
