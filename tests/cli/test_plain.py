"""Lines that are read without typer, and options without pydantic, mean the same as with them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import options as options_module
from penstock.build.options import PrepareOptions
from penstock.cli import app as typer_app
from penstock.cli.plain import plain_arguments
from penstock.options import read_options
from penstock.spelling import speaking_flags, spelled

SIMPLE = [
    "a.jsonl b=c.jsonl --tokenizer t",
    "--tokenizer=t=x a.jsonl --json --force",
    "a --tokenizer t --role bot=assistant --role human=user --template-var x=1 --template-var y=[2]",
    "a --tokenizer t --weight-key a,b --weight-key c --turns faithful --workers 3 --cache c --quarantine-file q",
    "a --tokenizer t --date 2024-02-03 --on-bad-row quarantine --trust own --tokenizer-as auto",
]
OTHERS = [
    "--help",
    "a --tokenizer",
    "a --tokenizer -t",
    "a --tokenizer t --limit 3",
    "a --tokenizer t --tokenizer u",
    "a --tokenizer t --no-fast",
    "a --unknown 1",
    "a --tokenizer t --json=1",
    "a --dry-run",
    "- --tokenizer t",
    "--tokenizer t",
]


@pytest.mark.parametrize("line", SIMPLE)
def test_a_simple_line_means_what_typer_reads(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def record(sources: list[str], given: dict[str, Any], *, json: bool) -> None:
        seen.append((sources, given, json))

    monkeypatch.setattr("penstock.cli.commands.run_prepare", record)
    typer_app(["prepare", *line.split()], standalone_mode=False)
    assert plain_arguments(["prepare", *line.split()]) == seen[0]


@pytest.mark.parametrize("line", OTHERS)
def test_other_lines_are_left_to_typer(line: str) -> None:
    assert plain_arguments(["prepare", *line.split()]) is None


def test_completion_is_left_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    assert plain_arguments(["prepare", "a"]) is None


@pytest.mark.parametrize(
    "given",
    [
        {"tokenizer": "t", "force": True, "turns": "faithful", "roles": {"a": "b"}, "template_vars": {"a": [1]}},
        {"tokenizer": "t", "tokenizer_as": None, "weight_keys": ["a", "b"], "workers": "2", "trust": "all"},
    ],
)
def test_plain_values_become_what_pydantic_makes_of_them(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = read_options(PrepareOptions, given, "prepare")
    monkeypatch.setattr(options_module, "_ready_values", lambda record, values: None)
    assert repr(read_options(PrepareOptions, given, "prepare")) == repr(ready)


def test_the_records_of_all_commands_are_known_to_a_message() -> None:
    imported: list[bool] = []
    with speaking_flags(lambda: imported.append(True)):
        assert spelled("nothing to respell") == "nothing to respell"
        assert not imported
        assert spelled("use train_on='all_tokens'") == "use --train-on all_tokens"
        assert imported
