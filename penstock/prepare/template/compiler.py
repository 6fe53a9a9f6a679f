"""Compiles a chat template to bytecode for the machine, using jinja2's own parser and scope analysis.

A construct that the machine would not evaluate as jinja2 does raises `NotCompiled` with a reason. It is compiled to an
operation that gives up: the reference renders the rows that reach it. Compiling takes about 10 ms per template.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final

import orjson
from jinja2 import nodes
from jinja2.compiler import find_undeclared
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_PARAMETER, VAR_LOAD_RESOLVE, Symbols

from penstock.native import RenderedBatch, native
from penstock.prepare.chat.adapt import Needs
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import INVERSE_WEIGHT_KEY, MEDIA_COLUMNS, ROLES, ColumnMapping, Format
from penstock.prepare.chat.messages import RESERVED_VARIABLES
from penstock.prepare.template.bytecode import Bytecode, Function, Label, NotCompiled, Takes
from penstock.prepare.template.delegated import Delegate
from penstock.prepare.template.expressions import Expressions
from penstock.prepare.template.names import FUNCTIONS, Frame, calls, calls_value, defines_macros, looks_ahead
from penstock.prepare.template.printed import used_keys
from penstock.prepare.template.sandbox import is_generation

_TAKES = {"caller": Takes.CALLER, "kwargs": Takes.KWARGS, "varargs": Takes.VARARGS}


class Compiler(Expressions):
    """Compiles statements; `Expressions` compiles the expressions in them."""

    def __init__(self, variables: Mapping[str, Any], strftime: Any) -> None:
        super().__init__(Bytecode(), variables, strftime)
        self._loops: list[tuple[Label, Label]] = []  # the targets of continue and break

    def compile(self, tree: nodes.Template) -> Bytecode:
        frame = Frame(Symbols(level=0))
        if find_undeclared(tree.body, ("self",)):
            frame.symbols.declare_parameter("self")
        frame.symbols.analyze_node(tree)
        self._enter(frame)
        self._body(tree.body, frame)
        self.code.op("HALT")
        for number, function in enumerate(self.code.functions):  # grows: a body may define macros
            self.code.enter(number)
            self._loops = []
            if isinstance(function.node, nodes.For):
                self._recursive_body(function.node, function)
            else:
                self._macro_body(function.node, function)
            self.code.op("RETURN")
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
        for target, (action, _) in frame.symbols.loads.items():
            self.code.variable("CLEAR", target)
            if action == VAR_LOAD_PARAMETER:
                self.code.scopes[-1].ended.add(target)

    def _resolve(self, name: str) -> None:
        """Push a name that the template does not define: the row's variable, the recipe's, a function or undefined."""
        if name in ("messages", "tools"):
            self.code.op(name.upper())
            return
        value: Any = ...
        if name in self.variables:
            value = self.variables[name]
        elif name in FUNCTIONS:
            value = frozenset((name,))
        self.code.op("VARIABLE", self.code.constant(name), self.code.constant(value))

    # ---- statements

    def _body(self, statements: Sequence[nodes.Node], frame: Frame) -> None:
        """Compile statements. One that can't be compiled costs the rows that reach it."""
        for node in statements:
            begun = self.code.position
            try:
                self._statement(node, frame)
            except NotCompiled as reason:
                self.code.give_up(begun, reason)

    def _statement(self, node: nodes.Node, frame: Frame) -> None:
        """Compile a statement. Whatever contains `break` or `continue` must not fail after they are compiled."""
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
            case nodes.With():
                self._with(node, frame)
            case nodes.CallBlock():
                if is_generation(node):
                    self._generation(node, frame)
                else:
                    self.call(node.call, frame, "CALL_BLOCK", self.code.define(node, frame))
            case nodes.Macro():
                self.code.op("MACRO", self.code.define(node, frame))
                self.code.variable("STORE", frame.symbols.ref(node.name))
            case nodes.Break() | nodes.Continue():
                if not self._loops:
                    raise NotCompiled("break or continue outside a loop")
                self.code.jump(self._loops[-1][isinstance(node, nodes.Break)])
            case nodes.ExprStmt():
                self.expression(node.node, frame)
                self.code.op("POP")
            case nodes.Scope():
                raise NotCompiled("autoescape")
            case _:
                raise NotCompiled(f"the statement {type(node).__name__.lower()}")

    def _print(self, node: nodes.Node, frame: Frame) -> None:
        begun = self.code.position
        try:
            self._output(node, frame)
        except NotCompiled as reason:
            self.code.give_up(begun, reason)

    def _output(self, node: nodes.Node, frame: Frame) -> None:
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
            case nodes.Filter(name="tojson", node=nodes.Expr() as value):
                self.expression(value, frame)
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
            case nodes.Call() if calls_value(node, frame):
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
            case nodes.NSRef() if not target.attr.startswith("_"):
                self.code.load(frame.symbols.ref(target.name))
                self.code.op("SET_ATTRIBUTE", self.code.constant(target.attr))
            case _:
                self.code.give_up(self.code.position, NotCompiled(f"an assignment to {type(target).__name__}"))
                self.code.op("POP")

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
        begun = self.code.position
        try:
            self.filter(node, frame, pushed=True)
        except NotCompiled as reason:
            self.code.give_up(begun, reason)

    def _with(self, node: nodes.With, frame: Frame) -> None:
        inner = frame.inner()
        inner.symbols.analyze_node(node)
        self._enter(inner)
        for target, value in zip(node.targets, node.values, strict=True):
            self.expression(value, frame)
            self._assign(target, inner)
        self._body(node.body, inner)
        self._leave(inner)

    def _generation(self, node: nodes.CallBlock, frame: Frame) -> None:
        if find_undeclared(node.body, _TAKES):
            raise NotCompiled("caller, kwargs or varargs in a generation block")
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
        if node.recursive:  # jinja2 compiles it to a function, which `loop(…)` calls again
            self.code.op("MACRO", self.code.define(node, frame))
            self.expression(node.iter, frame)
            self.code.op("CALL_BLOCK", 1, 0, self.code.constant([]), 0)
        else:
            self.expression(node.iter, frame)
            self._loop(node, frame)

    def _recursive_body(self, node: nodes.For, function: Function) -> None:
        function.arguments = ("items",)
        self.code.op("LOAD_LOCAL", function.scopes[-1].slots.setdefault("items", 0))
        self._loop(node, function.frame)

    def _loop(self, node: nodes.For, frame: Frame) -> None:
        """Run a loop over the value on the stack."""
        inner = frame.inner()
        has_variable = node.recursive or bool(find_undeclared(node.iter_child_nodes(only=("body",)), ("loop",)))
        variable = inner.symbols.declare_parameter("loop") if has_variable else None
        inner.symbols.analyze_node(node, for_branch="body")
        eager = node.test is not None and (node.recursive or looks_ahead(node) or defines_macros(node))
        if eager:
            self._loop_filter(node, frame, inner)
        again, end = Label(), Label()
        self.code.op("LOOP_BEGIN")
        if node.recursive:
            self.code.op("LOOP_RECURSIVE")
        if variable is not None:
            self.code.variable("LOOP", variable)
        self.code.mark(again)
        self.code.jump(end, "LOOP_NEXT" if node.test is None or eager else "LOOP_TAKE")
        self._assign(node.target, inner)
        if node.test is not None and not eager:
            test = frame.inner()
            test.symbols.analyze_node(node, for_branch="test")
            self._enter(test)
            self.condition(node.test, test, again)
            self.code.op("LOOP_ACCEPT")
        self._enter(inner)
        self._loops.append((again, end))
        self._body(node.body, inner)
        self._loops.pop()
        if node.else_:
            self.code.op("LOOP_DONE")  # not reached by `break` and `continue`, as in jinja2
        self.code.jump(again)
        self.code.mark(end)
        self.code.op("LOOP_ELSE" if node.else_ else "LOOP_END")
        self._leave(inner)
        if node.else_:
            self._else(node, frame)

    def _else(self, node: nodes.For, frame: Frame) -> None:
        end = Label()
        self.code.branch("JUMP_FALSE", end)
        inner = frame.inner()
        inner.symbols.analyze_node(node, for_branch="else")
        self._enter(inner)
        self._body(node.else_, inner)
        self._leave(inner)
        self.code.mark(end)

    def _loop_filter(self, node: nodes.For, frame: Frame, inner: Frame) -> None:
        """Filter all items before the loop starts: `loop.last` and others look ahead. jinja2 filters them lazily."""
        assert node.test is not None
        test = frame.inner()
        test.symbols.analyze_node(node, for_branch="test")
        again, end = Label(), Label()
        self._enter(test)
        self.code.op("LOOP_BEGIN")
        if calls(node.test) or any(body.find(nodes.NSRef) or calls(body) for body in node.body):
            self.code.op("FILTER_BEGIN")  # gives up where the filter reads or changes a namespace
        self.code.mark(again)
        self.code.jump(end, "LOOP_NEXT")
        self._assign(node.target, inner)
        self.expression(node.test, test)
        self.code.op("FILTER_KEEP")
        self.code.jump(again)
        self.code.mark(end)
        self.code.op("FILTER_END")

    # ---- macros

    def _macro_body(self, node: nodes.Macro | nodes.CallBlock, function: Function) -> None:
        frame = function.frame.inner()
        frame.symbols.analyze_node(node)
        if any(argument.name == "caller" for argument in node.args):
            self.code.give_up(self.code.position, NotCompiled("a parameter with the name caller"))
        function.arguments = tuple(argument.name for argument in node.args)
        for name in function.arguments:  # they take the first slots
            self.code.slot(frame.symbols.ref(name))
        used = find_undeclared(node.body, _TAKES).difference(function.arguments)
        for name in sorted(used):  # the order of `Takes`
            function.takes |= _TAKES[name]
            self.code.slot(frame.symbols.declare_parameter(name))
        frame.symbols.analyze_node(node)
        self._enter(frame)
        for index in range(len(node.args)):
            self._default(node, index, frame)
        self._body(node.body, frame)

    def _default(self, node: nodes.Macro | nodes.CallBlock, index: int, frame: Frame) -> None:
        """Assign an argument's default, or undefined, unless it is given."""
        reference, given = frame.symbols.ref(node.args[index].name), Label()
        self.code.branch("ARGUMENT", given, self.code.slot(reference))
        at = index - len(node.args)
        if -at <= len(node.defaults):
            self.missing = {frame.symbols.ref(later.name) for later in node.args[index:]}
            self.expression(node.defaults[at], frame)
            self.missing = set()
            self.code.variable("STORE", reference)
        else:
            self.code.variable("CLEAR", reference)
        self.code.mark(given)


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

    A row is rendered exactly or given up, with a reason; the reference then renders it. `given_up` says which parts of
    the template no row can reach. Raises `NotCompiled` if nothing can be compiled.
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
        code = Compiler(variables, now.strftime).compile(tree)
        self.given_up: Final = tuple(code.given_up)
        try:
            layout = {**layout, "used_keys": used_keys(tree)}
            self._program = native.Program(*code.assemble(), layout, Delegate(date).parts)
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
    whole = {"messages": conversation.messages, "tools": conversation.tools, "variables": conversation.variables}
    whole |= {"spans": orjson.loads(orjson.dumps(conversation.spans))} if conversation.spans else {}  # as lists
    with suppress(TypeError):  # integers beyond 64 bits; lone surrogates, keys that are no strings, objects
        return orjson.dumps(whole)
    with suppress(TypeError, ValueError, RecursionError):
        text = json.dumps(whole, ensure_ascii=False)
        return text.encode() if json.loads(text) == whole else None
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
