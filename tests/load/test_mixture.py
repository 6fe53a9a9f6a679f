"""Mixtures: the share of each part in an epoch, and epochs that depend only on (seed, epoch)."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import RegionsUnknown, UsageError, ViewError
from penstock.load.view import Count, Mixture, mix
from penstock.prepare.chat.conversation import Role
from tests.load.test_policies import UNKNOWN
from tests.support.memory_dataset import MemoryDataset
from tests.support.view_rows import chat


def dataset(rows: int, first_id: int = 0) -> MemoryDataset:
    return MemoryDataset.of(
        [chat((Role.USER, 1), (Role.ASSISTANT, 1), first_id=first_id + 10 * row) for row in range(rows)]
    )


AMOUNTS = st.one_of(st.floats(0.1, 3.0), st.integers(1, 70).map(Count))


@settings(max_examples=40, deadline=None)
@given(
    left=st.tuples(st.integers(5, 30), AMOUNTS),
    right=st.tuples(st.integers(5, 30), AMOUNTS),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 2**40),
)
def test_an_epoch_holds_the_requested_number_of_each_part(
    left: tuple[int, float | Count], right: tuple[int, float | Count], seed: int, epoch: int
) -> None:
    mixture = mix({"left": (dataset(left[0]), left[1]), "right": (dataset(right[0]), right[1])}, seed=seed)
    uses = Counter(mixture.epoch_indices(epoch).tolist())
    bounds = (0, left[0], left[0] + right[0])
    for (rows, amount), first, last in zip((left, right), bounds, bounds[1:], strict=False):
        expected = amount.examples if isinstance(amount, Count) else int(np.floor(amount * rows + 0.5))
        own = [uses[item] for item in range(first, last)]
        assert sum(own) == expected
        assert max(own) - min(own) <= 1, "whole passes serve every item; the rest is without repetition"
    assert sum(uses.values()) == len(mixture.epoch_indices(epoch)) and max(uses) < len(mixture)


def test_fractions_do_not_repeat_items_until_the_part_is_used_up() -> None:
    mixture = mix({"all": (dataset(10), 1.0), "some": (dataset(100), 0.3)}, seed=3)
    epochs = [set(mixture.epoch_indices(epoch).tolist()) - set(range(10)) for epoch in range(6)]
    assert all(len(epoch) == 30 for epoch in epochs)
    for lap in (epochs[:3], epochs[3:]):
        assert len(set.union(*lap)) == 90
    assert epochs[0] not in epochs[1:]


def test_epochs_need_no_history_and_depend_on_the_seed() -> None:
    parts = {"a": (dataset(50), 0.5), "b": (dataset(50), 2.5)}
    first, again = mix(parts, seed=1), mix(parts, seed=1)
    late = again.epoch_indices(7)
    for epoch in range(8):
        wanted = first.epoch_indices(epoch)
    assert np.array_equal(wanted, late)
    assert not np.array_equal(mix(parts, seed=2).epoch_indices(7), late)
    own = late[late < 50]
    assert not np.array_equal(own, late[late >= 50][-25:] - 50), "parts of one size do not move together"


def test_items_come_from_their_part() -> None:
    first, second = dataset(3), dataset(4, first_id=1000)
    mixture = mix({"first": (first, 1), "second": (second.view(max_length=5), Count(2))})
    assert (len(mixture), mixture.lengths.tolist()) == (7, [6, 6, 6, 5, 5, 5, 5])
    assert (mixture.place(2), mixture.place(3), mixture.place(-1)) == (("first", 2), ("second", 0), ("second", 3))
    assert [int(item.input_ids[0]) for item in mixture] == [0, 10, 20, 1000, 1010, 1020, 1030]  # type: ignore[union-attr]
    assert mixture.ledger.rows == 7 and mixture.ledger.adds_up
    with pytest.raises(IndexError):
        mixture[7]


def test_a_mixture_is_viewed_like_a_dataset() -> None:
    odd = MemoryDataset.of([UNKNOWN, *[chat((Role.USER, 1), (Role.ASSISTANT, 1))] * 3])
    mixture = mix({"odd": (odd, 1.0), "even": (dataset(3), 1.0)})  # nothing is scanned yet, so nothing is refused
    with pytest.raises(RegionsUnknown):
        mixture.with_options(max_length=5)
    view = mixture.with_options(max_length=5, regions_unknown="drop")
    assert (len(view), view.ledger.dropped_rows) == (6, {"regions_unknown": 1})
    assert view.digest != mixture.digest


def test_a_mixture_pickles_and_has_a_stable_digest() -> None:
    parts: dict[str, tuple[MemoryDataset, float | Count]] = {"a": (dataset(5), 0.5), "b": (dataset(7), Count(3))}
    mixture = mix(parts, seed=4)
    copy = pickle.loads(pickle.dumps(mixture))
    assert isinstance(copy, Mixture) and copy.digest == mixture.digest
    assert np.array_equal(copy.epoch_indices(2), mixture.epoch_indices(2))
    others = [mix(parts, seed=5), mix({**parts, "b": (dataset(7), 3.0)}, seed=4), mix({"a": parts["a"]}, seed=4)]
    assert len({mixture.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        (0.0, "0.0 is not a valid"),
        (5000, "write Count(5000)"),
        (-1.0, "-1.0"),
        ("1", "'1' is not a valid"),
        (Count(0), "Count(examples=0)"),
    ],
)
def test_invalid_amounts_are_refused(amount: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        mix({"a": (dataset(3), amount)})
    assert message in str(caught.value)


def test_incompatible_parts_are_refused() -> None:
    first = dataset(3)
    with pytest.raises(UsageError, match="'b' and 'a' have different tokenizers"):
        mix({"a": (first, 1.0), "b": (MemoryDataset((), "b3-other", tokenizer="other"), 1.0)})
    pairs = MemoryDataset.of([chat((Role.USER, 1), (Role.ASSISTANT, 1))] * 2, pairs=True)
    with pytest.raises(UsageError, match="holds preference pairs"):
        mix({"a": (first, 1.0), "b": (pairs, 1.0)})
    for wrong in ([first, first], first.view()):
        with pytest.raises(UsageError, match=r'a mixture is a dict of names, not a \w+\. Write ps\.mix\(\{"chat": '):
            mix(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="part 'a': expected a dataset or a view, found 5"):
        mix({"a": (5, 1.0)})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="mixture is empty"):
        mix({})
    with pytest.raises(
        UsageError, match=r"part 'a': expected \(dataset or view, passes per epoch\), found a MemoryDataset"
    ):
        mix({"a": first})  # type: ignore[dict-item]
    with pytest.raises(ViewError, match=r"part 'a' of the mixture gives no example: its view has 3"):
        mix({"a": (first, 0.1)}).epoch_indices(0)
    with pytest.raises(UsageError, match="Epochs count from 0"):
        mix({"a": (first, 1.0)}).epoch_indices(-1)
