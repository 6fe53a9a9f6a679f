"""Permutations: bijective, different for every key, the same on every machine."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.load.plan import key_of, permute


@settings(deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_bijective(size: int, key: int) -> None:
    images = permute(np.arange(size), size, key)
    assert sorted(images.tolist()) == list(range(size))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), key=st.integers(0, 2**64 - 1))
def test_sets_of_different_sizes_in_one_call(sizes: list[int], key: int) -> None:
    size = np.repeat(sizes, sizes)
    position = np.concatenate([np.arange(own) for own in sizes])
    images = permute(position, size, key)
    assert images.tolist() == [
        int(permute(np.array([at]), int(own), key)[0]) for at, own in zip(position, size, strict=True)
    ]


def test_single_positions_of_a_huge_set() -> None:
    far = np.array([0, 10**12 - 1, 5 * 10**11])
    assert [int(permute(far[at : at + 1], 10**12, 7)[0]) for at in range(3)] == permute(far, 10**12, 7).tolist()


def test_small_sets_reach_all_orders() -> None:
    for size, orders in ((2, 2), (3, 6), (4, 24)):
        seen = Counter(tuple(permute(np.arange(size), size, key_of("order", key)).tolist()) for key in range(2400))
        assert len(seen) == orders
        assert max(seen.values()) < 2 * 2400 / orders


def test_golden_order() -> None:
    assert permute(np.arange(10), 10, key_of(0, "epoch", 0)).tolist() == GOLDEN


def test_position_out_of_range() -> None:
    with pytest.raises(IndexError):
        permute(np.array([3]), 3, 0)


GOLDEN = [9, 6, 4, 2, 0, 7, 1, 3, 8, 5]
