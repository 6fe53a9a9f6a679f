"""An annotated jinja2 syntax tree in, template source for the fast engine out, or `NotServed` with the reason.

The source uses private delimiters, so that no text of the template can be taken for code; white space was resolved by
jinja2's lexer. What changes for speed only: attributes that a loop over messages reads several times are kept in
variables, and a printed chain of `+` with string constants is printed piece by piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from jinja2 import nodes

from penstock.chat.emit_calls import Expressions
from penstock.chat.emit_expressions import quote
from penstock.chat.emit_markup import Markup
from penstock.chat.emit_rules import DICT_ATTRIBUTES, PREFIX, REFUSE, NotServed
from penstock.chat.syntax import addends, constant_key, find, is_generation, is_text
from penstock.chat.taint import Kind, Taint, is_call_of

BLOCK_START: Final = "\ue010"
BLOCK_END: Final = "\ue011"
VARIABLE_START: Final = "\ue012"
VARIABLE_END: Final = "\ue013"
COMMENT_START: Final = "\ue014"
COMMENT_END: Final = "\ue015"
DELIMITERS: Final = frozenset((BLOCK_START, BLOCK_END, VARIABLE_START, VARIABLE_END, COMMENT_START, COMMENT_END))
KEPT_ATTRIBUTES: Final = ("role", "content")


class Emitted(NamedTuple):
    """The source, and what it refuses where it gets there."""

    source: str
    refused: tuple[str, ...]


def emit(tree: nodes.Template) -> Emitted:
    """The source of the whole template."""
    emitter = _Emitter(tree)
    emitter.body(tree.body)
    return Emitted("".join(emitter.parts), tuple(emitter.expressions.refused))


class _Emitter:
    def __init__(self, tree: nodes.Template) -> None:
        macros = {macro.name: macro for macro in find(tree, nodes.Macro)}
        if len(macros) != sum(1 for _ in find(tree, nodes.Macro)):
            raise NotServed("a macro that is defined twice")
        self.taint = Taint(tree)
        self.expressions = Expressions(self.taint, macros, Markup(tree))
        self.emit = self.expressions.emit
        self.parts: list[str] = []
        self.temporaries = 0

    def block(self, source: str) -> None:
        self.parts.append(f"{BLOCK_START} {source} {BLOCK_END}")

    def text(self, data: str) -> None:
        if not DELIMITERS.isdisjoint(data):
            raise NotServed("private-use characters in its text")
        self.parts.append(data)

    def print(self, source: str) -> None:
        self.parts.append(f"{VARIABLE_START} {source} {VARIABLE_END}")

    def temporary(self) -> str:
        self.temporaries += 1
        return f"{PREFIX}t{self.temporaries}"

    def body(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self.statement(node)

    def scoped(self, body: Iterable[nodes.Node]) -> None:
        """A body whose assignments stay inside, as in jinja2's inner frames."""
        self.block("with")
        self.body(body)
        self.block("endwith")

    def statement(self, node: nodes.Node) -> None:
        match node:
            case nodes.Output():
                for child in node.nodes:
                    self.output(child)
            case nodes.For():
                self.loop(node)
            case nodes.If():
                self.condition(node)
            case nodes.Assign():
                self.block(f"set {self.target(node.target)} = {self.assigned(node.node)}")
            case nodes.AssignBlock():
                self.assign_block(node)
            case nodes.Macro():
                self.macro(node)
            case nodes.CallBlock() if is_generation(node):
                self.scoped(node.body)
            case nodes.CallBlock():
                names = ", ".join(argument.name for argument in node.args)
                if node.defaults:
                    raise NotServed("a call block with defaults")
                self.block(f"call({names}) {self.emit(node.call)}")
                self.body(node.body)
                self.block("endcall")
            case nodes.FilterBlock():
                self.filter_block(node)
            case nodes.With():
                self.with_block(node)
            case nodes.Break():
                self.block("break")
            case nodes.Continue():
                self.block("continue")
            case _:
                raise NotServed(f"the statement {type(node).__name__}")

    def assigned(self, node: nodes.Node) -> str:
        """A value; only here may a namespace be made, which prints and loops differently."""
        return self.expressions.namespace(node) if is_call_of(node, "namespace") else self.emit(node)

    # ---- printing

    def output(self, node: nodes.Expr) -> None:
        match node:
            case nodes.TemplateData():
                self.text(node.data)
            case nodes.Const() if is_text(node):
                self.text(node.value)
            case nodes.Concat():
                for child in node.nodes:
                    self.output(child)
            case nodes.CondExpr(expr2=None):
                self.block(f"if {self.emit(node.test)}")
                self.output(node.expr1)
                self.block("endif")
            case nodes.Add() if any(map(is_text, addends(node))):
                self.chain(addends(node))
            case _:
                self.print(self.emit(node))

    def chain(self, parts: Sequence[nodes.Expr]) -> None:
        """`"a" + x + "b"`: constants as text; each other part keeps a + with a constant, and so its type check."""
        index = 0
        while index < len(parts):
            part = parts[index]
            index += 1
            if isinstance(part, nodes.Const) and is_text(part):
                self.text(part.value)
                continue
            after = ""
            while index < len(parts) and isinstance(follower := parts[index], nodes.Const) and is_text(follower):
                after += follower.value
                index += 1
            self.print(f"({self.emit(part)} + {quote(after)})")

    # ---- blocks

    def condition(self, node: nodes.If) -> None:
        self.block(f"if {self.emit(node.test)}")
        self.body(node.body)
        for other in node.elif_:
            self.block(f"elif {self.emit(other.test)}")
            self.body(other.body)
        if node.else_:
            self.block("else")
            self.body(node.else_)
        self.block("endif")

    def target(self, node: nodes.Node) -> str:
        match node:
            case nodes.Name():
                return node.name
            case nodes.NSRef():
                return f"{node.name}.{node.attr}"
            case nodes.Tuple():
                return ", ".join(map(self.target, node.items))
        raise NotServed(f"an assignment to {type(node).__name__}")

    def loop(self, node: nodes.For) -> None:
        if node.recursive:
            raise NotServed("a recursive loop")
        test = f" if {self.emit(node.test)}" if node.test is not None else ""
        self.block(f"for {self.target(node.target)} in {self.iterated(node.iter)}{test}")
        self.keep_attributes(node)
        self.body(node.body)
        self.expressions.hoisted.pop()
        if node.else_:
            self.block("else")
            self.body(node.else_)
        self.block("endfor")

    def iterated(self, node: nodes.Node) -> str:
        """What a loop runs over: never None (silently empty there); of a string the list of its characters."""
        source = self.emit(node, lazy=True)
        if self.expressions.is_list(node) or isinstance(node, nodes.Tuple) or is_call_of(node, "range"):
            return source
        if not isinstance(node, nodes.Name):
            name = self.temporary()
            self.block(f"set {name} = {source}")
            source = name
        return f"(({source} | list) if {source} is string else {source} if {source} is not none else {REFUSE})"

    def keep_attributes(self, node: nodes.For) -> None:
        """Read a message's role and content once per step, where the loop's body reads them more often."""
        if not isinstance(node.target, nodes.Name):
            self.expressions.hoisted.append(("", {}))
            return
        name = node.target.name
        kept: dict[str, str] = {}
        reassigned = any(n.name == name and n.ctx != "load" for n in find(node.body, nodes.Name))
        if self.taint.kind(node.iter) is Kind.MESSAGES and not reassigned:
            reads = Counter(filter(None, (_key_of(read, name) for read in find(node.body, nodes.Expr))))
            kept = {key: f"{PREFIX}{name}_{key}" for key in KEPT_ATTRIBUTES if reads[key] > 1}
        assert DICT_ATTRIBUTES.isdisjoint(kept)
        for key, variable in kept.items():
            self.block(f"set {variable} = {name}.{key}")
        self.expressions.hoisted.append((name, kept))

    def assign_block(self, node: nodes.AssignBlock) -> None:
        target = self.target(node.target)
        self.block(f"set {target}")
        self.scoped(node.body)
        self.block("endset")
        if node.filter is not None:
            self.block(f"set {target} = {self.emit(_innermost(node.filter, node.target))}")

    def filter_block(self, node: nodes.FilterBlock) -> None:
        name = self.temporary()
        self.block(f"set {name}")
        self.scoped(node.body)
        self.block("endset")
        self.print(self.emit(_innermost(node.filter, nodes.Name(name, "load"))))

    def macro(self, node: nodes.Macro) -> None:
        required = len(node.args) - len(node.defaults)
        defaults = [""] * required + [f"={self.emit(default)}" for default in node.defaults]
        parameters = [argument.name + default for argument, default in zip(node.args, defaults, strict=True)]
        self.block(f"macro {node.name}({', '.join(parameters)})")
        hidden, self.expressions.hoisted = self.expressions.hoisted, []
        self.body(node.body)
        self.expressions.hoisted = hidden
        self.block("endmacro")

    def with_block(self, node: nodes.With) -> None:
        names = {target.name for target in node.targets if isinstance(target, nodes.Name)}
        if any(read.name in names for value in node.values for read in find(value, nodes.Name)):
            raise NotServed("a with block that refers to its own names")
        pairs = zip(node.targets, node.values, strict=True)
        self.block("with " + ", ".join(f"{self.target(target)}={self.emit(value)}" for target, value in pairs))
        self.body(node.body)
        self.block("endwith")


def _key_of(node: nodes.Expr, name: str) -> str | None:
    """The constant key, where this reads an attribute or item of that variable."""
    if isinstance(node, nodes.Getattr | nodes.Getitem) and isinstance(node.node, nodes.Name) and node.node.name == name:
        return constant_key(node)
    return None


def _innermost(chain: nodes.Filter, operand: nodes.Expr) -> nodes.Filter:
    """A chain of filters without an operand, applied to one."""
    inner = operand if chain.node is None else _innermost_of(chain.node, operand)
    return nodes.Filter(inner, chain.name, chain.args, chain.kwargs, chain.dyn_args, chain.dyn_kwargs)


def _innermost_of(node: nodes.Expr, operand: nodes.Expr) -> nodes.Filter:
    assert isinstance(node, nodes.Filter)
    return _innermost(node, operand)
