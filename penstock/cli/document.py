"""The command-line reference in docs/cli.md, written from the options themselves: `python -m penstock.cli.document`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from penstock.adoption.options import AdoptOptions
from penstock.build.options import PrepareOptions
from penstock.cli.flags import flag_of
from penstock.export.options import ExportOptions

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
## penstock show DATASET

Prints one example: each run of tokens with its message, role, part and weight; trained text is marked with `+`.
`--row N` chooses the example, `--noted NAME` lists the rows with a [note](notes.md) and chooses among them, `--train-on`
the loss policy, `--max-length` the longest sequence.

## penstock stats DATASET

Rows, tokens, trained share, length percentiles and histogram, tokens by role, duplicates. `--json` for machines.

A DATASET is its folder, or its key (or the start of it) in the cache.

## penstock cache

`ls`, `explain`, `verify`, `gc`: see [the cache](cache.md).

## penstock train sft|dpo CONFIG.yaml [key=value …]

See [training](train.md).

## penstock verify CONFIG.yaml, penstock lint CONFIG.yaml --for trl.SFTConfig

See [verify](verify.md) and [lint](lint.md).
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
    return INTRODUCTION + options_table(PrepareOptions) + exporting + adopting + REST


if __name__ == "__main__":
    print(document(), end="")
