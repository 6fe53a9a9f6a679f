"""Messages spell options as the caller does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock.api
import penstock.cli
from penstock.errors import UsageError
from penstock.spelling import as_arguments, as_flags

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--turns faithful trains it", "turns='faithful' trains it"),
        ("--stop append: no tokens", "stop='append': no tokens"),
        ("see --stop next_marker and --stop append", "see stop='next_marker' and stop='append'"),
        ("Choose one with --split.", "Choose one with split=…."),
        ("use fewer --workers, or a lower --max-row-bytes", "use fewer workers, or a lower max_row_bytes"),
        ("--workers 9 is capped at 2", "workers=9 is capped at 2"),
        ("Map it with --role bot=assistant.", "Map it with roles={'bot': 'assistant'}."),
        ("say so: --messages-key 'my chats'.", "say so: messages_key='my chats'."),
        ("Prepare it again with --force", "Prepare it again with force=True"),
        ("--force rebuilds all", "force=True rebuilds all"),
        ("Give one with --template FILE.jinja.", "Give one with template='FILE.jinja'."),
        ("(--date sets another)", "(date sets another)"),
        ("--dtype float: expected uint8", "dtype='float': expected uint8"),
        ("run pytest --no-such-thing", "run pytest --no-such-thing"),
        ("a--template, and/--force", "a--template, and/--force"),
    ],
)
def test_flags_become_arguments(text: str, expected: str) -> None:
    assert as_arguments(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("turns='faithfull' is unknown.", "--turns faithfull is unknown."),
        ("only train_on='all_tokens' works", "only --train-on all_tokens works"),
        ('on_bad_row="quarantine" sets it aside; force=True', "--on-bad-row quarantine sets it aside; --force"),
        ("feed.seed='x', ds.view(max_length=9), colour='red'", "feed.seed='x', ds.view(max_length=9), colour='red'"),
    ],
)
def test_arguments_become_flags(text: str, expected: str) -> None:
    assert as_flags(text) == expected


def test_the_same_mistake_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    chats, tokenizer = EXAMPLES / "data", EXAMPLES / "tokenizer"
    with pytest.raises(UsageError, match=r"^ray_address='head:1': it is only used with runner='ray'$"):
        penstock.prepare(chats, tokenizer=tokenizer, ray_address="head:1", cache=tmp_path)
    command = [sys.executable, "-P", "-m", "penstock.cli", "prepare", str(chats), "--tokenizer", str(tokenizer)]
    done = subprocess.run([*command, "--ray-address", "head:1"], capture_output=True, text=True, check=False)
    assert done.stderr == "penstock: --ray-address head:1: it is only used with --runner ray\n"
    done = subprocess.run([*command, "--turns", "faithfull"], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("penstock: --turns faithfull is unknown")
    assert done.returncode == 2
