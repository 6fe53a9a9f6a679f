"""The chains of a row, and each answer as inference produces it beside what later turns see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.chat.conversation import Role
from penstock.errors import UsageError
from penstock.look.terminal.show import TokenBytes, show
from penstock.look.visible import visible_lines
from penstock.view.example import Example
from penstock.view.view import Served


def show_turns(view: Served, index: int, token_bytes: TokenBytes, console: Console) -> None:
    """Print all examples that a view has of an item's row, then its answers side by side."""
    items = list(_items(view, index))
    for item in items:
        show(view, item, token_bytes, console)
        console.print()
    console.print(turns_table([_example(view, item) for item in items], token_bytes))


def turns_table(chains: Sequence[Example], token_bytes: TokenBytes) -> Table:
    """The answers of a row's chains, of which the last one is the root."""
    table = Table("message", "chain", "trained", "in the last chain", "cut", title="turns", show_lines=True)
    root = chains[-1]
    for number, chain in enumerate(chains):
        for message in sorted(_trained(chain)):
            own, later = _ids(chain, message), _ids(root, message)
            texts = [b"".join(map(token_bytes, ids)) for ids in (own, later)]
            shown = [Text("\n".join(visible_lines(text))) for text in texts]
            cut = f"{len(own) - len(later):+d} tokens" if texts[0] != texts[1] else ""
            table.add_row(str(message), str(number), shown[0], shown[1] if cut else Text("the same", "dim"), cut)
    return table


def _items(view: Served, index: int) -> Iterator[int]:
    """The neighbouring items of the same row, whose examples are adjacent."""
    row = _example(view, index).row
    first = last = index
    while first and _example(view, first - 1).row == row:
        first -= 1
    while last + 1 < len(view) and _example(view, last + 1).row == row:
        last += 1
    return iter(range(first, last + 1))


def _example(view: Served, index: int) -> Example:
    item = view[index]
    if not isinstance(item, Example):
        raise UsageError("--turns: a preference pair has no chains")
    return item


def _owners(example: Example) -> np.ndarray:
    """The assistant message of each token; -1: none."""
    messages = np.where(example.runs.roles == Role.ASSISTANT, example.runs.messages, -1)
    return np.repeat(messages, example.runs.lengths)


def _trained(example: Example) -> set[int]:
    return set(_owners(example)[example.loss_mask].tolist()) - {-1}


def _ids(example: Example, message: int) -> list[int]:
    ids: list[int] = example.input_ids[_owners(example) == message].tolist()
    return ids
