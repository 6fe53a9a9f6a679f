"""Chat template source in, jinja2's own syntax tree out, exactly as transformers parses it.

White space control, comments and newlines are resolved by jinja2's lexer (trim_blocks, lstrip_blocks, newlines
normalised); `{% generation %}` is an extension tag, as in transformers. Parsing costs some milliseconds per template.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro

ENVIRONMENT_OPTIONS: Final = {"trim_blocks": True, "lstrip_blocks": True}

NodeT = TypeVar("NodeT", bound=nodes.Node)


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` prints its body; annotated templates find the marks inside it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("print_body"), [], [], body).set_lineno(line)

    def print_body(self, caller: Macro) -> str:
        return caller()


def is_generation(node: nodes.Node) -> bool:
    """Whether this is a `{% generation %}` block."""
    return (
        isinstance(node, nodes.CallBlock)
        and isinstance(node.call, nodes.Call)
        and isinstance(node.call.node, nodes.ExtensionAttribute)
    )


def find(root: nodes.Node | Iterable[nodes.Node], kind: type[NodeT]) -> Iterator[NodeT]:
    """All nodes of a kind in the tree or trees, the roots included (unlike `Node.find_all`)."""
    for node in (root,) if isinstance(root, nodes.Node) else root:
        if isinstance(node, kind):
            yield node
        yield from node.find_all(kind)


def constant_key(node: nodes.Expr) -> str | None:
    """The key of `x.key` or `x["key"]`, else None."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.arg.value
    return None


def is_text(node: nodes.Node) -> bool:
    """Whether this is a string constant."""
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def addends(node: nodes.Expr) -> list[nodes.Expr]:
    """The operands of a chain of `+`."""
    return addends(node.left) + addends(node.right) if isinstance(node, nodes.Add) else [node]


def output(*children: nodes.Expr) -> nodes.Output:
    return nodes.Output(list(children))


def text(data: str) -> nodes.TemplateData:
    return nodes.TemplateData(data)


def call_filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)
