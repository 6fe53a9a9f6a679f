"""Limits the work of one render. No clock is involved, so a template and a row always stop at the same point.

Steps limit time: each run of a loop or macro body costs as many steps as the body has syntax nodes. Fuel limits memory:
a new character costs one unit, reading a character an eighth of one. Both limits grow with the row, so that large rows
are served; hostile templates are stopped within seconds and a few hundred MB.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
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
