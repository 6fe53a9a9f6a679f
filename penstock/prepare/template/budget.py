"""Limits the work of one render. No clock is involved, so a template and a row always stop at the same point.

Steps limit time: each run of a loop or macro body costs as many steps as the body has syntax nodes. Fuel limits memory:
a new character costs one unit, reading a character an eighth of one. Both limits grow with the row, so that large rows
are served; hostile templates are stopped within seconds and a few hundred MB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from types import GeneratorType
from typing import Any, Final

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_STEPS: Final = 10_000_000  # syntax nodes run in one render …
STEPS_PER_VALUE: Final = 400  # … plus this for each value in the row …
STEPS_PER_CHARACTER: Final = 64  # … and this for each character
MAX_FUEL: Final = 1 << 26  # new characters in one render …
FUEL_PER_CHARACTER: Final = 64  # … plus this for each character in the row
MAX_DEPTH: Final = 100  # nested macro calls

READ: Final = 3  # as a shift: reading a character costs an eighth of a new one
ELEMENT: Final = 2  # cost of an element of a list, in characters
VALUE: Final = 32  # cost of a nested value, in characters
STRING: Final = 64  # cost of a new object, in characters
TEXTS: Final = (str, bytes)
SEQUENCES: Final[tuple[type[Collection[Any]], ...]] = (
    list,
    tuple,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    range,
    set,
)
_CONTAINERS = (list, tuple, dict)


class LimitExceeded(SecurityError):
    """A render takes more work or memory than any reasonable template needs for this row."""


class Budget:
    """The steps and the fuel that are left for the current render."""

    __slots__ = ("_row", "depth", "fuel", "steps")

    def __init__(self) -> None:
        self.start(None)

    def start(self, row: Any, fuel: int = MAX_FUEL) -> None:
        """Begin a render. The row is measured only when the basic limits are used up."""
        self.steps, self.fuel, self.depth, self._row = MAX_STEPS, fuel, 0, row

    def step(self, count: int) -> None:
        """Charge for running `count` syntax nodes."""
        self.steps -= count
        if self.steps < 0 and not self._extend():
            raise LimitExceeded(f"the template takes more than {MAX_STEPS} steps")

    def allocate(self, size: int) -> None:
        """Charge for `size` new characters."""
        self.fuel -= size
        if self.fuel < 0 and not self._extend():
            raise LimitExceeded(f"the template makes more than {MAX_FUEL} characters of text and lists")

    def read(self, size: int) -> None:
        """Charge for reading `size` characters."""
        self.allocate(size >> READ)

    def append(self, left: int, right: int) -> None:
        """Charge for concatenating two texts; the longer one is cheap, since templates append to long texts."""
        self.allocate(left + (right >> READ) if left < right else right + (left >> READ))

    def join(self, sizes: list[int]) -> None:
        """Charge for concatenating many texts."""
        if sizes:
            longest = max(sizes)
            self.append(sum(sizes) - longest, longest)

    def enter(self) -> None:
        """Begin a call that may recurse."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise LimitExceeded(f"macros call each other more than {MAX_DEPTH} levels deep")

    def leave(self) -> None:
        """End such a call."""
        self.depth -= 1

    def result(self, value: Any) -> Any:
        """Charge for the result of an operation; the items of a generator are charged as they are consumed."""
        if isinstance(value, TEXTS):
            self.allocate(len(value))
        elif isinstance(value, _CONTAINERS):
            self.allocate(len(value) * ELEMENT)
        elif isinstance(value, GeneratorType):
            return self.items(value, 1)
        return value

    def items(self, values: Iterable[Any], steps: int) -> Iterator[Any]:
        """Yields the values, charging `steps` for each."""
        for value in values:
            self.step(steps)
            yield value

    def estimate(self, value: Any) -> int:
        """An estimate of how many characters a value prints, to charge for it before it is printed or compared."""
        characters, values = self.measure(value)
        return characters + values * VALUE

    def measure(self, value: Any) -> tuple[int, int]:
        """The number of characters and of nested values in a value; shared values count once per occurrence."""
        if isinstance(value, str):
            return len(value), 0
        characters, values = measure(value, self.fuel)
        if characters + values * VALUE > self.fuel and self._row is not None:
            self._extend()
            characters, values = measure(value, self.fuel)
        if characters + values * VALUE > self.fuel:
            self.allocate(self.fuel + 1)
        return characters, values

    def _extend(self) -> bool:
        """Raise both limits by the size of the row, once per render; returns whether they now suffice."""
        if self._row is not None:
            characters, values = measure(self._row, 1 << 62)
            self._row = None
            self.steps += characters * STEPS_PER_CHARACTER + values * STEPS_PER_VALUE
            self.fuel += (characters + values * VALUE) * FUEL_PER_CHARACTER
        return self.steps >= 0 and self.fuel >= 0


def measure(value: Any, limit: int) -> tuple[int, int]:
    """The number of characters and of nested values in a value; stops counting beyond the limit."""
    characters = values = 0
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            values += 2 * len(item)
            if values * VALUE > limit:
                break
            todo += item
            todo += item.values()
        elif isinstance(item, SEQUENCES):
            values += len(item)
            if values * VALUE > limit:
                break
            todo += item
        elif isinstance(item, int):
            characters += item.bit_length() >> 2
        elif isinstance(item, bytes):
            characters += len(item)
        elif isinstance(item, Namespace):
            values += 1
            todo.append(item._Namespace__attrs)
    return characters, values


# ---- costs of operators, string methods and filters that a small template could make expensive
#
# Each function charges a `Budget` before its operation runs. It has the parameters of the operation; arguments that the
# operation will reject are ignored.


# ruff: noqa: ARG001 (a cost takes the arguments of its operation)


Cost = Callable[..., None]

_SIZED: Final[tuple[type[Collection[Any]], ...]] = (*SEQUENCES, dict, str, bytes)
_NUMBER = re.compile(r"\d+")


def binary_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _arithmetic(budget, operator, left, right)
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and not isinstance(many, int | float):
                budget.allocate(budget.estimate(many) * max(times, 0))
    elif operator == "%" and isinstance(left, TEXTS):
        percent(budget, left, right)
    else:
        budget.allocate(sum(len(side) * ELEMENT for side in (left, right) if isinstance(side, _SIZED)))


def _arithmetic(budget: Budget, operator: str, left: int, right: int) -> None:
    bits, other = left.bit_length(), right.bit_length()
    if operator == "**" and right > 0:
        budget.allocate((bits * right) ** 2 >> 6)
    elif bits > 64 or other > 64:
        budget.allocate(bits + other if operator in "+-" else bits * other >> 6)


def comparison(budget: Budget, value: Any, *_: Any) -> None:
    """The cost of an operand of `==`, `<` etc., or of a key."""
    if isinstance(value, TEXTS):
        budget.read(len(value))
    elif isinstance(value, _SIZED):
        budget.allocate(budget.estimate(value))
    elif isinstance(value, int):
        budget.read(value.bit_length())


def membership(budget: Budget, value: Any) -> None:
    """The cost of searching a value with `in`; a dict look-up is cheap."""
    if not isinstance(value, dict):
        comparison(budget, value)


def percent(budget: Budget, template: str | bytes, values: Any) -> None:
    """The cost of `template % values`. Any number in the template may be a width; with `*`, so may any value."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    many = values if isinstance(values, tuple) else (values,)
    widths = sum(abs(value) for value in many if isinstance(value, int)) if "*" in text else 0
    uses = text.count("%") if isinstance(values, dict) else 1
    budget.allocate(len(text) + numbers_in(text) + widths + budget.estimate(values) * uses)


def numbers_in(text: str) -> int:
    """The sum of the numbers written in a text."""
    return sum(int(digits[:18]) for digits in _NUMBER.findall(text))


def _width(budget: Budget, text: Any, width: int = 80, *_: Any) -> None:
    budget.allocate(max(width, 0))


def _replace(budget: Budget, text: Any, old: Any, new: Any, count: int | None = None) -> None:
    if not isinstance(text, bytes):
        text, old, new = (_text(budget, value) for value in (text, old, new))
    budget.read(len(text))
    found = text.count(old)
    budget.allocate((found if count is None or count < 0 else min(found, count)) * len(new))


def _text(budget: Budget, value: Any) -> str:
    """`str(value)`, which many filters call first."""
    if not isinstance(value, str):
        budget.allocate(budget.estimate(value))
    return str(value)


def _join(budget: Budget, separator: Any, items: Any) -> None:
    if isinstance(items, _SIZED):
        budget.allocate(budget.estimate(items) + len(items) * len(separator))


def _split(budget: Budget, text: str | bytes, sep: Any = None, maxsplit: int = -1) -> None:
    budget.read(len(text))
    pieces = len(text) // 2 if sep is None else text.count(sep)
    budget.allocate((pieces if maxsplit < 0 else min(pieces, maxsplit)) * STRING)


def _splitlines(budget: Budget, text: str | bytes, *_: Any, **__: Any) -> None:
    budget.allocate(len(text) // 2 * STRING)


def _expandtabs(budget: Budget, text: Any, tabsize: int = 8) -> None:
    budget.allocate(text.count("\t" if isinstance(text, str) else b"\t") * max(tabsize, 0))


def _translate(budget: Budget, text: str | bytes, table: Any, *_: Any) -> None:
    values = table.values() if isinstance(table, dict) else table
    budget.allocate(len(text) * max((len(value) for value in values if isinstance(value, str)), default=1))


def _to_bytes(budget: Budget, number: int, length: int = 1, *_: Any, **__: Any) -> None:
    budget.allocate(max(length, 0))


def _from_bytes(budget: Budget, number: int, data: Any, *_: Any, **__: Any) -> None:
    budget.allocate(len(data) ** 2)


def _search(budget: Budget, values: Any, *_: Any) -> None:
    """The cost of `count` and `index`."""
    comparison(budget, values)


def _affix(budget: Budget, text: Any, affix: Any, *_: Any) -> None:
    """The cost of `startswith` and `endswith`."""
    comparison(budget, affix)


def _read(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, TEXTS):
        budget.read(len(value))


METHODS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("startswith", "endswith"), _affix),
    **dict.fromkeys(("count", "index", "isdisjoint"), _search),
    "expandtabs": _expandtabs,
    "from_bytes": _from_bytes,
    "join": _join,
    "replace": _replace,
    "splitlines": _splitlines,
    "to_bytes": _to_bytes,
    "translate": _translate,
}
CHEAP_METHODS: Final = frozenset(("get", "items", "keys", "values"))


def method_cost(name: str) -> Cost:
    """The cost of a method of a built-in type."""
    return METHODS.get(name, _read)


# ---- filters


def whole_value(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    """The cost of printing, comparing or hashing a whole value."""
    budget.allocate(0 if isinstance(value, int | float) else budget.estimate(value))


def _sorted(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    budget.allocate(2 * budget.estimate(value))


def _join_filter(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    _join(budget, _text(budget, d), value)


def _sum(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    """The cost of `sum`; adding lists copies all previous elements each time."""
    weight = budget.estimate(iterable)
    budget.allocate(weight if isinstance(start, int | float) else weight * len(iterable) + budget.estimate(start))


def _list(budget: Budget, value: Any) -> None:
    if isinstance(value, TEXTS):
        budget.allocate(len(value) * (VALUE if value.isascii() else STRING))


def _indent(budget: Budget, s: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    if isinstance(s, str):
        _splitlines(budget, s)
        budget.allocate((len(s.splitlines()) + 1) * (len(width) if isinstance(width, str) else max(width, 0)))


def _batch(budget: Budget, value: Any, linecount: int, fill_with: Any = None) -> None:
    budget.allocate(0 if fill_with is None else linecount * ELEMENT)


def _slice(budget: Budget, value: Any, slices: int, fill_with: Any = None) -> None:
    _list(budget, value)
    budget.allocate(slices * STRING)


def _format(budget: Budget, value: Any, /, *args: Any, **kwargs: Any) -> None:
    percent(budget, _text(budget, value), kwargs or args)


def _tojson(
    budget: Budget,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    """The cost of `tojson`; each value may be on its own line, indented by its depth."""
    characters, values = budget.measure(value)
    budget.allocate(characters + values * VALUE)
    if separators is not None:
        budget.allocate(values * sum(map(len, separators)))
    if indent is not None:
        budget.allocate(values * (len(indent) if isinstance(indent, str) else indent) * _depth(value))


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        depth, level = depth + 1, inner
    return depth


def _int(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    """The cost of `int`, quadratic so that integers stay short and arithmetic stays cheap."""
    budget.allocate(len(value) ** 2 >> 6 if isinstance(value, str) else 0)


def _divisible(budget: Budget, value: Any, num: Any = 2) -> None:
    binary_operator(budget, "%", value, num)


def _member(budget: Budget, value: Any, seq: Any) -> None:
    comparison(budget, value)
    membership(budget, seq)


def _round(budget: Budget, value: Any, precision: int = 0, method: str = "common") -> None:
    budget.allocate(precision * precision >> 4)


def _quadratic(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """The cost of filters that are quadratic in their longest word and may print their arguments for each word."""
    size = len(_text(budget, value))
    budget.allocate((size * size >> 8) + size * (1 + sum(budget.estimate(more) for more in (*args, *kwargs.values()))))


def _expanding(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    """The cost of filters that produce several characters for each one, or take as long."""
    budget.allocate(8 * budget.estimate(value))


FILTERS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("sort", "min", "max", "groupby", "dictsort"), _sorted),
    **dict.fromkeys(("urlize", "wordwrap"), _quadratic),
    **dict.fromkeys(
        ("e", "escape", "forceescape", "pprint", "striptags", "title", "urlencode", "wordcount", "xmlattr"), _expanding
    ),
    "batch": _batch,
    "center": _width,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join_filter,
    "list": _list,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "sum": _sum,
    "tojson": _tojson,
}
# Filters that consume their items lazily.
LAZY_FILTERS: Final = frozenset(("batch", "map", "reject", "rejectattr", "select", "selectattr", "unique"))
# Filters that consume all items at once.
EAGER_FILTERS: Final = frozenset(("groupby", "join", "list", "max", "min", "slice", "sort", "sum"))
# Filters whose cost depends on neither the value's size nor its arguments.
CHEAP_FILTERS: Final = frozenset(("abs", "attr", "count", "d", "default", "first", "items", "last", "length"))
TESTS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("lower", "upper"), whole_value),
    **dict.fromkeys(("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">="), comparison),
    **dict.fromkeys(("<", "lt", "lessthan", "<=", "le"), comparison),
    **dict.fromkeys(("odd", "even", "divisibleby"), _divisible),
    "in": _member,
}


def filter_cost(name: str) -> Cost:
    """The cost of a filter."""
    return FILTERS.get(name, whole_value)
