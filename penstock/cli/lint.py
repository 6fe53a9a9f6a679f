"""`penstock lint`: which keys of a configuration the installed trainers accept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer

from penstock.errors import UsageError


def lint(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML or JSON file", show_default=False)
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="What a launcher passes, after --", show_default=False),
    ] = None,
    for_: Annotated[
        list[str] | None,
        typer.Option("--for", help="Who reads it: package.Class or PATH.py:Class; may be repeated", show_default=False),
    ] = None,
    search: Annotated[
        list[Path] | None, typer.Option(help="Folder to look in before the installed packages", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output")] = False,
) -> None:
    """Say which keys are accepted, what replaced the others, and what has no effect. Nothing is imported."""
    from penstock.lint.accepts import accepted_by
    from penstock.lint.given import read_command, read_file
    from penstock.lint.lines import report_lines
    from penstock.lint.linting import lint as linted

    if not for_:
        raise UsageError("say who reads the configuration: --for trl.SFTConfig, or --for PATH.py:Class.")
    words = list(command or ())
    if config is not None and str(config).startswith("--"):  # only a command line was given
        words, config = [str(config), *words], None
    passed = read_command(words) if words else None
    given = read_file(config) if config is not None else passed
    if given is None:
        raise UsageError("nothing to lint: give a YAML or JSON file, or a command line after --.")
    classes = [accepted_by(spec, tuple(search or ())) for spec in for_]
    report = linted(given, classes, passed if config is not None else None)
    if json:
        print(orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2, default=str).decode())
    else:
        for line in report_lines(report):
            print(line)
    if report.refused:
        raise typer.Exit(1)
