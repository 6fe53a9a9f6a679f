"""What names in templates mean: scopes, jinja2's functions, and the attributes of built-in types."""

from __future__ import annotations

import itertools
from enum import IntFlag
from typing import Final

from jinja2 import nodes
from jinja2.compiler import find_undeclared
from jinja2.idtracking import VAR_LOAD_RESOLVE, Symbols

from penstock.prepare.template.sandbox import is_generation

FUNCTIONS: Final = frozenset(
    ("range", "namespace", "raise_exception", "strftime_now", "dict", "lipsum", "cycler", "joiner")
)


class AttributeOf(IntFlag):
    """The types that have an attribute of some name."""

    STRING = 1
    LIST = 2
    DICT = 4
    INT = 8
    FLOAT = 16
    TUPLE = 32


_TYPES: Final = (
    (AttributeOf.STRING, str),
    (AttributeOf.LIST, list),
    (AttributeOf.DICT, dict),
    (AttributeOf.INT, int),
    (AttributeOf.FLOAT, float),
    (AttributeOf.TUPLE, tuple),
)


class Frame:
    """A scope of jinja2's symbol analysis."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols

    def inner(self) -> Frame:
        return Frame(Symbols(self.symbols, level=self.symbols.level + 1))


def attribute_bits(name: str) -> int:
    """The Python types that have an attribute of this name, as `AttributeOf`."""
    return sum(bit.value for bit, kind in _TYPES if hasattr(kind, name))


def calls(node: nodes.Node) -> bool:
    """Whether this contains a call of anything but a method of a built-in type: it may change a namespace, or fail."""
    found = itertools.chain([node] if isinstance(node, nodes.Call) else [], node.find_all(nodes.Call))
    for callee in (call.node for call in found):
        is_method = isinstance(callee, nodes.Getattr) and attribute_bits(callee.attr) > 0
        if not is_method and not isinstance(callee, nodes.ExtensionAttribute):
            return True
    return False


def calls_value(node: nodes.Call, frame: Frame) -> bool:
    """Whether this calls a value, and not a method of a built-in type or one of jinja2's functions."""
    match node.node:
        case nodes.Getattr(attr=name):
            return not name.startswith("_") and not attribute_bits(name)
        case nodes.Name(name=name) if name in FUNCTIONS:
            load = frame.symbols.find_load(frame.symbols.ref(name))
            return load is None or load[0] != VAR_LOAD_RESOLVE
    return True


def defines_macros(node: nodes.Node) -> bool:
    """Whether a statement makes values that can be called later and read its variables."""
    return any(not is_generation(found) for found in node.find_all((nodes.Macro, nodes.CallBlock)))


_SO_FAR: Final = ("index", "index0", "first", "previtem", "depth", "depth0", "cycle", "changed")


def looks_ahead(node: nodes.For) -> bool:
    """Whether a loop with a filter may use more of `loop` than is known when an iteration begins."""
    assert node.test is not None
    if find_undeclared([node.test], ("loop",)):
        return True  # another loop's
    used = [name for part in node.body for name in part.find_all(nodes.Name) if name.name == "loop"]
    attributes = [found for part in node.body for found in part.find_all(nodes.Getattr)]
    known = [found for found in attributes if found.node == nodes.Name("loop", "load") and found.attr in _SO_FAR]
    return len(known) < len(used)
