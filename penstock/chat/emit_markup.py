"""Which `| safe` filters of a template have no effect on its text.

`safe` makes a string whose `+` escapes the other operand. Where such a string is only printed, joined with `~`,
tested or compared, it prints like any other; those filters the fast engine may ignore.
"""

from __future__ import annotations

from jinja2 import nodes

from penstock.chat.syntax import find

KEEPING_FILTERS = frozenset(("string", "default", "d"))


class Markup:
    """The uses of every expression in one syntax tree."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._parents = {id(child): node for node in find(tree, nodes.Node) for child in node.iter_child_nodes()}

    def is_harmless(self, node: nodes.Node, names: frozenset[str] = frozenset()) -> bool:
        """Whether it makes no difference that this expression gives a safe string."""
        parent = self._parents.get(id(node))
        match parent:
            case (
                nodes.Output()
                | nodes.Concat()
                | nodes.Test()
                | nodes.Compare()
                | nodes.Operand()
                | nodes.Not()
                | nodes.If()
            ):
                return True
            case nodes.CondExpr():
                return parent.test is node or self.is_harmless(parent, names)
            case nodes.Filter():
                return parent.name in KEEPING_FILTERS and self.is_harmless(parent, names)
            case nodes.Assign(target=nodes.Name(name=name)):
                if name in names:
                    return True
                reads = [read for read in find(self._tree, nodes.Name) if read.name == name and read.ctx == "load"]
                return all(self.is_harmless(read, names | {name}) for read in reads)
        return False
