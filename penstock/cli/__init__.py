"""The `penstock` command. Exit codes: 0 done, 1 the work failed, 2 wrong usage."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Annotated, TextIO

import typer

from penstock import __version__
from penstock.cli.cache import cache_app
from penstock.cli.exchange import adopt, export
from penstock.cli.look import diff, report, show, stats, view
from penstock.cli.prepare import prepare
from penstock.cli.train import lint, train_app, verify
from penstock.errors import PenstockError, StoreError, UsageError
from penstock.other_names import check_flags, prepare_flags
from penstock.spelling import speaking_flags

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
    takes_keys = sys.argv[1:2] == ["train"]  # its options are keys of a file
    with contextlib.nullcontext() if takes_keys else speaking_flags():
        try:
            _run(sys.argv[1:])
        except UsageError as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(2)
        except PenstockError as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            print("penstock: interrupted; finished slices are kept; rerun the command to resume", file=sys.stderr)
            sys.exit(130)


def _run(arguments: list[str]) -> None:
    check_flags(arguments)
    output = sys.stdout
    sys.stdout = explained = _Output.replacing(output)
    try:
        app(prepare_flags(arguments) if arguments[:1] == ["prepare"] else arguments)
    finally:
        try:
            explained.flush()
        finally:
            explained.detach()  # or it would close the output when it is collected
            sys.stdout = output


class _Output(io.TextIOWrapper):
    """Standard output, whose failures are errors of ours. If the reader of a pipe is gone, the command just ends."""

    @classmethod
    def replacing(cls, output: TextIO) -> _Output:
        """The same output, with its errors explained."""
        is_line_buffered = bool(getattr(output, "line_buffering", False))
        return cls(output.buffer, output.encoding, output.errors, line_buffering=is_line_buffered)

    def write(self, text: str, /) -> int:
        with self._explained():
            return super().write(text)

    def flush(self) -> None:
        with self._explained():
            super().flush()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # what is left is not tried again at exit
            if isinstance(error, BrokenPipeError):
                sys.exit(1)
            raise StoreError(
                f"standard output can't be written: {error.strerror}. Free some space, or send it elsewhere."
            ) from error
