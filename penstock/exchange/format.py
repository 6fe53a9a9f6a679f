"""The protocol of export formats. A module in `formats/` whose `FORMAT` implements it is a value of `--to`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from penstock.errors import UsageError
from penstock.exchange.folder import ExportFolder
from penstock.exchange.formats import format_names
from penstock.exchange.rows import Block, ExportRows
from penstock.options import nearest


class ExportPart(NamedTuple):
    """A range of rows that is written, recorded and resumed as a unit. Parts depend on token counts alone."""

    number: int
    of: int  # the number of parts
    first: int  # rows first:last
    last: int
    first_token: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Supports:
    """The kinds of rows that a format supports."""

    pairs: bool = False
    packed: bool = False
    weights: bool = False  # loss weights other than 0 and 1
    separator: bool = False  # a token after each document
    labels: bool = False  # answers labelled as desirable or not (KTO)


class ExportFormat(Protocol):
    """Writes rows as the files of a trainer."""

    supports: Supports
    part_tokens: int  # default size of a part

    def check(self, rows: ExportRows) -> None:
        """Raises an error for rows that the format can't express, before anything is written."""
        ...

    def write(
        self, part: ExportPart, blocks: Iterator[Block], rows: ExportRows, folder: ExportFolder
    ) -> dict[str, int]:
        """Writes the files of a part; returns their names and (minimum) sizes."""
        ...

    def finish(self, parts: list[ExportPart], rows: ExportRows, folder: ExportFolder) -> dict[str, Any]:
        """Writes files that describe all parts; returns facts for the manifest."""
        ...


def find_format(name: str) -> ExportFormat:
    """Looks up a format by name."""
    known = format_names()
    if name not in known:
        raise UsageError(f"--to {name}: no such format.{nearest(name, known)} Available: {', '.join(known)}.")
    found: ExportFormat = import_module(f"penstock.exchange.formats.{name}").FORMAT
    return found
