"""`penstock export`: writes a prepared dataset in another trainer's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.flags import completion_of, dataset_keys, with_flags
from penstock.errors import UsageError
from penstock.exchange.formats import format_names
from penstock.exchange.options import AdoptOptions, ExportOptions, adopt_options
from penstock.look.progress import LiveProgress, Terminal, amount, duration
from penstock.options import read_options
from penstock.printable import printable_json

if TYPE_CHECKING:
    from penstock.exchange.export import Exported, ExportProgress
    from penstock.load.view import Served, View


Datasets = Annotated[
    list[str],
    typer.Argument(
        metavar="DATASET…", help="Datasets by folder or key; several, or DATASET@PASSES, are mixed", show_default=False,
        autocompletion=dataset_keys,
    ),
]  # fmt: skip


FORMAT = typer.Option(
    "--to",
    help=f"Format: {', '.join(format_names())}",
    show_default=False,
    autocompletion=completion_of(format_names()),
)


@with_flags(ExportOptions)
def export(
    datasets: Datasets,
    to: Annotated[str, FORMAT],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write", show_default=False)],
    cache: Annotated[str | None, typer.Option("--cache", help="Cache in which to look up keys")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Write a prepared dataset in another trainer's format, without tokenizing again."""
    from penstock.exchange.export import export as run
    from penstock.exchange.format import find_format

    find_format(to)  # report a wrong name before reading anything
    options = read_options(ExportOptions, given, "export")
    served = _served(datasets, options, cache)
    with LiveProgress(Terminal(stderr=True), progress_line) as live:
        exported = run(
            served,
            to,
            output,
            capacity=options.capacity,
            part_tokens=options.part_tokens,
            epoch=options.epoch,
            weights=options.weights,
            workers=options.workers,
            on_progress=live,
        )
    if json:
        print(printable_json(exported.to_json()))
    else:
        summary(Terminal(), exported)


def _served(datasets: list[str], options: ExportOptions, cache: str | None) -> Served:
    from penstock.api import View, mix, open_

    parts: dict[str, tuple[View, float]] = {}
    for text in datasets:
        where, number = with_passes(text)
        dataset = open_(where, cache=cache)
        name = dataset.key[:11]
        if name in parts:
            raise UsageError(f"{where}: the dataset is given twice. Give it once, with @2 for two passes.")
        parts[name] = View(dataset, options.view), number
    ((first, passes_of_first), *others) = parts.values()
    return first if not others and passes_of_first == 1 else mix(parts, options.seed)


def with_passes(text: str) -> tuple[str, float]:
    """A dataset and its passes per epoch, from DATASET@PASSES; 1 unless given."""
    where, _, passes = text.rpartition("@") if "@" in text else (text, "", "1")
    try:
        return where, float(passes)
    except ValueError:
        raise UsageError(f"{text}: {passes!r} is not a number of passes. Write DATASET@0.3, for example.") from None


def progress_line(progress: ExportProgress) -> str:
    """One line with parts, speed and time left."""
    seconds = max(progress.seconds, 1e-9)
    done = progress.tokens + progress.tokens_reused
    parts = [
        f"parts {progress.parts_done + progress.parts_reused}/{progress.parts_total}",
        f"{100 * done / max(progress.tokens_total, 1):.0f}%",
        f"{amount(progress.tokens / seconds)} tokens/s",
        f"{progress.workers} worker{'s' if progress.workers != 1 else ''}",
    ]
    if progress.parts_reused:
        parts.append(f"{progress.parts_reused} found")
    if progress.tokens:
        parts.append(f"{duration((progress.tokens_total - done) * seconds / progress.tokens)} left")
    return " · ".join(parts)


def summary(console: Console, exported: Exported) -> None:
    """What was written, and where."""
    statistics, progress = exported.manifest["statistics"], exported.progress
    size = sum(exported.manifest["files"].values())
    counts = (
        f"{statistics['documents']:,} documents, {statistics['tokens']:,} tokens, {statistics['trained']:,} trained"
    )
    if exported.reused:
        console.print(f"this export already exists: {counts}", highlight=False)
    else:
        found = f", {progress.parts_reused} from an earlier run" if progress.parts_reused else ""
        console.print(f"{counts}\n{progress.parts_done} parts written{found}", highlight=False)
        console.print(f"{amount(size, 'B')} in {duration(progress.seconds)}", highlight=False)
    console.print(f"\n{exported.path}", highlight=False, soft_wrap=True, markup=False)


# ---- adopt -----------------------------------------------------------------------------------------------------------
#
# `penstock adopt`: turns tokenized data into a dataset.


@with_flags(AdoptOptions)
def adopt(
    sources: Annotated[list[str], typer.Argument(help="Files or folders of tokenized rows", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Create a dataset from tokenized rows: hf, Parquet, JSON lines, OLMo-core numpy, Megatron."""
    from penstock.exchange.adopt import adopt as run

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
