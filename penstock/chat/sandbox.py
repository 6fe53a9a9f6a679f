"""The reference renderer: jinja2 in the sandbox, with the filters and globals that transformers gives a template.

A syntax tree (plain or annotated) enters, a compiled template leaves. Its text is transformers' text, byte for byte,
except that the date is the recipe's and that work is bounded: string repetition, powers, loop steps and output.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock.chat.conversation import Message
from penstock.chat.sentinels import Alphabet, Mark
from penstock.chat.syntax import ENVIRONMENT_OPTIONS, GenerationTag, call_filter, find, output, text
from penstock.errors import TemplateError

MAX_OUTPUT: Final = 64 << 20  # characters of one rendered text
MAX_STEPS: Final = 10_000_000  # of all its loops
STEP_FILTER: Final = "penstock_step"
OPEN_FILTER: Final = "penstock_open"
OUTSIDE_FILTER: Final = "penstock_outside"
NUMBER_FILTER: Final = "penstock_number"
STRING_FILTER: Final = "penstock_string"


class Numbers:
    """Tells the number of a message of the row being rendered, by identity: messages stay as they are."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}

    def load(self, messages: list[Message]) -> list[Message]:
        """Begin a row. The same object given twice is told apart by copying."""
        self._by_id = {id(message): number for number, message in enumerate(messages)}
        return messages if len(self._by_id) == len(messages) else self.load([dict(message) for message in messages])

    def of(self, value: object) -> int | str:
        """The number of a message taken from the conversation, '' of anything else."""
        return self._by_id.get(id(value), "")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter, which would append a newline to a list of the row before it fails on it."""
    if not isinstance(value, str):
        raise TypeError(f"indent of {type(value).__name__}")
    return do_indent(value, width, first, blank)


def raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def strftime_on(date: datetime.date) -> Callable[[str], str]:
    """transformers' `strftime_now`, at midnight of a fixed day."""
    return datetime.datetime(date.year, date.month, date.day).strftime


def mark_filters(alphabet: Alphabet, numbers: Numbers) -> dict[str, Callable[[Any], Any]]:
    """The filters that annotated templates use: OPEN and OUTSIDE print a mark and the number given or found."""

    def opener(mark: str) -> Callable[[Any], str]:
        known = [mark + alphabet.number(number) for number in range(256)]

        def open_region(value: Any) -> str:
            number = value if type(value) is int else numbers.of(value)
            if type(number) is not int:
                return mark  # a message that the template made up: a region without an owner
            return known[number] if 0 <= number < 256 else mark + alphabet.number(number)

        return open_region

    return {
        OPEN_FILTER: opener(alphabet.mark(Mark.OPEN)),
        OUTSIDE_FILTER: opener(alphabet.mark(Mark.OUTSIDE)),
        NUMBER_FILTER: numbers.of,
        STRING_FILTER: require_string,
    }


def require_string(value: object) -> object:
    """An operand of `+` next to a string constant, printed on its own: what is no string would have failed there."""
    if not isinstance(value, str):
        raise TypeError(f"can only concatenate str to str, not {type(value).__name__}")
    return value


class TemplateDict:
    """`dict(...)` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """`namespace(...)` for templates, without underscore names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=…)` works, as jinja2's own
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"Chat templates cannot store the underscore-prefixed {name!r} on a namespace.")


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment, with bounded `*` and `**`."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, date: datetime.date, alphabet: Alphabet) -> None:
        super().__init__(extensions=[GenerationTag, loopcontrols], **ENVIRONMENT_OPTIONS)
        self.filters["tojson"] = tojson
        self.filters["indent"] = indent
        self.numbers = Numbers()
        self.steps = 0  # of all loops in this render
        self.filters.update(mark_filters(alphabet, self.numbers))
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_on(date)
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 1 << 16:
                raise SecurityError("a power of more than 65536 bits")
        else:
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_OUTPUT:
                    raise SecurityError(f"a repetition of more than {MAX_OUTPUT} elements")
        return super().call_binop(context, operator, left, right)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Let errors be as they are: tracebacks that show the template would hold their frames, and these the rows."""
        raise  # the one that is being handled

    def parse_template(self, source: str) -> nodes.Template:
        """The syntax tree, or a TemplateError that names the line."""
        try:
            return self.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error

    def build(self, tree: nodes.Template) -> Render:
        """The compiled tree, as a function from a context to its text."""
        self.count_steps(tree)
        try:
            template = jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))
        except (jinja2.TemplateError, SyntaxError) as error:
            raise TemplateError(f"the chat template can't be compiled: {error}") from error

        def render(context: Mapping[str, Any]) -> str:
            self.steps = 0
            return bounded_join(template.generate(context))

        return render

    def count_steps(self, tree: nodes.Template) -> None:
        """Let every loop count its steps, so that nested ones end."""

        @jinja2.pass_context  # or the compiler would call it once and keep the result
        def step(_: Any, nothing: str) -> str:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise SecurityError(f"the loops take more than {MAX_STEPS} steps")
            return nothing

        self.filters[STEP_FILTER] = step
        for loop in find(tree, nodes.For):
            loop.body.insert(0, output(call_filter(STEP_FILTER, text(""))).set_lineno(loop.lineno))
        tree.set_environment(self)


Render = Callable[[Mapping[str, Any]], str]


def bounded_join(chunks: Iterable[str]) -> str:
    """The chunks joined, or an error once they exceed the limit."""
    parts: list[str] = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_OUTPUT:
            raise SecurityError(f"the rendered text has more than {MAX_OUTPUT} characters")
        parts.append(chunk)
    return "".join(parts)
