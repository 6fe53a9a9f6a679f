"""All commands, as typer reads them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.build.options import PrepareOptions
from penstock.cli.cache import cache_app
from penstock.cli.exchange import adopt, export
from penstock.cli.flags import with_flags
from penstock.cli.look import diff, report, show, stats, view
from penstock.cli.prepare import dry_run_of, run_prepare
from penstock.cli.train import lint, train_app, verify

app = typer.Typer(
    help="Turns conversations into training batches: token-exact, fast, once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def penstock(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Turns conversations into training batches: token-exact, fast, once."""


@app.command()
@with_flags(PrepareOptions)
def prepare(
    sources: Annotated[list[str], typer.Argument(help="Files, globs, folders or hub datasets", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Predict rows, tokens, disk, time and memory from a sample; build nothing")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that --dry-run predicts the time for")] = 1,
    *,
    given: dict[str, Any],
) -> None:
    """Render and tokenize conversations once, into a cached dataset that every run can share."""
    if dry_run:
        dry_run_of(sources, given, nodes, json)
    else:
        run_prepare(sources, given, json=json)


app.command()(show)
app.command()(stats)
app.command()(report)
app.command()(view)
app.command()(diff)
app.command()(export)
app.command()(adopt)
app.command()(lint)
app.command()(verify)
app.add_typer(cache_app, name="cache")
app.add_typer(train_app, name="train")
