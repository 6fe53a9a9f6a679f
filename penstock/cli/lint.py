"""`penstock lint`: which keys of a configuration the installed trainers accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import UsageError
from penstock.printable import printable, printable_json


def lint(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML or JSON file", show_default=False)
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="Arguments a launcher passes, after --", show_default=False),
    ] = None,
    for_: Annotated[
        list[str] | None,
        typer.Option(
            "--for", help="Class that reads it: package.Class or PATH.py:Class; repeatable", show_default=False
        ),
    ] = None,
    search: Annotated[
        list[Path] | None, typer.Option(help="Folder to search before the installed packages", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")] = False,
) -> None:
    """Report keys that a trainer does not accept, what replaced them, and keys without effect. Imports nothing."""
    from penstock.lint import lint as lint_values
    from penstock.lint import read_command, read_config_class, read_file, report_lines

    if not for_:
        raise UsageError("no class to lint against: pass --for trl.SFTConfig, or --for PATH.py:Class.")
    words = list(command or ())
    if config is not None and str(config).startswith("--"):  # only a command line was given
        words, config = [str(config), *words], None
    passed = read_command(words) if words else None
    values = read_file(config) if config is not None else passed
    if values is None:
        raise UsageError("nothing to lint: pass a YAML or JSON file, or a command line after --.")
    classes = [read_config_class(spec, tuple(search or ())) for spec in for_]
    report = lint_values(values, classes, passed if config is not None else None)
    if json:
        print(printable_json(report.to_json(), default=str))
    else:
        for line in report_lines(report):
            print(printable(line))
    if report.refused or report.mostly_unknown:
        raise typer.Exit(1)
