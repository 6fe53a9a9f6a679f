"""No rows left, an empty view, an empty hold-out: an error that names the cause, with exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import SourceError, ViewError
from tests.support.command import run

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
UNANSWERED = {"messages": [{"role": "user", "content": "q"}]}


def test_all_rows_quarantined(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    source = write_rows([UNANSWERED, UNANSWERED, {"messages": []}])
    options: dict[str, Any] = {"tokenizer": tokenizer, "cache": tmp_path / "c", "on_bad_row": "quarantine"}
    for _ in range(2):  # the second time it is a hit
        with pytest.raises(SourceError) as caught:
            ps.prepare(source, **options)
        expected = str(caught.value)
        assert (
            "no row is left: on_bad_row=quarantine set all 3 of them aside (2 no_assistant, 1 no_messages)" in expected
        )
        assert f"The first: {source}:1: no message has the role assistant" in expected
        assert Path(expected.rpartition("All are in ")[2].rstrip(".")).read_text().count("\n") == 3
    done = run("prepare", source, "--tokenizer", tokenizer, "--cache", tmp_path / "c", "--on-bad-row", "quarantine")
    assert done.returncode == 1 and "no row is left" in done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"max_length": 2, "overlong": "drop"},
            "leaves out all 4 rows. 4 are longer than max_length=2 (overlong='drop')",
        ),
        (
            {"max_length": 1},
            "4 have no token that train_on='all_assistant_messages' trains within max_length=1: raise it, or",
        ),
        (
            {"holdout": 1e-9, "holdout_side": "held_out"},
            "the hold-out is empty: holdout=1e-09 holds out none of 4",
        ),
        ({"holdout": 1 - 1e-9}, "nothing is left to train on: holdout=0.999999999 holds out all 4 rows"),
    ],
)
def test_an_empty_view(
    options: dict[str, Any], expected: str, write_rows: Any, tokenizer: Path, tmp_path: Path
) -> None:
    dataset = ps.prepare(
        write_rows([{**CHAT, "id": number} for number in range(4)]), tokenizer=tokenizer, cache=tmp_path / "c"
    )
    with pytest.raises(ViewError) as caught:
        dataset.view(**options)
    assert expected in str(caught.value)
    with pytest.raises(ViewError, match="part 'a' of the mixture: "):
        ps.mix({"a": (dataset, 1.0)}).with_options(**options)


def test_commands_that_have_nothing_to_show(write_rows: Any, tokenizer: Path, tmp_path: Path) -> None:
    dataset = ps.prepare(write_rows([CHAT]), tokenizer=tokenizer, cache=tmp_path / "c")
    done = run("stats", dataset.path, "--max-length", 1)
    assert done.returncode == 1 and "--max-length 1" in done.stderr
