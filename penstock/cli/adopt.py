"""`penstock adopt`: turns tokenized data into a dataset."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from penstock.adoption.options import AdoptOptions, adopt_options
from penstock.cli.flags import with_flags


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
        print(orjson.dumps(adopted.to_json(), option=orjson.OPT_INDENT_2).decode())
        return
    console, dataset = Console(), adopted.dataset
    console.print(f"{len(dataset):,} rows, {dataset.tokens:,} tokens in {len(dataset.shards)} shards", highlight=False)
    for warning in adopted.warnings:
        console.print(f"[yellow]warning[/] {warning}", highlight=False)
    console.print(f"\n{dataset.path}", highlight=False, soft_wrap=True, markup=False)
    console.print("\n[dim]the rows' own loss mask is train_on='customized'[/]", highlight=False)
