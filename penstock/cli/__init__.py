"""The `penstock` command. Exit codes: 0 done, 1 the work failed, 2 wrong usage."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.adopt import adopt
from penstock.cli.cache import cache_app
from penstock.cli.export import export
from penstock.cli.lint import lint
from penstock.cli.look import diff, report, show, stats, view
from penstock.cli.prepare import prepare
from penstock.cli.train import train_app
from penstock.cli.verify import verify
from penstock.errors import PenstockError, UsageError
from penstock.other_names import prepare_flags

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


app.command()(prepare)
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


def main() -> None:
    """Run the command; errors raised on purpose become one line and an exit code."""
    try:
        arguments = sys.argv[1:]
        app(prepare_flags(arguments) if arguments[:1] == ["prepare"] else arguments)
    except UsageError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("penstock: interrupted; finished slices are kept; rerun the command to resume", file=sys.stderr)
        sys.exit(130)
