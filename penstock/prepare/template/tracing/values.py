"""Values of a field that are not text, and operations that print values with their labels.

A labelled value equals the plain one and is printed as one run. A container without a label (a message, a call, one
that the template makes) is printed in pieces, so that each labelled value in it is a run. Every function here returns
exactly the text that it is given, with or without labels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from markupsafe import Markup, escape

from penstock.prepare.template.budget import Budget
from penstock.prepare.template.sandbox import MeteredFormatter
from penstock.prepare.template.tracing.provenance import (
    Traced,
    TracedSpan,
    concat,
    labelled,
    relabelled,
    traced,
    without_owners,
)


class Labelled:
    """A container, number, boolean or null of a field. Its attributes begin with `_` to stay hidden from templates."""

    _label: int
    _budget: Budget

    def __str__(self) -> str:
        return labelled(repr(self), self._label, self._budget)


class _Dict(Labelled, dict[Any, Any]):
    pass


class _List(Labelled, list[Any]):
    pass


class _Int(Labelled, int):
    pass


class _Float(Labelled, float):
    pass


class _Constant(Labelled):
    """True, False or None, whose types can't be subclassed."""

    def __init__(self, value: bool | None) -> None:
        self._value = value

    def __repr__(self) -> str:
        return repr(self._value)

    def __eq__(self, other: object) -> bool:
        return bool(self._value == unlabelled(other))

    def __hash__(self) -> int:
        return hash(self._value)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __index__(self) -> int:
        return int(self._value)  # type: ignore[arg-type]  # of None it fails, as it should

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)


_KINDS: Final[dict[type, Callable[[Any], Labelled]]] = {
    dict: _Dict,
    list: _List,
    int: _Int,
    float: _Float,
    **dict.fromkeys((bool, type(None)), _Constant),
}


def trace_field(value: Any, message: int, label: int, budget: Budget, only_text: bool) -> Any:
    """Copies a JSON value with all of its strings traced, and unless `only_text` all values in it labelled."""
    if isinstance(value, str):
        whole = len(value)
        return (
            Traced(value, (TracedSpan(0, whole, message),), budget, (TracedSpan(0, whole, label),)) if value else value
        )
    made: Any = value
    kind: Any = type(value) if only_text else _KINDS.get(type(value), type(value))
    if isinstance(value, dict):
        items = (trace_field(item, message, label, budget, only_text) for item in value.values())
        made = kind(zip((trace_field(key, message, label, budget, only_text) for key in value), items, strict=True))
    elif isinstance(value, list | tuple):
        made = kind([trace_field(item, message, label, budget, only_text) for item in value])
    elif kind is not type(value):
        made = kind(value)
    if isinstance(made, Labelled):
        made._label, made._budget = label, budget
    return made


def unlabelled(value: Any) -> Any:
    """The plain value of a labelled constant; any other value as it is."""
    return value._value if isinstance(value, _Constant) else value


def rewritten(value: Any, text: str) -> str:
    """A text made from the characters of a value, with the label that all of the value has."""
    if isinstance(value, Labelled):
        return labelled(text, value._label, value._budget)
    return relabelled(value, text) if isinstance(value, Traced) else text


def has_labels(value: Any) -> bool:
    """Whether a value, or a value in it, has a label."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Labelled) or (isinstance(item, Traced) and item.labels):
            return True
        if isinstance(item, dict):
            todo += item
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item
    return False


_UNSAFE = re.compile("[&<>'\"]")


class TracedMarkup(Markup):
    """Safe text that prints its labels."""

    _text: Traced | None = None

    def __str__(self) -> str:
        return str.__str__(self) if self._text is None else self._text

    def __add__(self, other: Any, /) -> Any:
        made = super().__add__(other)
        return made if made is NotImplemented else marked_safe(made, _joined(str(self), _escaped(other)))

    def __radd__(self, other: Any, /) -> Any:
        made = super().__radd__(other)
        return made if made is NotImplemented else marked_safe(made, _joined(_escaped(other), str(self)))


def _joined(one: str, other: str) -> str:
    return without_owners(concat((one, other)))


def _escaped(value: Any) -> str:
    """What `Markup` makes of the other operand of a sum, with its labels."""
    if hasattr(value, "__html__"):
        return str(value)
    if not isinstance(value, Traced):
        return str(escape(value))
    parts: list[str] = []
    position = 0
    for found in _UNSAFE.finditer(value):
        parts += [value.cut(position, found.start()), relabelled(value.cut(*found.span()), str(escape(found[0])))]
        position = found.end()
    return concat((*parts, value.cut(position, len(value))))


def marked_safe(text: Markup, labels: str) -> Markup:
    """Safe text, with the labels of an equal text."""
    made = TracedMarkup(text)
    made._text = traced(labels)
    return made


# ---- containers


class _Style(NamedTuple):
    """How a container is printed."""

    write: Callable[[Any], str]  # a whole value
    brackets: Callable[[Any], tuple[str, str]]
    separator: str
    colon: str
    indent: str | None = None
    sort_keys: bool = False


def tojson(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """The filter `tojson`."""

    def write(value: Any) -> str:
        options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, default=unlabelled, **options)

    text = write(value)
    if not isinstance(value, dict | list | tuple):
        return rewritten(value, text)
    separator, colon = separators or (", " if indent is None else ",", ": ")
    step = " " * indent if isinstance(indent, int) else indent
    return _printed(value, text, _Style(write, _json_brackets, separator, colon, step, sort_keys))


def text_of(value: Any) -> str:
    """The text of a value, as Python prints it."""
    text = str(value)
    if not isinstance(value, dict | list | tuple):
        return text
    return _printed(value, text, _Style(repr, _python_brackets, ", ", ": "))


def _json_brackets(value: Any) -> tuple[str, str]:
    return ("{", "}") if isinstance(value, dict) else ("[", "]")


def _python_brackets(value: Any) -> tuple[str, str]:
    return ("(", ",)" if len(value) == 1 else ")") if isinstance(value, tuple) else _json_brackets(value)


def _printed(value: Any, text: str, style: _Style) -> str:
    """The text of a container, with the labels of what is in it."""
    if isinstance(value, Labelled) or not has_labels(value):
        return rewritten(value, text)
    made = concat(_pieces(value, style, "\n"))
    return made if made == text else text


def _pieces(value: Any, style: _Style, line: str) -> Iterator[str]:
    """The text of a value in pieces; `line` begins a line of its container."""
    if not isinstance(value, dict | list | tuple) or isinstance(value, Labelled) or not value:
        text = style.write(value)
        yield rewritten(value, text if style.indent is None else text.replace("\n", line))
        return
    inner = "" if style.indent is None else line + style.indent
    before, closing = style.brackets(value)
    items: Any = value
    if isinstance(value, dict):
        items = sorted(value.items()) if style.sort_keys else value.items()
    for item in items:
        yield before + inner
        if isinstance(value, dict):
            yield rewritten(item[0], style.write(item[0]))
            yield style.colon
        yield from _pieces(item[1] if isinstance(value, dict) else item, style, inner)
        before = style.separator
    yield ("" if style.indent is None else line) + closing


# ---- formatting

_CONVERSION = re.compile(r"%(?:\(([^()]*)\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+)?)?[hlL]?(.)", re.DOTALL)


def percent(template: str, values: Any, text: str, text_of: Callable[[Any], str]) -> str:
    """The text of `template % values`, with the labels of the inserted values."""
    if not has_labels([template, values]):
        return text
    try:
        made = concat(_percent_pieces(template, values, text_of))
    except (TypeError, ValueError, LookupError):
        return text  # a name with parentheses, which Python pairs
    return made if made == text else text


def _percent_pieces(template: str, values: Any, text_of: Callable[[Any], str]) -> Iterator[str]:
    own, end = without_owners(template), 0
    rest = iter(values if isinstance(values, tuple) else (values,))
    for found in _CONVERSION.finditer(template):
        yield own[end : found.start()]
        end = found.end()
        name, width, precision, kind = found.groups()
        if kind == "%":
            yield "%"
            continue
        stars = [next(rest, 0) for number in (width, precision) if number == "*"]
        value = next(rest, None) if name is None else values[name]
        part = found[0] % ((*stars, value) if name is None else values)
        whole = text_of(value) if kind == "s" else ""
        yield without_owners(whole) if part == whole else rewritten(value, part)
    yield own[end:]


class TracingFormatter(MeteredFormatter):
    """`str.format`, keeping the labels of inserted values."""

    def __init__(self, sandbox: Any, **kwargs: Any) -> None:
        super().__init__(sandbox, **kwargs)
        self._open: list[list[str]] = []  # the pieces of the text, and of the format of a value inside it
        self._pieces: list[str] = []

    def parse(self, format_string: str) -> Iterator[tuple[str, str | None, str | None, str | None]]:
        pieces: list[str] = []
        self._open.append(pieces)
        for found in super().parse(format_string):
            pieces.append(found[0])
            yield found
        self._pieces = self._open.pop()

    def format_field(self, value: Any, format_spec: str) -> Any:
        text = super().format_field(value, format_spec)
        whole = self._env.text(value)
        self._open[-1].append(without_owners(whole) if text == whole else rewritten(value, text))
        return text

    def vformat(self, format_string: str, args: Any, kwargs: Any) -> str:
        text = super().vformat(format_string, args, kwargs)
        made = concat(self._pieces)
        return made if made == text and made.labels else text
