"""Compiles a chat template to bytecode for the machine, using jinja2's own parser and scope analysis.

A template compiles exactly or not at all: a construct that the machine would not evaluate as jinja2 does raises
`NotCompiled` with a reason, and the reference renders the template. Compiling takes about 10 ms per template.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import orjson
from jinja2 import nodes
from jinja2.compiler import find_undeclared
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_PARAMETER, VAR_LOAD_RESOLVE, Symbols

from penstock.native import RenderedBatch, native
from penstock.prepare.chat.adapt import Needs
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import INVERSE_WEIGHT_KEY, MEDIA_COLUMNS, ROLES, ColumnMapping, Format
from penstock.prepare.chat.messages import RESERVED_VARIABLES
from penstock.prepare.template.bytecode import Bytecode, Label, NotCompiled
from penstock.prepare.template.expressions import FUNCTIONS, Expressions, Frame
from penstock.prepare.template.printed import used_keys

_CALLER = ("caller", "kwargs", "varargs")


class Compiler(Expressions):
    """Compiles statements; `Expressions` compiles the expressions in them."""

    def __init__(self, variables: Mapping[str, Any], strftime: Any) -> None:
        super().__init__(Bytecode(), variables, strftime)
        self._loops: list[tuple[Label, Label]] = []  # the targets of continue and break
        self._macros: list[tuple[nodes.Macro, Frame, int]] = []  # macros whose bodies have yet to be compiled

    def compile(self, tree: nodes.Template) -> Bytecode:
        if find_undeclared(tree.body, ("self",)):
            raise NotCompiled("self")
        frame = Frame(Symbols(level=0))
        frame.symbols.analyze_node(tree)
        self._enter(frame)
        self._body(tree.body, frame)
        self.code.op("HALT")
        for macro in self._macros:  # grows while it is iterated: a body may define macros
            self._macro_body(*macro)
        return self.code

    # ---- scopes, as jinja2's own compiler enters and leaves them

    def _enter(self, frame: Frame) -> None:
        for target, (action, name) in frame.symbols.loads.items():
            if action == VAR_LOAD_PARAMETER:
                continue
            if action == VAR_LOAD_RESOLVE:
                assert name is not None
                self._resolve(name)
                self.code.variable("STORE", target)
            elif action == VAR_LOAD_ALIAS:
                assert name is not None
                self.code.variable("LOAD", name)
                self.code.variable("STORE", target)
            else:
                self.code.variable("CLEAR", target)

    def _leave(self, frame: Frame) -> None:
        for target in frame.symbols.loads:
            self.code.variable("CLEAR", target)

    def _resolve(self, name: str) -> None:
        """Push a name that the template does not define: the row's variable, the recipe's, a function or undefined."""
        if name in ("messages", "tools"):
            self.code.op(name.upper())
            return
        if name == "self":
            raise NotCompiled("self")
        value: Any = ...
        if name in self.variables:
            value = self.variables[name]
        elif name in FUNCTIONS:
            value = frozenset((name,))
        self.code.op("VARIABLE", self.code.constant(name), self.code.constant(value))

    # ---- statements

    def _body(self, statements: Sequence[nodes.Node], frame: Frame) -> None:
        for node in statements:
            match node:
                case nodes.Output():
                    for child in node.nodes:
                        self._print(child, frame)
                case nodes.If():
                    self._if(node, frame)
                case nodes.For():
                    self._for(node, frame)
                case nodes.Assign():
                    self.expression(node.node, frame)
                    self._assign(node.target, frame)
                case nodes.AssignBlock():
                    block = self._capture(node, frame)
                    if node.filter is not None:
                        self._filter_chain(node.filter, block)
                    self._assign(node.target, frame)
                    self._leave(block)
                case nodes.FilterBlock():
                    block = self._capture(node, frame)
                    self._filter_chain(node.filter, block)
                    self.code.op("PRINT_BLOCK")  # unlike an expression, it does not claim its text for one message
                    self._leave(block)
                case nodes.CallBlock():
                    self._generation(node, frame)
                case nodes.Macro():
                    self._macro(node, frame)
                case nodes.Break() | nodes.Continue():
                    if not self._loops:
                        raise NotCompiled("break or continue outside a loop")
                    self.code.jump(self._loops[-1][isinstance(node, nodes.Break)])
                case nodes.ExprStmt():
                    self.expression(node.node, frame)
                    self.code.op("POP")
                case _:
                    raise NotCompiled(f"the statement {type(node).__name__}")

    def _print(self, node: nodes.Node, frame: Frame) -> None:
        match node:
            case nodes.TemplateData() | nodes.Const(value=str()):
                text = node.data if isinstance(node, nodes.TemplateData) else node.value
                if text:
                    self.code.op("PRINT_CONST", self.code.constant(text))
            case nodes.Add():
                self.code.op("PRINT_SUM", self.operands(node, frame))
            case nodes.Concat():
                for part in node.nodes:
                    self.expression(part, frame)
                self.code.op("PRINT_CONCAT", len(node.nodes))
            case nodes.Filter(name="tojson"):
                self.code.op("PRINT_JSON", self.filter_arguments(node, frame))
            case nodes.CondExpr():
                other, end = Label(), Label()
                self.condition(node.test, frame, other)
                self._print(node.expr1, frame)
                self.code.jump(end)
                self.code.mark(other)
                if node.expr2 is not None:
                    self._print(node.expr2, frame)
                self.code.mark(end)
            case nodes.Call(node=nodes.Name(name=name)) if name not in FUNCTIONS:
                self.call(node, frame, "CALL_PRINT")
            case _:
                self.expression(node, frame)
                self.code.op("PRINT")

    def _if(self, node: nodes.If, frame: Frame) -> None:
        end = Label()
        for branch in (node, *node.elif_):
            other = Label()
            self.condition(branch.test, frame, other)
            self._body(branch.body, frame)
            self.code.jump(end)
            self.code.mark(other)
        self._body(node.else_, frame)
        self.code.mark(end)

    def _assign(self, target: nodes.Node, frame: Frame) -> None:
        """Pop the value on the stack into a target."""
        match target:
            case nodes.Name():
                self.code.variable("STORE", frame.symbols.ref(target.name))
            case nodes.Tuple():
                self.code.op("UNPACK", len(target.items))
                for item in target.items:
                    self._assign(item, frame)
            case nodes.NSRef():
                self.attribute_bits(target.attr)
                self.code.variable("LOAD", frame.symbols.ref(target.name))
                self.code.op("SET_ATTRIBUTE", self.code.constant(target.attr))
            case _:
                raise NotCompiled(f"an assignment to {type(target).__name__}")

    def _capture(self, node: nodes.AssignBlock | nodes.FilterBlock, frame: Frame) -> Frame:
        block = frame.inner()
        block.symbols.analyze_node(node)
        self._enter(block)
        self.code.op("CAPTURE")
        self._body(node.body, block)
        self.code.op("CAPTURE_END")
        return block

    def _filter_chain(self, node: nodes.Filter, frame: Frame) -> None:
        """Apply nested filters to the value on the stack."""
        if node.node is not None:
            assert isinstance(node.node, nodes.Filter)
            self._filter_chain(node.node, frame)
        self.filter(node, frame, pushed=True)

    def _generation(self, node: nodes.CallBlock, frame: Frame) -> None:
        if not isinstance(node.call.node, nodes.ExtensionAttribute):
            raise NotCompiled("a call block")
        if find_undeclared(node.body, _CALLER):
            raise NotCompiled("caller, kwargs or varargs")
        block = frame.inner()
        block.symbols.analyze_node(node)
        self._enter(block)
        self.code.op("GENERATION")
        loops, self._loops = self._loops, []  # jinja2 compiles the block to a function, which break can't leave
        self._body(node.body, block)
        self._loops = loops
        self.code.op("GENERATION_END")
        self._leave(block)

    # ---- loops

    def _for(self, node: nodes.For, frame: Frame) -> None:
        if node.recursive or node.else_:
            raise NotCompiled("a recursive loop" if node.recursive else "a loop with else")
        inner = frame.inner()
        has_variable = bool(find_undeclared(node.iter_child_nodes(only=("body",)), ("loop",)))
        variable = inner.symbols.declare_parameter("loop") if has_variable else None
        inner.symbols.analyze_node(node, for_branch="body")
        self.expression(node.iter, frame)
        if node.test is not None:
            self._loop_filter(node, frame, inner)
        again, end = Label(), Label()
        self.code.op("LOOP_BEGIN")
        if variable is not None:
            self.code.variable("LOOP", variable)
        self.code.mark(again)
        self.code.jump(end, "LOOP_NEXT")
        self._assign(node.target, inner)
        self._enter(inner)
        self._loops.append((again, end))
        self._body(node.body, inner)
        self._loops.pop()
        self.code.jump(again)
        self.code.mark(end)
        self.code.op("LOOP_END")
        self._leave(inner)

    def _loop_filter(self, node: nodes.For, frame: Frame, inner: Frame) -> None:
        """Filter all items before the loop starts, whereas jinja2 filters them lazily."""
        assert node.test is not None
        if any(isinstance(call.node, nodes.Name) for call in node.test.find_all(nodes.Call)):
            raise NotCompiled("a call in a loop's filter")
        test = frame.inner()
        test.symbols.analyze_node(node, for_branch="test")
        again, end = Label(), Label()
        self._enter(test)
        self.code.op("LOOP_BEGIN")
        if any(map(_may_change_namespaces, node.body)):
            self.code.op("FILTER_BEGIN")  # gives up where the filter reads a namespace
        self.code.mark(again)
        self.code.jump(end, "LOOP_NEXT")
        self._assign(node.target, inner)
        self.expression(node.test, test)
        self.code.op("FILTER_KEEP")
        self.code.jump(again)
        self.code.mark(end)
        self.code.op("FILTER_END")

    # ---- macros

    def _macro(self, node: nodes.Macro, frame: Frame) -> None:
        if find_undeclared(node.body, _CALLER):
            raise NotCompiled("caller, kwargs or varargs")
        if len(self.code.scopes) > 1:
            raise NotCompiled("a macro in a macro")
        number = len(self.code.macros)
        self.code.macros.append((0, 0, 0, ()))
        self._macros.append((node, frame, number))
        self.code.push(frozenset((number,)))
        self.code.variable("STORE", frame.symbols.ref(node.name))

    def _macro_body(self, node: nodes.Macro, outer: Frame, number: int) -> None:
        frame = outer.inner()
        frame.symbols.analyze_node(node)
        self.code.enter_macro(frame.symbols.level)
        entry = len(self.code.code)
        for argument in node.args:  # arguments take the first slots
            self.code.slot(frame.symbols.ref(argument.name))
        self._enter(frame)
        for index, argument in enumerate(node.args):
            reference, given = frame.symbols.ref(argument.name), Label()
            self.code.branch("ARGUMENT", given, self.code.slot(reference))
            at = index - len(node.args)
            if -at <= len(node.defaults):
                if find_undeclared([node.defaults[at]], [later.name for later in node.args[index:]]):
                    raise NotCompiled("a macro's default that reads a later argument")
                self.expression(node.defaults[at], frame)
                self.code.variable("STORE", reference)
            else:
                self.code.variable("CLEAR", reference)
            self.code.mark(given)
        self._body(node.body, frame)
        self.code.op("RETURN")
        slots = self.code.leave_macro()
        self.code.macros[number] = (entry, len(node.args), slots, tuple(argument.name for argument in node.args))


def _may_change_namespaces(node: nodes.Node) -> bool:
    """Whether a statement sets an attribute, or calls a macro that might."""
    calls = (call.node for call in node.find_all(nodes.Call))
    called = (callee.name for callee in calls if isinstance(callee, nodes.Name))
    return node.find(nodes.NSRef) is not None or any(name not in FUNCTIONS for name in called)


# ---- compiled templates


class Reading(IntEnum):
    """How the machine reads a row."""

    CONVERSATION = 0  # read in Python before
    MESSAGES = 1
    ANSWER = 2  # a prompt and its answer in columns


_READINGS = {
    Format.MESSAGES: Reading.MESSAGES,
    Format.SHAREGPT: Reading.MESSAGES,
    Format.ALPACA: Reading.ANSWER,
    Format.QUERY_RESPONSE: Reading.ANSWER,
}
_COLUMNS = ("messages", "tools", "system", "variables", "query", "input", "response", "history")


class CompiledTemplate:
    """One template and one way to read rows: raw, or as conversations that were read in Python.

    Raises `NotCompiled` if the machine can't render the template exactly. A row is rendered exactly or given up, with a
    reason; the reference then renders it.
    """

    def __init__(
        self,
        tree: nodes.Template,
        variables: Mapping[str, Any],
        date: datetime.date,
        layout: Mapping[str, Any],
    ) -> None:
        if native is None:
            raise NotCompiled("Penstock was installed without a compiler")
        now = datetime.datetime(date.year, date.month, date.day)
        assembled = Compiler(variables, now.strftime).compile(tree).assemble()
        try:
            self._program = native.Program(*assembled, {**layout, "used_keys": used_keys(tree)})
        except ValueError as error:
            raise NotCompiled(str(error)) from None

    def render(self, rows: list[bytes]) -> RenderedBatch:
        """Render rows, or conversations serialized by `encoded`."""
        return RenderedBatch(*self._program.render(rows))

    def render_turns(self, rows: list[bytes]) -> RenderedBatch:
        """Render rows, and also every assistant turn as inference sees it."""
        return RenderedBatch(*self._program.render_turns(rows))

    def forget(self) -> None:
        """Mark every branch as not taken yet."""
        self._program.forget()

    @property
    def paths(self) -> tuple[int, int]:
        """How many branch directions of the template have been taken, and how many there are."""
        return self._program.branches()


def encoded(conversation: Conversation) -> bytes | None:
    """Serializes a conversation for a machine with `conversation_layout`; None if JSON can't represent it."""
    try:
        return orjson.dumps(
            {
                "messages": conversation.messages,
                "tools": conversation.tools,
                "variables": conversation.variables,
            }
        )
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return None


def can_read(mapping: ColumnMapping) -> bool:
    """Whether the machine can read rows of this format."""
    return mapping.format in _READINGS


def row_layout(mapping: ColumnMapping, needs: Needs, needles: Sequence[str]) -> dict[str, Any]:
    """The layout of raw rows: how a mapping reads them, and what the template needs."""
    columns = dict(mapping.columns)
    return {
        **_layout(_READINGS[mapping.format], needs, needles),
        **{name: columns.get(name, "") for name in _COLUMNS},
        "near": list(mapping.near_columns),
        "media": [name for name in MEDIA_COLUMNS if name not in columns.values()],
        "role_key": mapping.role_key or "role",
        "content_key": mapping.content_key or "content",
        "weight_keys": list(mapping.weight_keys),
        "roles": dict(mapping.roles) or dict(ROLES),
    }


def conversation_layout(needles: Sequence[str]) -> dict[str, Any]:
    """The layout of conversations that were read and adapted in Python."""
    return {
        **_layout(Reading.CONVERSATION, Needs(), needles),
        **dict.fromkeys(_COLUMNS, ""),
        "near": [],
        "media": [],
        "role_key": "role",
        "content_key": "content",
        "weight_keys": [],
        "roles": {},
    }


def _layout(reading: Reading, needs: Needs, needles: Sequence[str]) -> dict[str, Any]:
    wanted = ("text_for_null", "text_for_missing", "no_part", "no_parts", "no_text")
    flags = (
        *("object_arguments", "string_arguments", "wrapped_calls", "typed_calls"),
        *("no_empty_calls", "null_with_calls", "wrapped_tools", "bare_tools"),
    )
    return {
        "reading": int(reading),
        "inverse_weight_key": INVERSE_WEIGHT_KEY,
        "needles": list(needles),
        "used_keys": {},  # the template decides them
        "reserved": list(RESERVED_VARIABLES),
        **{name: sorted(getattr(needs, name)) for name in wanted},
        **{name: getattr(needs, name) for name in flags},
    }
