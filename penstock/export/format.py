"""What a format is: one small protocol. A module in `formats/` with a `FORMAT` that satisfies it is a new `--to`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from penstock.errors import UsageError
from penstock.export import formats
from penstock.export.folder import Folder
from penstock.export.rows import Block, ExportRows
from penstock.options import nearest


class Part(NamedTuple):
    """Rows that are written, recorded and resumed together. Cut by tokens alone, whoever writes them."""

    number: int
    of: int  # how many parts there are
    first: int  # rows first:last
    last: int
    first_token: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Takes:
    """What rows a format can hold."""

    pairs: bool = False
    packed: bool = False
    weights: bool = False  # loss weights other than 0 and 1


class Format(Protocol):
    """How rows become the files of a trainer."""

    summary: str  # one line for people
    takes: Takes
    part_tokens: int  # of a part, unless the user says otherwise

    def check(self, rows: ExportRows) -> None:
        """Refuse rows that the format can't hold, before anything is written."""
        ...

    def write(self, part: Part, blocks: Iterator[Block], rows: ExportRows, folder: Folder) -> dict[str, int]:
        """Write the files of a part; gives their names with the sizes they have (or reach at least)."""
        ...

    def finish(self, parts: list[Part], rows: ExportRows, folder: Folder) -> dict[str, Any]:
        """Write what describes all parts together; gives facts for the manifest."""
        ...


def format_names() -> list[str]:
    """All formats there are."""
    return sorted(module.name for module in pkgutil.iter_modules(formats.__path__))


def find_format(name: str) -> Format:
    """A format by its name."""
    known = format_names()
    if name not in known:
        raise UsageError(f"--to {name}: no such format.{nearest(name, known)} There are: {', '.join(known)}.")
    found: Format = import_module(f"penstock.export.formats.{name}").FORMAT
    return found
