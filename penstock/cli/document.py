"""The command-line reference in docs/cli.md, written from the options themselves: `python -m penstock.cli.document`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from penstock.adoption.options import AdoptOptions
from penstock.build.options import PrepareOptions
from penstock.cli.flags import flag_of
from penstock.export.options import ExportOptions
from penstock.look.options import LookOptions

INTRODUCTION = """# The command line

Written by `python -m penstock.cli.document`; every option is declared once, and is a keyword argument of `ps.prepare`
too (`--template-var` and `--role` are the dictionaries `template_vars` and `roles` there).

Exit codes: 0 done, 1 the work failed (bad data, a broken promise), 2 wrong usage. With `--json`, standard output is one
JSON object and progress goes to standard error.

## penstock prepare SOURCE… --tokenizer T

Sources are files, globs, folders or hub datasets ([sources](sources.md)); the row format is told from the columns
([formats](formats.md)).

"""
EXPORT = """
## penstock export DATASET… --to FORMAT -o FOLDER

Writes a prepared dataset in another trainer's format ([exports](export.md)). Several datasets, or `DATASET@PASSES`, are
mixed.

"""
ADOPT = """
## penstock adopt SOURCE… --tokenizer T

Makes a dataset of rows that are tokenized already ([exports](export.md)).

"""
REST = """
## penstock cache

`ls`, `explain`, `verify`, `gc`: see [the cache](cache.md).

## penstock train sft|dpo CONFIG.yaml [key=value …]

See [training](train.md).

## penstock verify CONFIG.yaml, penstock lint CONFIG.yaml --for trl.SFTConfig

See [verify](verify.md) and [lint](lint.md).
"""


LOOK = """
## penstock show | stats | report | view DATASET

`show` prints one example (`--row N`): each run of tokens with its message, role, part and weight; trained text is
marked with `+`; `--noted NAME` lists the rows with a [note](notes.md), and `--row` counts among them.
`stats` counts rows, tokens, trained shares, lengths, roles, duplicates; `--json` for machines.
`report` writes one HTML file (`-o`, `--run FOLDER` adds a training run), `view` serves a local web page (`--port`,
`--no-browser`, `--against OTHER`). See [look](look.md).

A DATASET is its folder, or its key (or the start of it) in the cache. All of them take:

"""
DIFF = """
## penstock diff A B

Compares two datasets row by row, under a loss policy (`--train-on`); exit code 1 where they differ. `--json` for
machines.
"""


def options_table(record: type[Any]) -> str:
    """One line for each option of a record."""
    lines = ["| option | meaning | default |", "| --- | --- | --- |"]
    lines += [
        f"| `{flag_of(option)}` | {option.metadata.get('help', '')} | {_default(option)} |" for option in fields(record)
    ]
    return "\n".join(lines) + "\n"


def _default(option: Field[Any]) -> str:
    value = option.default
    if value is MISSING or value is None or value == "":
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{entry}`" for entry in value)
    return f"`{value}`"


def document() -> str:
    """The whole page."""
    exporting, adopting = EXPORT + options_table(ExportOptions), ADOPT + options_table(AdoptOptions)
    looking = LOOK + options_table(LookOptions) + DIFF
    return INTRODUCTION + options_table(PrepareOptions) + exporting + adopting + looking + REST


if __name__ == "__main__":
    print(document(), end="")
