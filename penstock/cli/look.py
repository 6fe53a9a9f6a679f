"""`penstock show` and `penstock stats`: look at what was prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from penstock.errors import RegionsUnknown, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.api import Dataset, View

Where = Annotated[str, typer.Argument(metavar="DATASET", help="A dataset's folder, or its key in the cache")]
Cached = Annotated[str | None, typer.Option("--cache", help="Cache folder, for keys")]
TrainOn = Annotated[str, typer.Option(help="Loss policy: which tokens are trained")]
MaxLength = Annotated[int | None, typer.Option(help="Longest sequence")]


def show(
    dataset: Where,
    row: Annotated[int, typer.Option(help="Number of the example or pair, from 0")] = 0,
    noted: Annotated[
        str | None, typer.Option(help="List the rows with this note, such as tools_dropped; --row counts among them")
    ] = None,
    train_on: TrainOn = "all_assistant_messages",
    max_length: MaxLength = None,
    cache: Cached = None,
) -> None:
    """Print an example's tokens: who made them, and which are trained."""
    from rich.console import Console

    from penstock.api import open_
    from penstock.report.show import show as show_item

    opened = open_(dataset, cache=cache)
    console = Console()
    view = _view(opened, console, train_on=train_on, max_length=max_length)
    items = range(len(view)) if noted is None else _noted(opened, view, noted, console)
    if not 0 <= row < len(items):
        kind = "rows" if noted is None else f"rows with the note {noted}"
        raise UsageError(f"--row {row}: the view has {len(items):,} {kind}, numbered from 0")
    row = items[row]
    table = opened.vocabulary.token_bytes
    show_item(view, row, lambda token: table[token], console)


def stats(
    dataset: Where,
    train_on: TrainOn = "all_assistant_messages",
    max_length: MaxLength = None,
    cache: Cached = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Count rows, tokens, lengths and what is trained."""
    from rich.console import Console

    from penstock.api import open_
    from penstock.report.stats import stats as count
    from penstock.report.stats_table import stats_table

    console = Console(stderr=json)
    counted = count(_view(open_(dataset, cache=cache), console, train_on=train_on, max_length=max_length))
    if json:
        print(orjson.dumps(counted.to_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        console.print(stats_table(counted))


def _noted(dataset: Dataset, view: View, note: str, console: Console) -> list[int]:
    """The items of a view whose rows have a note, listed with their places."""
    import numpy as np

    from penstock.chat.notes import told

    numbers = dataset.noted(note)
    items: list[int] = np.flatnonzero(np.isin(view.numbers, numbers)).tolist()
    console.print(f"{note}: {told(note, dataset.ledger['notes'][note])}", highlight=False, markup=False)
    files = dataset.notes.get("files", [])
    for k, item in enumerate(items):
        place = view[item].row
        name = files[place.source]["name"] if place.source < len(files) else f"source {place.source}"
        console.print(f"{k:>6}  {name} row {place.row}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    return items


def _view(dataset: Dataset, console: Console, **options: Any) -> View:
    """A view to look at; rows whose regions are unknown are left out and said."""
    try:
        return dataset.view(**options).scanned()
    except RegionsUnknown as error:
        console.print(f"[yellow]left out:[/] {error}", highlight=False)
        return dataset.view(**options, regions_unknown="drop").scanned()
