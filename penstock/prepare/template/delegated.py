"""Operations that the machine delegates to Python, with the functions of the reference itself.

They are those that templates rarely use, and those that depend on the interpreter's own tables. Each gives a number or
a text without an origin. Their work is limited as in the reference; an error makes the machine give up.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

from jinja2.runtime import Undefined
from markupsafe import Markup

from penstock.prepare.template import budget as costs
from penstock.prepare.template.sandbox import Sandbox, charge

FUEL: Final = 1 << 22  # of one operation …
FUEL_PER_CHARACTER: Final = 32  # … plus this for each character of its arguments


class Delegate:
    """Performs operations by name, as the machine calls them."""

    def __init__(self, date: datetime.date) -> None:
        self._date = date
        self._midnight = datetime.datetime(date.year, date.month, date.day)
        self._undefined = Undefined()

    @property
    def parts(self) -> tuple[Callable[..., Any], Undefined, type[Markup]]:
        """What `native.Program` takes."""
        return self, self._undefined, Markup

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self._date)

    def __call__(self, kind: str, name: str, args: tuple[Any, ...]) -> Any:
        sandbox = self._sandbox
        size = sum(len(arg) for arg in args if isinstance(arg, str))
        sandbox.budget.start(None, FUEL + FUEL_PER_CHARACTER * size)
        match kind:
            case "filter" if name == "strftime_now":
                return sandbox.strftime(self._midnight, args[0])
            case "filter":
                return sandbox.call_filter(name, args[0], args[1:])
            case "test":
                return sandbox.call_test(name, args[0], args[1:])
            case "method":
                charge(costs.method_cost(name), sandbox.budget, *args)
                return getattr(args[0], name)(*args[1:])
            case "format":
                text, values, named = args
                formatted = sandbox.wrap_str_format(text.format)
                return None if formatted is None else formatted(*values, **named)
            case _:
                return self._operator(name, *args)

    def _operator(self, name: str, left: Any, right: Any) -> Any:
        if name == "order":
            return (left > right) - (left < right)
        costs.binary_operator(self._sandbox.budget, name, left, right)
        return self._sandbox.binop_table[name](left, right)
