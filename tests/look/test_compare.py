"""`penstock diff`: a dataset equals itself; one changed row or template line is named, and nothing else is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import UsageError
from penstock.load.options import LossMask, LossPolicy
from penstock.look.compare import _match, compare
from penstock.prepare.chat.conversation import Part, Role
from tests.support.command import run
from tests.support.memory_dataset import MemoryDataset, Piece

ROOT = Path(ps.__file__).parent.parent
Prepare = Callable[..., ps.Dataset]


def chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [chat(f"question {n}", f"answer {n}") for n in range(6)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Prepare:
    folder = tmp_path_factory.mktemp("compare")

    def prepare(rows: list[dict[str, object]], **options: object) -> ps.Dataset:
        path = folder / f"rows{len(list(folder.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return ps.prepare(path, tokenizer=tokenizer, cache=folder / "cache", workers=1, **options)

    return prepare


def diff(*arguments: str | Path) -> tuple[int, str]:
    done = run("diff", *arguments, env={**os.environ, "COLUMNS": "300"})
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_dataset_equals_itself(make: Prepare) -> None:
    one = make(ROWS)
    assert compare(one, one).equal
    code, said = diff(one.path, one.path)
    assert code == 0 and said.startswith("no difference")
    code, said = diff(one.path, one.path, "--json")
    assert code == 0 and json.loads(said)["equal"] is True


def test_a_changed_row_is_named(make: Prepare) -> None:
    one, other = make(ROWS), make([*ROWS[:2], chat("question 2", "zebras"), *ROWS[3:]])
    found = compare(one, other)
    assert (found.added, found.removed, found.changed, found.masks_changed, found.moved) == (0, 0, 1, 0, False)
    assert not found.recipe
    (difference,) = found.differences
    assert (difference.before, difference.after) == (2, 2)
    assert difference.context.endswith("assistant↵\n") and difference.now.startswith("z")
    assert difference.trained[1] != difference.trained[0]
    code, said = diff(one.path, other.path)
    assert code == 1
    assert "0 added, 0 removed, 1 changed" in said and "row 2 of A, row 2 of B" in said and "recipe" not in said


def test_a_changed_template_line_is_named(make: Prepare, tokenizer: Path, tmp_path: Path) -> None:
    lines = (tokenizer / "chat_template.jinja").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if "<|im_end|>" in line)
    lines[at] = lines[at].replace("<|im_end|>", " <|im_end|>", 1)
    template = tmp_path / "other.jinja"
    template.write_text("\n".join(lines))
    system = [{"messages": [{"role": "system", "content": "be brief"}, *row["messages"]]} for row in ROWS]  # type: ignore[misc]
    one, other = make(system), make(system, template=str(template))
    found = compare(one, other)
    (change,) = found.recipe
    assert change.name == "template default" and f"line {at + 1}:" in change.after
    changed = [line for line in change.lines if line[0] in "+-"]
    assert len(changed) == 2 and changed[1] == f"+{lines[at]}"
    assert (found.added, found.removed) == (0, 0)
    code, said = diff(one.path, other.path)
    assert code == 1 and f"+{lines[at]}" in said


def test_added_and_removed_rows_are_named(make: Prepare) -> None:
    one, other = make(ROWS), make([chat("new", "first"), *ROWS[:3], *ROWS[4:]])
    found = compare(one, other)
    assert (found.added_rows, found.removed_rows, found.changed) == ((0,), (3,), 0)
    assert found.after.rows == found.before.rows
    back = compare(make(ROWS), make(ROWS[::-1]))
    assert back.moved and not back.equal and not (back.added or back.removed or back.changed)


def test_a_changed_mask_is_distinguished_from_changed_tokens(make: Prepare) -> None:
    weighted = [json.loads(json.dumps(row)) for row in ROWS]
    for row in weighted:
        row["messages"][1]["weight"] = 1.0
    muted = json.loads(json.dumps(weighted))
    muted[4]["messages"][1]["weight"] = 0.0
    found = compare(make(weighted), make(muted))
    assert (found.changed, found.masks_changed) == (0, 1)
    assert found.differences[0].masks_only and found.after.trained < found.before.trained
    noted = [*ROWS[:5], {**ROWS[5], "note": "unused"}]
    found = compare(make(ROWS), make(noted))
    assert (found.changed, found.masks_changed, found.content_changed, found.equal) == (0, 0, 1, False)


def test_a_body_that_is_divided_differs_by_its_parts() -> None:
    header, *bodies, stop = (Piece(0, Role.ASSISTANT, part, (at,)) for at, part in enumerate(DIVIDED))
    whole = Piece(0, Role.ASSISTANT, Part.BODY, (1, 2))
    old, new = (MemoryDataset.of([[header, *body, stop]]) for body in ([whole], bodies))
    # Rows are matched by content, which is the same.
    new.shards.columns(0).row_hashes[:] = old.shards.columns(0).row_hashes
    found = compare(old, new)
    assert (found.masks_changed, found.before.trained, found.after.trained) == (1, 3, 3)
    assert (found.differences[0].token, found.differences[0].parts) == (1, ("body", "reasoning"))
    only = LossMask(LossPolicy.ALL_ASSISTANT_MESSAGES, "content")
    assert compare(new, new, only).after.trained == 1


DIVIDED = (Part.HEADER, Part.REASONING, Part.CONTENT, Part.STOP)


def test_pairs_compare_with_pairs(make: Prepare, pairs: ps.Dataset) -> None:
    assert compare(pairs, pairs).equal
    with pytest.raises(UsageError, match="preference"):
        compare(pairs, make(ROWS))


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=12), st.lists(st.integers(0, 6), max_size=12))
def test_every_row_is_matched_at_most_once(a: list[int], b: list[int]) -> None:
    left, right = np.array(a, np.uint64), np.array(b, np.uint64)
    found = _match(left, right)
    assert sorted([*found.same[0], *found.edited[0], *found.removed]) == list(range(len(a)))
    assert sorted([*found.same[1], *found.edited[1], *found.added]) == list(range(len(b)))
    assert (left[found.same[0]] == right[found.same[1]]).all()
    if a == b:
        assert len(found.same[0]) == len(a)
