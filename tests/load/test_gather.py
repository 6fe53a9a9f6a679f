"""Gathering returns the same tokens as `view[i]`, for views, pairs and mixtures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.load.example import Example, Pair
from penstock.load.gather import Gathered, Gatherer
from penstock.load.options import LossPolicy
from penstock.load.view import Served
from penstock.store.dataset import RowLocation
from tests.support.feed_data import mixture, pair_view, rows, view
from tests.support.memory_dataset import MemoryDataset
from tests.support.view_rows import pairs as some_pairs
from tests.support.view_rows import rows as some_rows


def check(served: Served, items: list[int]) -> None:
    found = Gatherer(served)(np.array(items, np.int64))
    examples = [served[item] for item in items]
    sequences: list[Example] = []
    if served.is_preference:
        both = [example for example in examples if isinstance(example, Pair)]
        sequences = [pair.chosen for pair in both] + [pair.rejected for pair in both]
        assert found.prompts.tolist() == [pair.prompt_length for pair in both]
    else:
        sequences = [example for example in examples if isinstance(example, Example)]
    assert_same(found, sequences)
    assert [tuple(place) for place in found.places.tolist()] == [example.row for example in examples]


def assert_same(found: Gathered, sequences: list[Example]) -> None:
    assert found.lengths.tolist() == [len(example) for example in sequences]
    for name, array in (("input_ids", found.ids), ("loss_weights", found.weights)):
        wanted = [value for example in sequences for value in getattr(example, name).tolist()]
        assert array.tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(some_rows(), min_size=1, max_size=12),
    policy=st.sampled_from(list(LossPolicy)),
    overlong=st.sampled_from(["truncate", "truncate_left", "drop", "split"]),
    limit=st.integers(1, 20),
    data=st.data(),
)
def test_gather_equals_view(drawn: list, policy: LossPolicy, overlong: str, limit: int, data: st.DataObject) -> None:  # type: ignore[type-arg]
    if policy is LossPolicy.CUSTOMIZED:
        policy = LossPolicy.ALL_TOKENS  # needs weights, which not every draw has
    served = MemoryDataset.of(drawn, shard_rows=5).view(
        train_on=policy, overlong=overlong, max_length=limit, regions_unknown="drop"
    )
    if len(served):
        check(served, data.draw(st.lists(st.integers(0, len(served) - 1), min_size=1, max_size=9)))


@settings(max_examples=40, deadline=None)
@given(drawn=st.lists(some_pairs(), min_size=1, max_size=6), limit=st.integers(1, 20))
def test_gather_equals_view_of_pairs(drawn: list, limit: int) -> None:  # type: ignore[type-arg]
    sides = [side for pair in drawn for side in pair]
    served = MemoryDataset.of(sides, shard_rows=4, pairs=True).view(max_length=limit, regions_unknown="drop")
    if len(served):
        check(served, list(range(len(served)))[::-1])


PROMPTS_TOO = pair_view(train_on="all_tokens")  # a policy that would train prompts, which pairs never do


@pytest.mark.parametrize(
    "served", [view(), pair_view(), PROMPTS_TOO, mixture()], ids=["view", "pairs", "pairs, all tokens", "mixture"]
)
def test_items_are_gathered_in_any_order(served: Served) -> None:
    order = np.random.default_rng(0).permutation(len(served)).tolist()
    check(served, order)
    check(served, [order[0], order[0]])


class Sliced(MemoryDataset):
    """Rows numbered inside their shard, as in a cache: shard s holds rows 100·s onwards of source s."""

    def locate(self, example: int) -> RowLocation:
        shard, number = divmod(example, 10)
        return RowLocation(shard, 100 * shard + number)


def test_places_come_from_row_numbers_in_the_shard() -> None:
    held = MemoryDataset.of(rows(25), shard_rows=10)
    shards = tuple(shard._replace(rows=shard.rows - shard.rows[0]) for shard in map(held.shards.columns, range(3)))
    check(Sliced(shards, held.key).view(), [24, 0, 11, 9, 10, 20])


def test_gathering_no_items() -> None:
    found = Gatherer(view())(np.empty(0, np.int64))
    assert len(found.ids) == len(found.lengths) == 0 and found.places.shape == (0, 2)
