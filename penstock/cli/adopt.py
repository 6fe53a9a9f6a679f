"""`penstock adopt`: turns tokenized data into a dataset."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from penstock.adoption.options import AdoptOptions, adopt_options
from penstock.cli.flags import with_flags
from penstock.look.terminal.console import Terminal
from penstock.printable import printable_json


@with_flags(AdoptOptions)
def adopt(
    sources: Annotated[list[str], typer.Argument(help="Files or folders of tokenized rows", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Create a dataset from tokenized rows: hf, Parquet, JSON lines, OLMo-core numpy, Megatron."""
    from penstock.adoption.adopt import adopt as run

    adopted = run(sources, adopt_options(given))
    if json:
        print(printable_json(adopted.to_json()))
        return
    console, dataset = Terminal(), adopted.dataset
    console.print(f"{len(dataset):,} rows, {dataset.tokens:,} tokens in {len(dataset.shards)} shards", highlight=False)
    for warning in adopted.warnings:
        console.print(Text.assemble(("warning ", "yellow"), warning))
    console.print(f"\n{dataset.path}", highlight=False, soft_wrap=True, markup=False)
    console.print("\nviews train the rows' own loss mask (train_on='customized')", style="dim")
