"""Prints one example token by token: the origin of each run, and whether it is trained.

Each run of tokens gets a line labelled with its message, role, part and token count; continuation lines are indented.
Trained text is green and marked with `+` in the gutter, so the output is readable with and without colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple, SupportsIndex

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

from penstock.chat.conversation import Part, Role
from penstock.look.visible import visible_lines
from penstock.view.example import Example, Pair
from penstock.view.view import Served

TokenBytes = Callable[[int], bytes]


class Stretch(NamedTuple):
    """Consecutive tokens of one run with one weight."""

    message: int
    role: Role
    part: Part
    weight: float
    ids: list[int]


def show(view: Served, index: SupportsIndex, token_bytes: TokenBytes, console: Console) -> None:
    """Print an item of a view; `token_bytes` returns the bytes of a token id."""
    item = view[index]
    if isinstance(item, Example):
        _show_example(item, "", token_bytes, console)
        return
    _show_example(item.chosen, _side("chosen", item), token_bytes, console)
    _line(console, Text())
    _show_example(item.rejected, _side("rejected", item), token_bytes, console)


def stretches(example: Example) -> Iterator[Stretch]:
    """The non-empty runs of an example, split where the weight changes."""
    runs, weights = example.runs, example.loss_weights
    owner = np.repeat(np.arange(len(runs.roles)), runs.lengths)
    changes = np.flatnonzero((owner[1:] != owner[:-1]) | (weights[1:] != weights[:-1])) + 1
    bounds = [0, *changes.tolist(), len(example)] if len(example) else []
    for start, end in pairwise(bounds):
        run = int(owner[start])
        yield Stretch(
            int(runs.messages[run]),
            Role(int(runs.roles[run])),
            Part(int(runs.parts[run])),
            float(weights[start]),
            example.input_ids[start:end].tolist(),
        )


def label_name(desirable: bool) -> str:
    """KTO's label in words."""
    return "labelled as good" if desirable else "labelled as bad"


def _side(name: str, pair: Pair) -> str:
    return f"{name} (after a common prompt of {pair.prompt_length} tokens) · "


def _show_example(example: Example, side: str, token_bytes: TokenBytes, console: Console) -> None:
    trained, total = int(example.loss_mask.sum()), len(example)
    begin = f" · from token {example.start} of its row" if example.start else ""
    member = f"{example.row.member}: " if example.row.member else ""
    label = "" if example.desirable is None else f" · {label_name(example.desirable)}"
    place = f"{member}row {example.row.row} of source {example.row.source}{label}"
    _line(console, Text(f"{side}{place} · {total} tokens, {trained} trained ({trained / total:.0%}){begin}", "bold"))
    _line(console, Text(f"{'#':>4}  {'role':<9}  {'part':<7}  {'tokens':>6}  {'weight':>6}", "dim"))
    for stretch in stretches(example):
        _show_stretch(stretch, token_bytes, console)


def _show_stretch(stretch: Stretch, token_bytes: TokenBytes, console: Console) -> None:
    trained = stretch.weight > 0
    number = "" if stretch.message < 0 else str(stretch.message)
    role, part = stretch.role.name.lower(), stretch.part.name.lower()
    if stretch.role is Role.NONE:  # named as in reports
        role, part = "template", ""
    weight = f"{stretch.weight:g}" if trained else ""
    label = f"{number:>4}  {role:<9}  {part:<7}  {len(stretch.ids):>6}  {weight:>6}  "
    for line in visible_lines(b"".join(map(token_bytes, stretch.ids))):
        gutter = "+│ " if trained else " │ "
        for piece in _wrapped(line, console, len(label) + len(gutter)):
            _line(console, Text.assemble((label, "cyan"), (gutter, "dim"), (piece, "green" if trained else "dim")))
            label = " " * len(label)


def _wrapped(line: str, console: Console, indent: int) -> list[str]:
    """The line, wrapped to its column in a terminal; piped output is not wrapped."""
    width = console.width - indent
    if not console.is_terminal or width < 20 or cell_len(line) <= width:
        return [line]
    return chop_cells(line, width)


def _line(console: Console, text: Text) -> None:
    # A soft wrap keeps the line whole when it is copied or piped.
    console.print(text, soft_wrap=True)
