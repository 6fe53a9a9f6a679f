"""A template's syntax tree in, the same tree with marks out: what each message prints lies between its marks.

Deleting the marks gives the plain text: marks are printed, never computed with, except where the template itself
captures what a loop prints (macros, set blocks, filter and call blocks, text built in a namespace). `captured` tells
that; the caller then compares each row with its plain text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jinja2 import nodes

from penstock.chat.loops import accumulated, exits, ordered_loop, prints
from penstock.chat.origins import Origins, message_of_loop
from penstock.chat.sandbox import NUMBER_FILTER, OPEN_FILTER, OUTSIDE_FILTER, STRING_FILTER
from penstock.chat.sentinels import Alphabet, Mark
from penstock.chat.syntax import addends, call_filter, find, is_generation, is_text, output, text
from penstock.chat.taint import Key, Taint, target_key

MARKUP_FILTERS = frozenset(("safe", "escape", "e", "forceescape", "xmlattr", "urlize", "tojson"))


@dataclass(frozen=True, slots=True)
class Annotation:
    """What the marks of an annotated tree look like."""

    captured: bool  # some marks pass through a capture: check every row against its plain text
    generations: bool  # the template has {% generation %} blocks
    numbered: bool  # some marks get their number from the message itself: messages must be numbered


def annotate(tree: nodes.Template, alphabet: Alphabet) -> Annotation:
    """Put the marks into the tree, in place."""
    annotator = _Annotator(tree, alphabet)
    tree.body = annotator.block(tree.body)
    _drop_unread(tree, annotator.shadows)
    tree.set_lineno(1)  # of the new nodes
    numbered = any(read.name == NUMBER_FILTER for read in find(tree, nodes.Filter))
    return Annotation(annotator.captured, annotator.generations, numbered)


class _Annotator:
    def __init__(self, tree: nodes.Template, alphabet: Alphabet) -> None:
        self.tree, self.alphabet = tree, alphabet
        self.taint = Taint(tree)
        self.accumulated: dict[int, list[Key]] = {
            id(loop): keys for loop in find(tree, nodes.For) if (keys := accumulated(loop, tree, self.taint))
        }
        self.origins = Origins(tree, self.taint, frozenset(key for keys in self.accumulated.values() for key in keys))
        self.ordered = ordered_loop(tree, self.taint)
        self.captured = self.generations = False
        self.shadows: list[nodes.Assign] = []
        self._depth = 0  # captures around the current node
        self._message_loops = 0  # loops over messages around it
        self._wrapped = 0  # conditions around it that were marked as a whole
        self._open = 0  # regions opened since the innermost loop began: a break or continue closes them

    def mark(self, mark: Mark) -> nodes.Expr:
        return text(self.alphabet.mark(mark))

    def block(self, body: Iterable[nodes.Node]) -> list[nodes.Node]:
        return [new for node in body for new in self.statement(node)]

    def statement(self, node: nodes.Node) -> list[nodes.Node]:
        match node:
            case nodes.Output():
                node.nodes = [new for child in node.nodes for new in self.printed(child)]
            case nodes.For():
                return self.loop(node)
            case nodes.If():
                node.body = self.branch(node.test, node.body)
                for other in node.elif_:
                    other.body = self.branch(other.test, other.body)
                node.else_ = self.block(node.else_)
            case nodes.Assign():
                shadow = self.origins.shadow_assign(node)
                self.shadows += [shadow] if shadow is not None else []
                return [node] if shadow is None else [shadow, node]
            case nodes.CallBlock() if is_generation(node):
                self.generation(node)
            case nodes.Macro() | nodes.AssignBlock() | nodes.CallBlock() | nodes.FilterBlock():
                self.capture(node)
            case nodes.With() | nodes.Scope():
                node.body = self.block(node.body)
            case nodes.Break() | nodes.Continue():
                return [*([output(*[self.mark(Mark.CLOSE)] * self._open)] if self._open else []), node]
        return [node]

    def capture(self, node: nodes.Macro | nodes.AssignBlock | nodes.CallBlock | nodes.FilterBlock) -> None:
        outer = self._depth, self._open
        self._depth, self._open = self._depth + 1, 0
        node.body = self.block(node.body)
        self._depth, self._open = outer

    def generation(self, node: nodes.Node) -> None:
        assert isinstance(node, nodes.CallBlock)
        self.generations = True
        self.captured |= self._depth > 0
        node.body = [
            output(self.mark(Mark.GENERATION)),
            *self.block(node.body),
            output(self.mark(Mark.END_GENERATION)),
        ]

    # ---- loops

    def loop(self, loop: nodes.For) -> list[nodes.Node]:
        message = message_of_loop(loop, self.taint)
        built = self.accumulated.get(id(loop), []) if message is not None else []
        marked = message is not None and (prints(loop) or bool(built))
        outer, self._open = self._open, 0
        self._message_loops += marked
        regions = marked and not built and loop is not self.ordered
        self._open += regions
        loop.body = self.block(loop.body)
        self._open = outer
        self._message_loops -= marked
        loop.else_ = self.block(loop.else_)
        if message is None or not marked:
            return [loop]
        if built:
            return self.building_loop(loop, message, built)
        self.captured |= self._depth > 0
        if loop is self.ordered:
            loop.body.insert(0, output(self.mark(Mark.NEXT)))
            return [loop, output(self.mark(Mark.END))]
        number = self.origins.number_in_loop(loop, message)
        loop.body.insert(0, output(call_filter(OPEN_FILTER, number)))
        loop.body.append(output(self.mark(Mark.CLOSE)))
        return [loop]

    def building_loop(self, loop: nodes.For, message: nodes.Expr, keys: list[Key]) -> list[nodes.Node]:
        """A loop that appends to namespace attributes: the marks are appended too."""
        self.captured = True
        if any(True for _ in exits(loop.body)):
            return [loop]
        for name, attribute in keys:
            loop.body.insert(0, _append(name, attribute, call_filter(OPEN_FILTER, self.origins.number(message))))
            loop.body.append(_append(name, attribute, nodes.Const(self.alphabet.mark(Mark.CLOSE))))
        return [loop]

    # ---- text outside of the loops

    def branch(self, test: nodes.Node, body: list[nodes.Node]) -> list[nodes.Node]:
        """`{% if messages[0].role == 'system' %}…{{ messages[0].content }}…{% endif %}` is one message's as a whole."""
        owner = self._owner_of_branch(test, body)
        if owner is None:
            return self.block(body)
        self._wrapped += 1
        self._open += 1
        inner = self.block(body)
        self._wrapped -= 1
        self._open -= 1
        return [output(call_filter(OUTSIDE_FILTER, owner)), *inner, output(self.mark(Mark.CLOSE))]

    def _owner_of_branch(self, test: nodes.Node, body: list[nodes.Node]) -> nodes.Expr | None:
        if self._depth or self._message_loops or self._wrapped:
            return None
        printed = self.origins.printed(body)
        if printed and all(other == printed[0] for other in printed) and printed[0] in self.origins.tested(test):
            return printed[0]
        return None

    def printed(self, node: nodes.Expr) -> list[nodes.Expr]:
        """What to print in place of one expression."""
        if self._depth or self._wrapped:
            return [node]
        if isinstance(node, nodes.Concat):
            return [new for child in node.nodes for new in self.printed(child)]
        if isinstance(node, nodes.Add) and self._splits(node):
            parts = [part if is_text(part) else call_filter(STRING_FILTER, part) for part in addends(node)]
            return [new for part in parts for new in self.marked(part)]
        return self.marked(node)

    def _splits(self, chain: nodes.Add) -> bool:
        """Whether a chain of + carries texts of several messages (and is a plain join of strings)."""
        parts = addends(chain)
        if not any(map(is_text, parts)) or any(f.name in MARKUP_FILTERS for f in find(chain, nodes.Filter)):
            return False
        found = [origin for part in parts if (origin := self.origins.of(part)) is not None]
        if self._message_loops:
            return any(self.origins.is_shadow(origin, outside=True) for origin in found)
        return any(other != found[0] for other in found[1:]) and any(map(self.origins.is_shadow, found))

    def marked(self, node: nodes.Expr) -> list[nodes.Expr]:
        """One expression, between marks where it carries a message's text that the loop around it does not explain."""
        origin = self.origins.of(node)
        if origin is None or (self._message_loops and not self.origins.is_shadow(origin, outside=True)):
            return [node]
        return [call_filter(OUTSIDE_FILTER, origin), node, self.mark(Mark.CLOSE)]


def _drop_unread(tree: nodes.Template, shadows: list[nodes.Assign]) -> None:
    """Take out the shadows that no mark reads, directly or through other shadows."""
    marks = [mark for mark in find(tree, nodes.Filter) if mark.name == OUTSIDE_FILTER]
    live: set[Key | None] = {target_key(read) for mark in marks for read in find(mark, nodes.Expr)}
    size = -1
    while size != len(live):
        size = len(live)
        for shadow in shadows:
            if target_key(shadow.target) in live:
                live |= {target_key(read) for read in find(shadow.node, nodes.Expr)}
    dead = {id(shadow) for shadow in shadows if target_key(shadow.target) not in live}
    for node in find(tree, nodes.Node):
        for name in ("body", "else_"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                body[:] = [child for child in body if id(child) not in dead]


def _append(name: str, attribute: str, suffix: nodes.Expr) -> nodes.Assign:
    read = nodes.Getattr(nodes.Name(name, "load"), attribute, "load")
    return nodes.Assign(nodes.NSRef(name, attribute), nodes.Concat([read, suffix]))
