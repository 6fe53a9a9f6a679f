"""Which loops of a template print the messages, and how.

A syntax tree and its taint enter; out come the loops that build text in namespace attributes instead of printing it,
and the one *ordered* loop, if there is one: it runs once, over the messages or a tail of them, in order, to its end.
An ordered loop needs no numbers in its marks: counting them is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2 import nodes

from penstock.chat.origins import message_of_loop
from penstock.chat.syntax import find
from penstock.chat.taint import Key, Kind, Taint, target_key

CAPTURES = (nodes.Macro, nodes.AssignBlock, nodes.CallBlock, nodes.FilterBlock)


def prints(loop: nodes.For) -> bool:
    return next(find(loop.body, nodes.Output), None) is not None


def exits(body: Iterable[nodes.Node]) -> Iterator[nodes.Break | nodes.Continue]:
    """The breaks and continues of the loop with this body, not those of loops inside it."""
    for node in body:
        if isinstance(node, nodes.Break | nodes.Continue):
            yield node
        elif not isinstance(node, nodes.For):
            yield from exits(node.iter_child_nodes())


def accumulated(loop: nodes.For, tree: nodes.Template, taint: Taint) -> list[Key]:
    """The namespace attributes that a silent loop over messages appends to (`ns.out = ns.out ~ …`) and prints later."""
    if message_of_loop(loop, taint) is None or any(map(_prints_text, find(loop.body, nodes.Output))):
        return []
    if not any(constant.value == "assistant" for constant in find(loop.body, nodes.Const)):
        return []  # builds something else than the conversation
    appended = {key for assign in find(loop.body, nodes.Assign) if (key := _appends_to(assign))}
    printed = {target_key(child) for output in find(tree, nodes.Output) for child in output.nodes}
    return sorted(appended & printed)


def _prints_text(output: nodes.Output) -> bool:
    """Whether more than white space and macros (called for their effect) is printed."""
    return not all(
        isinstance(child, nodes.Call) or (isinstance(child, nodes.TemplateData) and not child.data.strip())
        for child in output.nodes
    )


def _appends_to(assign: nodes.Assign) -> Key | None:
    if not isinstance(assign.target, nodes.NSRef) or not isinstance(assign.node, nodes.Concat | nodes.Add):
        return None
    first: nodes.Expr = assign.node
    while isinstance(first, nodes.Concat | nodes.Add):
        first = first.nodes[0] if isinstance(first, nodes.Concat) else first.left
    key = target_key(assign.target)
    return key if key == target_key(first) else None


def ordered_loop(tree: nodes.Template, taint: Taint) -> nodes.For | None:
    """The one loop that prints messages, if it prints a tail of them once and in order."""
    loops = [
        loop
        for loop in find(tree, nodes.For)
        if taint.kind(loop.iter) in (Kind.MESSAGES, Kind.RANGE, Kind.GROUPS) and prints(loop)
    ]
    if len(loops) != 1:
        return None
    (loop,) = loops
    certain = (
        taint.kind(loop.iter) is Kind.MESSAGES
        and isinstance(loop.target, nodes.Name)
        and loop.test is None
        and not loop.recursive
        and not any(isinstance(node, nodes.Break) for node in exits(loop.body))
        and _runs_once(loop, tree.body)
        and _is_tail(loop.iter, tree, ())
    )
    return loop if certain else None


def _runs_once(loop: nodes.For, body: Iterable[nodes.Node]) -> bool:
    """Whether the loop is reached without passing through another loop or a capture."""
    for node in body:
        if node is loop:
            return True
        if not isinstance(node, (*CAPTURES, nodes.For)) and _runs_once(loop, node.iter_child_nodes()):
            return True
    return False


def _is_tail(node: nodes.Node, tree: nodes.Template, visited: tuple[str, ...]) -> bool:
    """Whether an expression is always `messages[n:]` for some n."""
    match node:
        case nodes.Name():
            if node.name in visited:
                return True
            stores = [name for name in find(tree, nodes.Name) if name.name == node.name and name.ctx != "load"]
            assigns = [assign for assign in find(tree, nodes.Assign) if any(assign.target is name for name in stores)]
            if len(assigns) != len(stores) or (node.name != "messages" and not assigns):
                return False
            return all(_is_tail(assign.node, tree, (*visited, node.name)) for assign in assigns)
        case nodes.Getitem(arg=nodes.Slice(stop=None, step=None)):
            return _is_tail(node.node, tree, visited)
        case nodes.CondExpr() if node.expr2 is not None:
            return _is_tail(node.expr1, tree, visited) and _is_tail(node.expr2, tree, visited)
    return False
