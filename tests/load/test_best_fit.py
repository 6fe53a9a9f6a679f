"""Packing: its laws, and how full the bins are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Int32
from penstock.load.packing import Bins, Histogram, best_fit
from tests.support.lengths import best_fit_decreasing, chat_like, reasoning_like


def packed(lengths: Int32, capacity: int) -> tuple[Bins, list[list[int]]]:
    """The bins, and the lengths in each."""
    bins = best_fit(Histogram.of(lengths), capacity)
    places, counts = bins.places(np.arange(bins.total))
    assert sorted(places.tolist()) == list(range(len(lengths))), "every place exactly once"
    by_place = np.sort(lengths)[::-1]
    return bins, [part.tolist() for part in np.split(by_place[places], np.cumsum(counts)[:-1])]


@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=200), extra=st.integers(0, 200))
def test_every_sequence_once_and_no_bin_overfull(lengths: list[int], extra: int) -> None:
    capacity = max(lengths) + extra
    _, contents = packed(np.array(lengths, np.int32), capacity)
    assert all(contents) and max(map(sum, contents)) <= capacity


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), top=st.integers(5, 300), share=st.floats(0.01, 1))
def test_as_full_as_plain_best_fit_decreasing(seed: int, top: int, share: float) -> None:
    lengths = np.random.default_rng(seed).integers(1, top + 1, 400).astype(np.int32)
    capacity = max(int(top / share), top)
    _, contents = packed(lengths, capacity)
    assert len(contents) <= best_fit_decreasing(lengths, capacity) + 2


def test_single_bins_match_the_full_listing() -> None:
    bins, _ = packed(chat_like(3000), 8192)
    places, counts = bins.places(np.arange(bins.total))
    ends = np.cumsum(counts)
    for one in (0, bins.total // 2, bins.total - 1):
        own, count = bins.places(np.array([one]))
        assert own.tolist() == places[ends[one] - counts[one] : ends[one]].tolist() and count[0] == counts[one]
    assert counts.tolist() == sorted(counts.tolist()), "sorted by number of sequences"


@pytest.mark.parametrize(("lengths", "capacity"), [(chat_like(100_000), 8192), (reasoning_like(100_000), 16384)])
def test_realistic_lengths_fill_the_bins(lengths: Int32, capacity: int) -> None:
    bins, tokens = best_fit(Histogram.of(lengths), capacity), int(lengths.sum(dtype=np.int64))
    plain = best_fit_decreasing(lengths, capacity)
    assert tokens / (bins.total * capacity) > max(tokens / (plain * capacity) - 0.001, 0.995)


def test_short_sequences_are_spread_over_bins() -> None:
    lengths = chat_like(100_000)
    _, counts = best_fit(Histogram.of(lengths), 8192).places(np.arange(8000))
    assert np.std(counts) < 0.8 * np.mean(counts)


def test_invalid_lengths_are_an_assertion_error() -> None:
    with pytest.raises(AssertionError):
        best_fit(Histogram.of(np.array([5])), 4)
    with pytest.raises(AssertionError):
        best_fit(Histogram.of(np.array([0, 2])), 4)
