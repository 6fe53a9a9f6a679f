"""What operators, string methods and filters cost, where a small template could make them expensive.

Each function charges a `Budget` before its operation runs. It takes what the operation takes; arguments that the
operation will reject itself are ignored.
"""

# ruff: noqa: ARG001 (a cost takes the arguments of its operation)
from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Final

from penstock.template.jinja.budget import ELEMENT, SEQUENCES, STRING, TEXTS, VALUE, Budget

Cost = Callable[..., None]

_SIZED: Final[tuple[type[Collection[Any]], ...]] = (*SEQUENCES, dict, str, bytes)
_NUMBER = re.compile(r"\d+")


def binary_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _arithmetic(budget, operator, left, right)
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and not isinstance(many, int | float):
                budget.make(budget.weigh(many) * max(times, 0))
    elif operator == "%" and isinstance(left, TEXTS):
        percent(budget, left, right)
    else:
        budget.make(sum(len(side) * ELEMENT for side in (left, right) if isinstance(side, _SIZED)))


def _arithmetic(budget: Budget, operator: str, left: int, right: int) -> None:
    bits, other = left.bit_length(), right.bit_length()
    if operator == "**" and right > 0:
        budget.make((bits * right) ** 2 >> 6)
    elif bits > 64 or other > 64:
        budget.make(bits + other if operator in "+-" else bits * other >> 6)


def comparison(budget: Budget, value: Any, *_: Any) -> None:
    """An operand of `==`, `<` and the like, or a key."""
    if isinstance(value, TEXTS):
        budget.read(len(value))
    elif isinstance(value, _SIZED):
        budget.make(budget.weigh(value))
    elif isinstance(value, int):
        budget.read(value.bit_length())


def membership(budget: Budget, value: Any) -> None:
    """What is searched by `in`; a dict is not searched."""
    if not isinstance(value, dict):
        comparison(budget, value)


def percent(budget: Budget, template: str | bytes, values: Any) -> None:
    """`template % values`: any number in the template may be a width, and with `*` any number in the values."""
    text = template if isinstance(template, str) else template.decode("latin-1")
    many = values if isinstance(values, tuple) else (values,)
    widths = sum(abs(value) for value in many if isinstance(value, int)) if "*" in text else 0
    uses = text.count("%") if isinstance(values, dict) else 1
    budget.make(len(text) + numbers_in(text) + widths + budget.weigh(values) * uses)


def numbers_in(text: str) -> int:
    """The sum of the numbers written in a text."""
    return sum(int(digits[:18]) for digits in _NUMBER.findall(text))


def _width(budget: Budget, text: Any, width: int = 80, *_: Any) -> None:
    budget.make(max(width, 0))


def _replace(budget: Budget, text: Any, old: Any, new: Any, count: int | None = None) -> None:
    if not isinstance(text, bytes):
        text, old, new = (_text(budget, value) for value in (text, old, new))
    budget.read(len(text))
    found = text.count(old)
    budget.make((found if count is None or count < 0 else min(found, count)) * len(new))


def _text(budget: Budget, value: Any) -> str:
    """`str(value)`, which filters start with."""
    if not isinstance(value, str):
        budget.make(budget.weigh(value))
    return str(value)


def _join(budget: Budget, separator: Any, items: Any) -> None:
    if isinstance(items, _SIZED):
        budget.make(budget.weigh(items) + len(items) * len(separator))


def _split(budget: Budget, text: str | bytes, sep: Any = None, maxsplit: int = -1) -> None:
    budget.read(len(text))
    pieces = len(text) // 2 if sep is None else text.count(sep)
    budget.make((pieces if maxsplit < 0 else min(pieces, maxsplit)) * STRING)


def _splitlines(budget: Budget, text: str | bytes, *_: Any, **__: Any) -> None:
    budget.make(len(text) // 2 * STRING)


def _expandtabs(budget: Budget, text: Any, tabsize: int = 8) -> None:
    budget.make(text.count("\t" if isinstance(text, str) else b"\t") * max(tabsize, 0))


def _translate(budget: Budget, text: str | bytes, table: Any, *_: Any) -> None:
    values = table.values() if isinstance(table, dict) else table
    budget.make(len(text) * max((len(value) for value in values if isinstance(value, str)), default=1))


def _to_bytes(budget: Budget, number: int, length: int = 1, *_: Any, **__: Any) -> None:
    budget.make(max(length, 0))


def _from_bytes(budget: Budget, number: int, data: Any, *_: Any, **__: Any) -> None:
    budget.make(len(data) ** 2)


def _search(budget: Budget, values: Any, *_: Any) -> None:
    """`count` and `index` of lists, or of texts."""
    comparison(budget, values)


def _affix(budget: Budget, text: Any, affix: Any, *_: Any) -> None:
    """`startswith` and `endswith`."""
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


def method(name: str) -> Cost:
    """The cost of a method of a built-in type."""
    return METHODS.get(name, _read)


# ---- filters


def printed(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    """Prints, compares or hashes the value as a whole, some of it twice."""
    budget.make(0 if isinstance(value, int | float) else budget.weigh(value))


def _sorted(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    budget.make(2 * budget.weigh(value))


def _join_filter(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    _join(budget, _text(budget, d), value)


def _sum(budget: Budget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    """Sums of lists copy all that came before."""
    weight = budget.weigh(iterable)
    budget.make(weight if isinstance(start, int | float) else weight * len(iterable) + budget.weigh(start))


def _list(budget: Budget, value: Any) -> None:
    if isinstance(value, TEXTS):
        budget.make(len(value) * (VALUE if value.isascii() else STRING))


def _indent(budget: Budget, s: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    if isinstance(s, str):
        _splitlines(budget, s)
        budget.make((len(s.splitlines()) + 1) * (len(width) if isinstance(width, str) else max(width, 0)))


def _batch(budget: Budget, value: Any, linecount: int, fill_with: Any = None) -> None:
    budget.make(0 if fill_with is None else linecount * ELEMENT)


def _slice(budget: Budget, value: Any, slices: int, fill_with: Any = None) -> None:
    _list(budget, value)
    budget.make(slices * STRING)


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
    """Each value may stand on a line of its own, indented by its depth."""
    characters, values = budget.measure(value)
    budget.make(characters + values * VALUE)
    if separators is not None:
        budget.make(values * sum(map(len, separators)))
    if indent is not None:
        budget.make(values * (len(indent) if isinstance(indent, str) else indent) * _depth(value))


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
    """Keeps integers short enough that all arithmetic is cheap."""
    budget.make(len(value) ** 2 >> 6 if isinstance(value, str) else 0)


def _divisible(budget: Budget, value: Any, num: Any = 2) -> None:
    binary_operator(budget, "%", value, num)


def _member(budget: Budget, value: Any, seq: Any) -> None:
    comparison(budget, value)
    membership(budget, seq)


def _round(budget: Budget, value: Any, precision: int = 0, method: str = "common") -> None:
    budget.make(precision * precision >> 4)


def _slow(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    """Takes a time quadratic in its longest word, and may print its arguments for each word."""
    size = len(_text(budget, value))
    budget.make((size * size >> 8) + size * (1 + sum(budget.weigh(more) for more in (*args, *kwargs.values()))))


def _bulky(budget: Budget, value: Any, *_: Any, **__: Any) -> None:
    """Makes several characters of one, or takes the time for it."""
    budget.make(8 * budget.weigh(value))


FILTERS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("sort", "min", "max", "groupby", "dictsort"), _sorted),
    **dict.fromkeys(("urlize", "wordwrap"), _slow),
    **dict.fromkeys(
        ("e", "escape", "forceescape", "pprint", "striptags", "title", "urlencode", "wordcount", "xmlattr"), _bulky
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
# Filters that take one item after the other, as they are asked for.
LAZY_FILTERS: Final = frozenset(("batch", "map", "reject", "rejectattr", "select", "selectattr", "unique"))
# Filters that take all items at once, whatever they are asked for.
EAGER_FILTERS: Final = frozenset(("groupby", "join", "list", "max", "min", "slice", "sort", "sum"))
# Filters whose cost depends on neither the value's size nor its arguments.
CHEAP_FILTERS: Final = frozenset(("abs", "attr", "count", "d", "default", "first", "items", "last", "length"))
TESTS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("lower", "upper"), printed),
    **dict.fromkeys(("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">="), comparison),
    **dict.fromkeys(("<", "lt", "lessthan", "<=", "le"), comparison),
    **dict.fromkeys(("odd", "even", "divisibleby"), _divisible),
    "in": _member,
}


def filtered(name: str) -> Cost:
    """The cost of a filter."""
    return FILTERS.get(name, printed)
