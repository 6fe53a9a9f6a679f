"""Compiles the expressions of templates; `compiler` explains when compiling fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from penstock.prepare.template.bytecode import UNDEFINED, Bytecode, Label, NotCompiled, Starred
from penstock.prepare.template.names import Frame, attribute_bits, calls_value
from penstock.prepare.template.sandbox import tojson

_TEST_ALIASES: Final = {
    "==": "eq",
    "equalto": "eq",
    "!=": "ne",
    "<": "lt",
    "lessthan": "lt",
    "<=": "le",
    ">": "gt",
    "greaterthan": "gt",
    ">=": "ge",
}
_COMPARISONS: Final = {
    "eq": "EQ", "ne": "NE", "lt": "LT", "lteq": "LE", "gt": "GT", "gteq": "GE", "in": "IN", "notin": "NOT_IN",
}  # fmt: skip
_BINARY: Final[dict[type[nodes.BinExpr], str]] = {
    nodes.Sub: "SUBTRACT",
    nodes.Mul: "MULTIPLY",
    nodes.Mod: "MODULO",
    nodes.FloorDiv: "FLOOR_DIVIDE",
    nodes.Div: "DIVIDE",
    nodes.Pow: "POWER",
}
# Filters that the machine gives all of their arguments; others know their defaults.
_COMPLETE: Final = frozenset(("sort", "dictsort", "groupby", "unique", "min", "max", "sum", "batch", "slice"))
_OF_FILTERS: Final = frozenset(("map", "select", "reject", "selectattr", "rejectattr", "format", "attr", "random"))
_KEYWORDS: Final[dict[str, dict[str, Any]]] = {  # methods that take keywords, with their defaults
    "split": {"sep": None, "maxsplit": -1},
    "rsplit": {"sep": None, "maxsplit": -1},
    "splitlines": {"keepends": False},
    "expandtabs": {"tabsize": 8},
}
_MUTATING: Final = ("append", "pop", "extend", "insert", "update", "setdefault", "clear", "remove")


@functools.cache
def _parameters(name: str) -> dict[str, Any]:
    """The parameters of a filter after its input, with their defaults."""
    function = tojson if name == "tojson" else FILTERS[name]
    parameters = list(inspect.signature(function).parameters.values())
    if parameters[0].name in ("context", "env", "environment", "eval_ctx"):
        del parameters[0]
    return {parameter.name: parameter.default for parameter in parameters[1:]}


class Expressions:
    """Compiles expressions: each leaves its value on the stack."""

    def __init__(self, code: Bytecode, variables: Mapping[str, Any], strftime: Callable[[str], str]) -> None:
        self.code, self.variables, self._strftime = code, variables, strftime
        self.missing: set[str] = set()  # arguments of a macro that may not be set yet

    def expression(self, node: nodes.Node, frame: Frame) -> None:
        """Push the value of an expression. One that can't be compiled costs the rows that reach it."""
        begun = self.code.position
        try:
            self._expression(node, frame)
        except NotCompiled as reason:
            self.code.give_up(begun, reason)
            self.code.push(None)

    def _expression(self, node: nodes.Node, frame: Frame) -> None:
        code = self.code
        match node:
            case nodes.Const():
                code.push(node.value)
            case nodes.TemplateData():
                code.push(node.data)
            case nodes.Name(name="self") if frame.symbols.ref("self") == "l_0_self":
                raise NotCompiled("self")
            case nodes.Name() if (reference := frame.symbols.ref(node.name)) in self.missing:
                code.op("LOAD_ARGUMENT", code.slot(reference))
            case nodes.Name():
                code.load(frame.symbols.ref(node.name))
            case nodes.List() | nodes.Tuple():
                for item in node.items:
                    self.expression(item, frame)
                code.op("LIST" if isinstance(node, nodes.List) else "TUPLE", len(node.items))
            case nodes.Dict():
                for pair in node.items:
                    self.expression(pair.key, frame)
                    self.expression(pair.value, frame)
                code.op("DICT", len(node.items))
            case nodes.Add():
                code.op("SUM", self.operands(node, frame))
            case nodes.Concat():
                for part in node.nodes:
                    self.expression(part, frame)
                code.op("CONCAT", len(node.nodes))
            case nodes.BinExpr() if type(node) in _BINARY:
                self.expression(node.left, frame)
                self.expression(node.right, frame)
                code.op(_BINARY[type(node)])
            case nodes.Neg(node=nodes.Const(value=int(number))) if type(number) is int:
                code.push(-number)
            case nodes.Neg() | nodes.Pos() | nodes.Not():
                self.expression(node.node, frame)
                code.op("NOT" if isinstance(node, nodes.Not) else "NEGATE")
                if isinstance(node, nodes.Pos):
                    code.op("NEGATE")
            case nodes.And() | nodes.Or():
                end = Label()
                self.expression(node.left, frame)
                code.branch("JUMP_FALSE_KEEP" if isinstance(node, nodes.And) else "JUMP_TRUE_KEEP", end)
                self.expression(node.right, frame)
                code.mark(end)
            case nodes.CondExpr():
                self._conditional(node, frame)
            case nodes.Compare():
                self._compare(node, frame)
            case nodes.Getattr():
                bits = self.attribute_bits(node.attr)
                self.expression(node.node, frame)
                code.op("ATTRIBUTE", code.constant(node.attr), bits)
            case nodes.Getitem():
                self._item(node, frame)
            case nodes.Call():
                self._call(node, frame)
            case nodes.Filter():
                self.filter(node, frame)
            case nodes.Test():
                self._test(node, frame)
            case _:
                raise NotCompiled(f"the expression {type(node).__name__}")

    def operands(self, node: nodes.Add, frame: Frame) -> int:
        """Push the operands of a left-associative chain of `+`, and return their number."""
        parts: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        parts.append(left)
        for part in reversed(parts):
            self.expression(part, frame)
        return len(parts)

    def condition(self, node: nodes.Node, frame: Frame, otherwise: Label) -> None:
        """Evaluate a condition, and jump to `otherwise` if it is false."""
        match node:
            case nodes.And():
                self.condition(node.left, frame, otherwise)
                self.condition(node.right, frame, otherwise)
            case nodes.Or():
                right, end = Label(), Label()
                self.condition(node.left, frame, right)
                self.code.jump(end)
                self.code.mark(right)
                self.condition(node.right, frame, otherwise)
                self.code.mark(end)
            case nodes.Not():
                self.expression(node.node, frame)
                self.code.branch("JUMP_TRUE", otherwise)
            case _:
                self.expression(node, frame)
                self.code.branch("JUMP_FALSE", otherwise)

    def _conditional(self, node: nodes.CondExpr, frame: Frame) -> None:
        other, end = Label(), Label()
        self.condition(node.test, frame, other)
        self.expression(node.expr1, frame)
        self.code.jump(end)
        self.code.mark(other)
        if node.expr2 is None:
            self.code.push(UNDEFINED)
        else:
            self.expression(node.expr2, frame)
        self.code.mark(end)

    def _compare(self, node: nodes.Compare, frame: Frame) -> None:
        if len(node.ops) > 1:
            self._compare_chain(node, frame)
            return
        op, left, right = node.ops[0].op, node.expr, node.ops[0].expr
        if op in ("eq", "ne") and isinstance(right, nodes.Const) and isinstance(right.value, str):
            self.expression(left, frame)
            self.code.op("EQ_TEXT" if op == "eq" else "NE_TEXT", self.code.constant(right.value))
        elif op in ("in", "notin") and isinstance(left, nodes.Const) and isinstance(left.value, str):
            self.expression(right, frame)
            self.code.op("TEXT_IN", self.code.constant(left.value))
            if op == "notin":
                self.code.op("NOT")
        else:
            self.expression(left, frame)
            self.expression(right, frame)
            self.code.op(_COMPARISONS[op])

    def _compare_chain(self, node: nodes.Compare, frame: Frame) -> None:
        end, order = Label(), list(_COMPARISONS)
        self.expression(node.expr, frame)
        for operand in node.ops[:-1]:
            self.expression(operand.expr, frame)
            self.code.branch("CHAIN", end, order.index(operand.op))
        self.expression(node.ops[-1].expr, frame)
        self.code.op(_COMPARISONS[node.ops[-1].op])
        self.code.mark(end)

    # ---- attributes and items

    def attribute_bits(self, name: str) -> int:
        """The Python types that have an attribute of this name, as `AttributeOf`."""
        if name.startswith("_"):
            raise NotCompiled("an underscore attribute")
        return attribute_bits(name)

    def _item(self, node: nodes.Getitem, frame: Frame) -> None:
        index: nodes.Node = node.arg
        if isinstance(index, nodes.Neg) and isinstance(index.node, nodes.Const) and type(index.node.value) is int:
            index = nodes.Const(-index.node.value)
        match index:
            case nodes.Slice():
                self.expression(node.node, frame)
                for part in (index.start, index.stop, index.step):
                    self.expression(part or nodes.Const(None), frame)
                self.code.op("SLICE")
            case nodes.Const(value=int(number)) if type(number) is int and abs(number) < 1 << 30:
                separator = _split_separator(node.node) if number in (0, -1) else None
                if separator:
                    assert isinstance(node.node, nodes.Call)
                    assert isinstance(node.node.node, nodes.Getattr)
                    self.expression(node.node.node.node, frame)
                    self.code.op("SPLIT_AT", self.code.constant(separator), int(number == -1))
                else:
                    self.expression(node.node, frame)
                    self.code.op("INDEX", number)
            case nodes.Const(value=str(name)):
                bits = self.attribute_bits(name)
                self.expression(node.node, frame)
                self.code.op("KEY", self.code.constant(name), bits)
            case _:
                self.expression(node.node, frame)
                self.expression(index, frame)
                self.code.op("ITEM")

    # ---- calls

    def call(self, node: nodes.Call, frame: Frame, op: str, caller: int | None = None) -> None:
        """Call a value: a macro, a recursive loop or a method of a loop. `caller` is the number of a call block."""
        names = [keyword.key for keyword in node.kwargs]
        if any(name.startswith("_") for name in names):
            raise NotCompiled("an underscore argument")
        self.expression(node.node, frame)
        for argument in (*node.args, *([node.dyn_args] if node.dyn_args else [])):
            self.expression(argument, frame)
        for keyword in node.kwargs:
            self.expression(keyword.value, frame)
        if caller is not None:
            self.code.op("MACRO", caller)
            names.append("caller")
        if node.dyn_kwargs:
            self.expression(node.dyn_kwargs, frame)
        self.code.op(op, len(node.args), len(names), self.code.constant(names), _spread(node))

    def _call(self, node: nodes.Call, frame: Frame) -> None:
        match node.node:
            case _ if calls_value(node, frame):
                self.call(node, frame, "CALL")
            case nodes.Getattr():
                _no_stars(node)
                self._method(node.node, node, frame)
            case nodes.Name(name="namespace"):
                self._namespace(node, frame)
            case nodes.Name(name=name):
                _no_stars(node)
                self._function(name, node, frame)

    def _namespace(self, node: nodes.Call, frame: Frame) -> None:
        self._check_function("namespace", frame)
        if len(node.args) > 1 or node.dyn_args:
            raise NotCompiled("namespace with these arguments")
        for argument in node.args:
            self.expression(argument, frame)
        for keyword in node.kwargs:
            self.attribute_bits(keyword.key)
            self.code.push(keyword.key)
            self.expression(keyword.value, frame)
        if node.dyn_kwargs:
            self.expression(node.dyn_kwargs, frame)
        spread = (Starred.LIST if node.args else 0) | (Starred.DICT if node.dyn_kwargs else 0)
        self.code.op("NAMESPACE", len(node.kwargs), int(spread))

    def _method(self, callee: nodes.Getattr, node: nodes.Call, frame: Frame) -> None:
        if callee.attr in _MUTATING:
            self.code.op("GIVE_UP", self.code.constant("a method that the sandbox refuses"))
            self.code.push(None)
            return
        if callee.attr not in self.code.methods:
            raise NotCompiled(f"the method {callee.attr}")
        self.expression(callee.node, frame)
        count = self._method_arguments(callee.attr, node, frame)
        self.code.op("METHOD", self.code.methods[callee.attr], count)

    def _method_arguments(self, name: str, node: nodes.Call, frame: Frame) -> int:
        """Push the arguments of a method, and return their number."""
        if name == "format":  # a tuple of values, and a dict of those with names
            self.expression(nodes.Tuple(node.args, "load"), frame)
            self._named(node.kwargs, frame)
            self.code.op("DICT", len(node.kwargs))
            return 2
        arguments = node.args
        if node.kwargs:
            arguments = _bound(f"the method {name} with keywords", _KEYWORDS.get(name, {}), node.args, node.kwargs)
        for argument in arguments:
            self.expression(argument, frame)
        return len(arguments)

    def _named(self, pairs: Sequence[nodes.Keyword | nodes.Pair], frame: Frame) -> None:
        for pair in pairs:
            self.code.push(pair.key)
            self.expression(pair.value, frame)

    def _check_function(self, name: str, frame: Frame) -> None:
        if name in self.variables:
            raise NotCompiled(f"{name} with another meaning")
        self.code.load(frame.symbols.ref(name))  # gives up if the row has a variable of this name
        self.code.op("POP")

    def _function(self, name: str, node: nodes.Call, frame: Frame) -> None:
        self._check_function(name, frame)
        match name:
            case "dict" if not node.args:
                self._named(node.kwargs, frame)
                self.code.op("DICT", len(node.kwargs))
            case "range" if 1 <= len(node.args) <= 3 and not node.kwargs:
                for argument in node.args:
                    self.expression(argument, frame)
                self.code.op("RANGE", len(node.args))
            case "raise_exception" if len(node.args) == 1 and not node.kwargs:
                self.expression(node.args[0], frame)
                self.code.op("REFUSE")
            case "strftime_now" if len(node.args) == 1 and not node.kwargs:
                match node.args[0]:
                    case nodes.Const(value=str(format)):
                        self.code.push(self._strftime(format))
                    case given:
                        self.expression(given, frame)
                        self.code.op("FILTER", self.code.filters["strftime_now"], 1, 0)
            case _:
                raise NotCompiled(f"the function {name} with these arguments")

    # ---- filters and tests

    def filter(self, node: nodes.Filter, frame: Frame, *, pushed: bool = False) -> None:
        """Apply a filter; with `pushed`, its input is already on the stack."""
        code, name = self.code, node.name
        _no_stars(node)
        if not pushed:
            assert node.node is not None
            self.expression(node.node, frame)
        match name:
            case "map":
                self._map(node, frame)
            case "select" | "reject" | "selectattr" | "rejectattr":
                self._select(node, frame)
            case "format":
                self._format(node, frame)
            case "attr" if len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], nodes.Const):
                code.op("FILTER", code.filters["attr"], 1, self.attribute_bits(str(node.args[0].value)))
            case _ if name in FILTERS and name not in _OF_FILTERS:
                code.op("FILTER", code.filters[name], 1 + self.filter_arguments(node, frame), 0)
            case _ if name in FILTERS:
                raise NotCompiled(f"the filter {name} with these arguments")
            case _:
                self._unknown("filter", node, frame)

    def filter_arguments(self, node: nodes.Filter, frame: Frame) -> int:
        """Push the arguments of a filter in the order of its parameters, and return their number."""
        _no_stars(node)
        if not node.args and not node.kwargs and node.name not in _COMPLETE:
            return 0
        words = f"the filter {node.name} with these arguments"
        arguments = _bound(words, _parameters(node.name), node.args, node.kwargs)
        for argument in arguments:
            self.expression(argument, frame)
        return len(arguments)

    def _format(self, node: nodes.Filter, frame: Frame) -> None:
        if node.args and node.kwargs:
            raise NotCompiled("the filter format with these arguments")
        self.code.op("FILTER", self.code.filters["string"], 1, 0)
        if node.kwargs:
            self._named(node.kwargs, frame)
            self.code.op("DICT", len(node.kwargs))
        else:
            self.expression(nodes.Tuple(node.args, "load"), frame)
        self.code.op("MODULO")

    def _map(self, node: nodes.Filter, frame: Frame) -> None:
        code = self.code
        first = node.args[0] if node.args else None
        if first is None and {pair.key for pair in node.kwargs} | {"default"} == {"attribute", "default"}:
            for argument in _bound("", {"attribute": None, "default": None}, (), node.kwargs):
                self.expression(argument, frame)
            code.op("FILTER", code.filters["map_attribute"], 3, 0)
        elif isinstance(first, nodes.Const) and first.value in FILTERS and first.value not in _OF_FILTERS:
            own = nodes.Filter(None, first.value, node.args[1:], node.kwargs, None, None)
            code.op("FILTER", code.filters["map_filter"], 1 + self.filter_arguments(own, frame), code.filters[own.name])
        else:
            raise NotCompiled("the filter map with these arguments")

    def _select(self, node: nodes.Filter, frame: Frame) -> None:
        arguments, by_attribute = list(node.args), node.name.endswith("attr")
        if node.kwargs or len(arguments) < by_attribute:
            raise NotCompiled(f"the filter {node.name} with these arguments")
        if by_attribute:
            self.expression(arguments.pop(0), frame)
        test: Any = "truthy"
        if arguments:
            first = arguments.pop(0)
            test = first.value if isinstance(first, nodes.Const) else None
            test = _TEST_ALIASES.get(test, test)
            if test not in self.code.tests or test == "truthy":
                raise NotCompiled(f"the filter {node.name} with another test")
        for argument in arguments:
            self.expression(argument, frame)
        count = 1 + by_attribute + len(arguments)
        self.code.op("FILTER", self.code.filters[node.name], count, self.code.tests[test])

    def _test(self, node: nodes.Test, frame: Frame) -> None:
        name = _TEST_ALIASES.get(node.name, node.name)
        if node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise NotCompiled(f"the test {node.name} with keywords")
        if name in ("filter", "test") and isinstance(node.node, nodes.Const) and not node.args:
            self.code.push(node.node.value in (FILTERS if name == "filter" else TESTS))
            return
        self.expression(node.node, frame)
        if name not in TESTS:
            self._unknown("test", node, frame)
            return
        if name not in self.code.tests:
            raise NotCompiled(f"the test {node.name}")
        for argument in node.args or ():
            self.expression(argument, frame)
        self.code.op("TEST", self.code.tests[name], len(node.args or ()))

    def _unknown(self, kind: str, node: nodes.Filter | nodes.Test, frame: Frame) -> None:
        """A filter or test that jinja2 does not have: inside a condition it fails when a row gets there."""
        self.code.op("POP")
        for argument in (*node.args, *(pair.value for pair in node.kwargs)):
            self.expression(argument, frame)
            self.code.op("POP")
        self.code.push(f"TemplateRuntimeError: No {kind} named {node.name!r} found.")
        self.code.op("REFUSE")


def _bound(
    words: str, parameters: Mapping[str, Any], args: Sequence[nodes.Expr], kwargs: Sequence[nodes.Keyword | nodes.Pair]
) -> list[nodes.Expr]:
    """The values of all parameters, in order; raises NotCompiled with these words if that is impossible."""
    given = dict(zip(parameters, args, strict=False)) | {pair.key: pair.value for pair in kwargs}
    if len(given) != len(args) + len(kwargs) or not given.keys() <= parameters.keys():
        raise NotCompiled(words)
    if any(default is inspect.Parameter.empty and name not in given for name, default in parameters.items()):
        raise NotCompiled(words)
    return [given.get(name) or nodes.Const(default) for name, default in parameters.items()]


def _no_stars(node: nodes.Call | nodes.Filter) -> None:
    if node.dyn_args or node.dyn_kwargs:
        raise NotCompiled("*args or **kwargs")


def _spread(node: nodes.Call) -> int:
    return int((Starred.LIST if node.dyn_args else 0) | (Starred.DICT if node.dyn_kwargs else 0))


def _split_separator(node: nodes.Node) -> str | None:
    """The separator of `text.split("…")`."""
    match node:
        case nodes.Call(node=nodes.Getattr(attr="split"), args=[nodes.Const(value=str(separator))], kwargs=[]):
            return separator if not node.dyn_args and not node.dyn_kwargs else None
    return None
