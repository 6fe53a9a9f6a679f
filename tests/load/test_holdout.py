"""The hold-out: two parts of all rows, decided by content, stable when rows are appended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ViewError
from penstock.load.index import keyed_hashes, keyed_permutation, splitmix64
from penstock.prepare.chat.conversation import Role
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import chat


def row(content: int) -> list[Piece]:
    return chat((Role.USER, 1), (Role.ASSISTANT, 1), first_id=content)


def part(contents: list[int], name: str, holdout: float | int, seed: int = 0, shard_rows: int = 7) -> list[int]:
    view = MemoryDataset.of([row(content) for content in contents], shard_rows=shard_rows).view(
        holdout=holdout, holdout_side=name, holdout_seed=seed
    )
    assert view.ledger.adds_up and view.ledger.rows + view.ledger.other_part == len(contents)
    return [contents[item.row.row] for item in view]


CONTENTS = st.lists(st.integers(0, 40), min_size=2, max_size=60)


@settings(max_examples=40, deadline=None)
@given(contents=CONTENTS, more=CONTENTS, seed=st.integers(0, 2**64 - 1), fraction=st.floats(0.01, 0.99))
def test_a_fraction_is_stable_when_rows_are_appended(
    contents: list[int], more: list[int], seed: int, fraction: float
) -> None:
    held_out, train = (part(contents, name, fraction, seed) for name in ("held_out", "train"))
    assert sorted(held_out + train) == sorted(contents)
    assert not set(held_out) & set(train), "equal rows are on the same side"
    grown = part(contents + more, "held_out", fraction, seed, shard_rows=3)
    assert grown[: len(held_out)] == held_out


@settings(max_examples=40, deadline=None)
@given(contents=CONTENTS, more=CONTENTS, data=st.data())
def test_a_count_holds_out_the_smallest_hashes_and_ties(
    contents: list[int], more: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(contents) - 1))
    held_out, train = (part(contents, name, count) for name in ("held_out", "train"))
    assert sorted(held_out + train) == sorted(contents)
    assert not set(held_out) & set(train)
    hashes = MemoryDataset.of([row(content) for content in contents]).shards.columns(0).row_hashes
    keyed = keyed_hashes(hashes, 0).tolist()
    last = sorted(keyed)[count - 1]
    assert held_out == [content for content, key in zip(contents, keyed, strict=True) if key <= last]
    grown = part(contents + more, "held_out", count)
    assert set(grown) & set(contents) <= set(held_out), "an older training row never becomes held out"


def test_a_count_of_distinct_rows_is_exact() -> None:
    assert len(part(list(range(0, 5000, 5)), "held_out", 37)) == 37


def test_a_fraction_is_approximate_and_depends_on_the_seed() -> None:
    contents = list(range(0, 20_000, 5))
    first, second = (part(contents, "held_out", 0.25, seed, shard_rows=1000) for seed in (0, 1))
    assert all(900 < len(some) < 1100 for some in (first, second))
    assert 180 < len(set(first) & set(second)) < 330  # a quarter of a quarter


def test_holding_everything_out_is_refused() -> None:
    with pytest.raises(ViewError, match="holdout=3 leaves nothing to train on: the dataset has 3 rows"):
        part([1, 2, 3], "train", 3)


def test_pairs_are_held_out_whole() -> None:
    sides = [side for content in range(0, 200, 5) for side in (row(content), row(content + 1))]
    dataset = MemoryDataset.of(sides, pairs=True)
    train, held_out = (dataset.view(holdout=10, holdout_side=name) for name in ("train", "held_out"))
    assert (train.ledger.rows, held_out.ledger.rows) == (30, 10)


def test_the_mixer_is_splitmix64() -> None:
    # First outputs of SplitMix64 from seed 0, whose state advances by the golden gamma.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.arange(3, dtype=np.uint64) * gamma
    assert [f"{word:016x}" for word in splitmix64(states)] == [
        "e220a8397b1dcdaf",
        "6e789e6aa1b965f4",
        "06c45d188009454f",
    ]


def test_a_keyed_permutation_is_a_permutation() -> None:
    first, second = keyed_permutation(1000, 1), keyed_permutation(1000, 2)
    assert sorted(first.tolist()) == list(range(1000)) == sorted(second.tolist())
    assert (first != second).mean() > 0.9
    words = np.arange(1000, dtype=np.uint64)
    assert len(set(keyed_hashes(words, 1).tolist())) == 1000
