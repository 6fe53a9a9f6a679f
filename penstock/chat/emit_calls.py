"""Calls, methods, filters and tests for the fast engine; the rest of expressions is in emit_expressions.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from jinja2 import nodes

from penstock.chat.emit_expressions import Operators, quote
from penstock.chat.emit_rules import (
    LAZY_CONSUMERS,
    LAZY_FILTERS,
    MAPPED_FILTERS,
    MUTATING_METHODS,
    NATIVE_FILTER_ARGUMENTS,
    NATIVE_FILTERS,
    NATIVE_FUNCTIONS,
    NATIVE_METHODS,
    NATIVE_TESTS,
    NONE_FAILS_FILTERS,
    PREFIX,
    PYTHON_FILTERS,
    PYTHON_FUNCTIONS,
    PYTHON_METHODS,
    REFUSE,
    TEST_OPERATORS,
    TEXT_FILTERS,
    VIEWS,
    NotServed,
)
from penstock.chat.sandbox import NUMBER_FILTER
from penstock.chat.syntax import is_text
from penstock.chat.taint import Kind


class Expressions(Operators):
    """Emits all expressions of one template."""

    def arguments(self, node: nodes.Call | nodes.Filter | nodes.Test, emit: Callable[[nodes.Node], str]) -> list[str]:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise NotServed("* or ** arguments")
        return [*map(emit, node.args), *(f"{k.key}={emit(k.value)}" for k in node.kwargs)]

    def call(self, node: nodes.Call, lazy: bool = False) -> str:
        match node.node:
            case nodes.Name(name=name):
                if name in PYTHON_FUNCTIONS:
                    return f"{name}({', '.join(self.arguments(node, self.defined))})"
                if name in self.macros:
                    return self.macro_call(node, self.macros[name])
                if name == "dict" and node.args:
                    raise NotServed("dict with positional arguments")
                if name in NATIVE_FUNCTIONS or name == "caller":
                    return f"{name}({', '.join(self.arguments(node, self.defined))})"
                raise NotServed(f"the function {name!r}")
            case nodes.Getattr(attr=name, node=owner):
                if name in VIEWS and not lazy:
                    raise NotServed(f"the method {name!r} where its result is kept")
                return self.method(node, owner, name)
        raise NotServed("a call of an expression")

    def macro_call(self, node: nodes.Call, macro: nodes.Macro) -> str:
        """Undefined passed to a parameter with a default stays undefined in jinja2, natively it takes the default."""
        required = [parameter.name for parameter in macro.args[: len(macro.args) - len(macro.defaults)]]
        arguments = self.arguments(node, self.emit)
        for index, value in enumerate(node.args[len(required) :], len(required)):
            arguments[index] = self.defined(value)
        for index, keyword in enumerate(node.kwargs, len(node.args)):
            if keyword.key not in required:
                arguments[index] = f"{keyword.key}={self.defined(keyword.value)}"
        return f"{macro.name}({', '.join(arguments)})"

    def namespace(self, node: nodes.Node) -> str:
        assert isinstance(node, nodes.Call)
        if node.args:
            raise NotServed("a namespace made from a mapping")
        return f"namespace({', '.join(self.arguments(node, self.emit))})"

    def method(self, node: nodes.Call, owner: nodes.Node, name: str) -> str:
        if isinstance(owner, nodes.Name) and owner.name == "loop":
            raise NotServed(f"loop.{name}()")
        if name in MUTATING_METHODS:
            return REFUSE
        if name in PYTHON_METHODS or (name == "split" and not (len(node.args) in (1, 2) and _splits(node))):
            arguments = [self.defined(owner), quote(name), *self.arguments(node, self.defined)]
            return f"{PREFIX}method({', '.join(arguments)})"
        if name not in NATIVE_METHODS or node.kwargs:
            raise NotServed(f"the method {name!r}")
        if name == "get" and node.args and (key := node.args[0]) and is_text(key) and len(node.args) <= 2:
            return self.get(node, owner, key)
        return f"{self.emit(owner)}.{name}({', '.join(self.arguments(node, self.emit))})"

    def get(self, node: nodes.Call, owner: nodes.Node, key: nodes.Expr) -> str:
        """`message.get("key", default)` of a message is a look-up."""
        if self.taint.kind(owner) is not Kind.MESSAGE:
            return f"{self.emit(owner)}.get({', '.join(self.arguments(node, self.emit))})"
        default = self.emit(node.args[1]) if len(node.args) == 2 else "none"
        return f"({self.emit(nodes.Getitem(owner, key, 'load'))} | default({default}))"

    def filter(self, node: nodes.Filter, lazy: bool) -> str:
        name, operand = node.name, node.node
        if operand is None:
            raise NotServed("a filter block without a body")
        if name.startswith(PREFIX):  # marks: undefined arrives as None, which they expect
            if isinstance(operand, nodes.Filter) and operand.name == NUMBER_FILTER:
                operand = operand.node or operand  # they find the number themselves
            return f"({self.emit(operand)} | {name})"
        if name == "safe" and self.markup.is_harmless(node):
            return f"({self.emit(operand)} | string)"
        if name in PYTHON_FILTERS:
            if name in TEXT_FILTERS and not node.args and not node.kwargs:
                return f'(({self.emit(operand)} | default("")) | {PREFIX}{name})'
            values = [self.defined(operand), *self.arguments(node, self.defined)]
            return f"({values[0]} | {PREFIX}{name}({', '.join(values[1:])}))"
        if name in LAZY_FILTERS:
            return self.lazy_filter(node, lazy)
        if name not in NATIVE_FILTERS and name not in NONE_FAILS_FILTERS:
            raise NotServed(f"the filter {name!r}")
        _check_arguments(node)
        if name in NONE_FAILS_FILTERS:
            if name == "join" and node.args and not is_text(node.args[0]):
                raise NotServed("join with a computed separator")
            source = self.not_none(operand)
        else:
            view = isinstance(operand, nodes.Call) and name in ("length", "count")
            source = self.emit(operand, lazy=view or name in LAZY_CONSUMERS)
            if name in ("length", "count") and self.maybe_undefined(operand) and not self.is_list(operand):
                source = f"({source} | default([]))"
        arguments = self.arguments(node, self.emit)
        return f"({source} | {name}({', '.join(arguments)}))" if arguments else f"({source} | {name})"

    def lazy_filter(self, node: nodes.Filter, lazy: bool) -> str:
        """Filters that give a generator: only where it is consumed at once, since its truth and length differ."""
        name, operand = node.name, node.node
        assert operand is not None
        if not lazy:
            raise NotServed(f"the filter {name!r} where its result is kept")
        if name == "items":
            return f"(({self.emit(operand)} | default({{}})) | items)"
        source = self.not_none(operand)
        if name == "map":
            return self.map(node, source)
        if name in ("select", "reject", "selectattr", "rejectattr"):
            plain = node.args[1:] if name.endswith("attr") else node.args
            named = [a.value for a in node.args[: 2 if name.endswith("attr") else 1] if isinstance(a, nodes.Const)]
            tests = named[1:] if name.endswith("attr") else named
            if (plain and not (tests and tests[0] in NATIVE_TESTS)) or node.kwargs or any("." in str(n) for n in named):
                raise NotServed(f"{name} with an unusual test")
            return f"({source} | {name}({', '.join(self.arguments(node, self.emit))}))"
        _check_arguments(node)
        return f"({source} | {name})"

    def map(self, node: nodes.Filter, source: str) -> str:
        keywords: dict[str, nodes.Expr] = {cast(str, keyword.key): keyword.value for keyword in node.kwargs}
        attribute, name = keywords.get("attribute"), node.args[0] if node.args else None
        if len(node.args) + len(keywords) == 1:
            if isinstance(attribute, nodes.Const) and is_text(attribute) and "." not in attribute.value:
                return f"({source} | {PREFIX}pluck({quote(attribute.value)}))"
            if isinstance(name, nodes.Const) and name.value in MAPPED_FILTERS:
                return f"({source} | {PREFIX}map({quote(name.value)}))"
        raise NotServed("an unusual map")

    def test(self, node: nodes.Test) -> str:
        name = node.name
        if name in TEST_OPERATORS and len(node.args) == 1 and not node.kwargs:
            return self.comparison(node.node, TEST_OPERATORS[name], node.args[0])
        source = self.emit(node.node)
        if node.args and not (name == "divisibleby" and len(node.args) == 1 and self.is_number(node.args[0])):
            if name == "sameas" and isinstance(node.args[0], nodes.Const) and node.args[0].value in (None, True, False):
                return f"({source} is sameas({self.emit(node.args[0])}))"
            raise NotServed(f"the test {name!r}")
        match name:
            case "iterable":
                return f"({source} is iterable and {source} is not none)"
            case "sequence":
                return f"({source} is sequence or {source} is string or {source} is mapping)"
            case "odd" | "even":
                return f"({source} is {name} if {source} is number else {REFUSE})"
            case "divisibleby":
                return f"({source} is divisibleby({self.emit(node.args[0])}) if {source} is number else {REFUSE})"
        if name not in NATIVE_TESTS:
            raise NotServed(f"the test {name!r}")
        return f"({source} is {name})"


def _splits(node: nodes.Call) -> bool:
    """Whether this is split(separator) with a constant one that is not empty."""
    separator = node.args[0]
    return not node.kwargs and isinstance(separator, nodes.Const) and bool(separator.value) and is_text(separator)


def _check_arguments(node: nodes.Filter) -> None:
    positional, keywords = NATIVE_FILTER_ARGUMENTS[node.name]
    if len(node.args) > positional or any(k.key not in keywords for k in node.kwargs):
        raise NotServed(f"the filter {node.name!r} with these arguments")
