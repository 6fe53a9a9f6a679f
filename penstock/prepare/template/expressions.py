"""Compiles the expressions of templates; `compiler` explains when compiling fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from jinja2 import nodes

from penstock.prepare.template.bytecode import UNDEFINED, Bytecode, Label, NotCompiled, Starred
from penstock.prepare.template.names import Frame, attribute_bits, calls_value

_TEST_ALIASES: Final = {
    "==": "eq",
    "equalto": "eq",
    "!=": "ne",
    "<": "lt",
    "lessthan": "lt",
    ">": "gt",
    "greaterthan": "gt",
}
_COMPARISONS: Final = {
    "eq": "EQ", "ne": "NE", "lt": "LT", "lteq": "LE", "gt": "GT", "gteq": "GE", "in": "IN", "notin": "NOT_IN",
}  # fmt: skip
# The parameters of each filter that the machine accepts, in order.
_ARGUMENTS: Final = {
    "tojson": ("ensure_ascii", "indent", "separators", "sort_keys"),
    "default": ("default_value", "boolean"),
    "d": ("default_value", "boolean"),
    "join": ("d",),
    "trim": ("chars",),
    "replace": ("old", "new"),
    "indent": ("width", "first"),
}
_TOJSON_DEFAULTS: Final = (False, None, None, False)
_MAPPED: Final = ("upper", "lower", "trim", "string", "length", "tojson", "capitalize")
_MUTATING: Final = ("append", "pop", "extend", "insert", "update", "setdefault", "clear", "remove")


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
            case nodes.Sub() | nodes.Mul() | nodes.Mod() | nodes.FloorDiv():
                self.expression(node.left, frame)
                self.expression(node.right, frame)
                names = {nodes.Sub: "SUBTRACT", nodes.Mul: "MULTIPLY", nodes.Mod: "MODULO"}
                code.op(names.get(type(node), "FLOOR_DIVIDE"))
            case nodes.Neg(node=nodes.Const(value=int(number))) if type(number) is int:
                code.push(-number)
            case nodes.Neg() | nodes.Not():
                self.expression(node.node, frame)
                code.op("NEGATE" if isinstance(node, nodes.Neg) else "NOT")
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
        if len(node.ops) != 1:
            raise NotCompiled("a chained comparison")
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
        if callee.attr not in self.code.methods or node.kwargs:
            raise NotCompiled(f"the method {callee.attr}" + (" with keywords" if node.kwargs else ""))
        self.expression(callee.node, frame)
        for argument in node.args:
            self.expression(argument, frame)
        self.code.op("METHOD", self.code.methods[callee.attr], len(node.args))

    def _check_function(self, name: str, frame: Frame) -> None:
        if name in self.variables:
            raise NotCompiled(f"{name} with another meaning")
        self.code.load(frame.symbols.ref(name))  # gives up if the row has a variable of this name
        self.code.op("POP")

    def _function(self, name: str, node: nodes.Call, frame: Frame) -> None:
        self._check_function(name, frame)
        match name:
            case "dict" if not node.args:
                for keyword in node.kwargs:
                    self.code.push(keyword.key)
                    self.expression(keyword.value, frame)
                self.code.op("DICT", len(node.kwargs))
            case "range" if 1 <= len(node.args) <= 3 and not node.kwargs:
                for argument in node.args:
                    self.expression(argument, frame)
                self.code.op("RANGE", len(node.args))
            case "raise_exception" if len(node.args) == 1 and not node.kwargs:
                self.expression(node.args[0], frame)
                self.code.op("REFUSE")
            case "strftime_now" if len(node.args) == 1 and isinstance(node.args[0], nodes.Const) and not node.kwargs:
                self.code.push(self._strftime(node.args[0].value))
            case _:
                raise NotCompiled(f"the function {name} with these arguments")

    # ---- filters and tests

    def filter(self, node: nodes.Filter, frame: Frame, *, pushed: bool = False) -> None:
        """Apply a filter; with `pushed`, its input is already on the stack."""
        code, name = self.code, node.name
        _no_stars(node)
        match name:
            case "map" | "sort":
                self._map_or_sort(node, frame, pushed)
            case "select" | "reject" | "selectattr" | "rejectattr":
                self._select(node, frame, pushed)
            case _ if name in code.filters and name not in ("map_attribute", "map_filter"):
                code.op("FILTER", code.filters[name], 1 + self.filter_arguments(node, frame, pushed=pushed), 0)
            case _:
                raise NotCompiled(f"the filter {name}")

    def filter_arguments(self, node: nodes.Filter, frame: Frame, *, pushed: bool = False) -> int:
        """Push a filter's input and its arguments in order, and return the number of arguments."""
        _no_stars(node)
        if not pushed:
            assert node.node is not None
            self.expression(node.node, frame)
        names = _ARGUMENTS.get(node.name, ())
        given: dict[str, nodes.Expr] = dict(zip(names, node.args, strict=False))
        given |= {str(keyword.key): keyword.value for keyword in node.kwargs}
        if len(given) != len(node.args) + len(node.kwargs) or not given.keys() <= set(names):
            raise NotCompiled(f"the filter {node.name} with these arguments")
        if not given:
            return 0
        if node.name == "tojson":
            for name, default in zip(names, _TOJSON_DEFAULTS, strict=True):
                self.expression(given.get(name, nodes.Const(default)), frame)
            return len(names)
        if any(name not in given for name in names[: len(given)]):
            raise NotCompiled(f"the filter {node.name} with these arguments")
        for name in names[: len(given)]:
            self.expression(given[name], frame)
        return len(given)

    def _map_or_sort(self, node: nodes.Filter, frame: Frame, pushed: bool) -> None:
        code = self.code
        if not pushed:
            assert node.node is not None
            self.expression(node.node, frame)
        path = node.kwargs[0] if len(node.kwargs) == 1 and not node.args else None
        if path is not None and path.key == "attribute" and _is_path(path.value):
            self.expression(path.value, frame)
            code.op("FILTER", code.filters["sort" if node.name == "sort" else "map_attribute"], 2, 0)
        elif node.name == "sort" and not node.args and not node.kwargs:
            code.op("FILTER", code.filters["sort"], 1, 0)
        elif (
            node.name == "map"
            and len(node.args) == 1
            and not node.kwargs
            and isinstance(node.args[0], nodes.Const)
            and node.args[0].value in _MAPPED
        ):
            code.op("FILTER", code.filters["map_filter"], 1, code.filters[node.args[0].value])
        else:
            raise NotCompiled(f"the filter {node.name} with these arguments")

    def _select(self, node: nodes.Filter, frame: Frame, pushed: bool) -> None:
        arguments, by_attribute = list(node.args), node.name.endswith("attr")
        if node.kwargs or (by_attribute and not (arguments and _is_path(arguments[0]))):
            raise NotCompiled(f"the filter {node.name} with these arguments")
        if not pushed:
            assert node.node is not None
            self.expression(node.node, frame)
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
        if name not in self.code.tests or name == "truthy" or node.kwargs or node.dyn_args or node.dyn_kwargs:
            raise NotCompiled(f"the test {node.name}")
        self.expression(node.node, frame)
        for argument in node.args or ():
            self.expression(argument, frame)
        self.code.op("TEST", self.code.tests[name], len(node.args or ()))


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


def _is_path(node: nodes.Node) -> bool:
    """Whether this is a constant path such as "function.name"; `sort` would split "a,b" into two."""
    if not isinstance(node, nodes.Const) or not isinstance(node.value, str) or "," in node.value:
        return False
    return all(part and not part.isdigit() and not part.startswith("_") for part in node.value.split("."))
