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
    if not 0 <= row < len(view):
        raise UsageError(f"--row {row}: the view has {len(view):,} rows, numbered from 0")
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


def _view(dataset: Dataset, console: Console, **options: Any) -> View:
    """A view to look at; rows whose regions are unknown are left out and said."""
    try:
        return dataset.view(**options).scanned()
    except RegionsUnknown as error:
        console.print(f"[yellow]left out:[/] {error}", highlight=False)
        return dataset.view(**options, regions_unknown="drop").scanned()
