"""Properties that hold for every row, policy and limit, and comparisons of views with the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.load.example import Example, Pair
from penstock.load.options import LossPolicy
from penstock.load.windows import Ledger
from penstock.prepare.chat.conversation import Role
from tests.load import reference
from tests.load.reference import Outcome, Token
from tests.support.memory_dataset import MemoryDataset, Piece
from tests.support.view_rows import chat, pairs, rows

LIMITS = st.one_of(st.none(), st.integers(1, 12))
SINGLE = ["truncate", "truncate_left", "drop", "split"]
PAIRED = ["truncate", "truncate_left", "drop"]


def assert_equal_example(example: Example, tokens: list[Token]) -> None:
    weights = np.array([token.weight for token in tokens], np.float32)
    ids = np.array([token.id for token in tokens], np.int64)
    assert np.array_equal(example.input_ids, ids)
    assert np.array_equal(example.loss_weights, weights)
    assert np.array_equal(example.loss_mask, weights > 0)
    assert np.array_equal(example.labels, np.where(weights > 0, ids, -100))
    assert example.input_ids.dtype == example.labels.dtype == np.int64
    assert example.loss_weights.dtype == np.float32
    assert example.loss_mask.dtype == np.bool_
    origin = [token.piece.message for token in tokens]
    assert np.repeat(example.runs.messages, example.runs.lengths).tolist() == origin
    assert example.loss_mask.any(), "an example without a trained token is never served"


def assert_equal_ledger(ledger: Ledger, expected: Outcome, total: int) -> None:
    assert ledger.adds_up
    assert ledger.rows == total
    assert ledger.kept == expected.kept
    assert dict(ledger.dropped_rows) == expected.dropped_rows
    counts = (ledger.tokens, ledger.trained, ledger.masked, ledger.truncated, ledger.dropped)
    assert counts == (expected.tokens, expected.trained, expected.masked, expected.truncated, expected.dropped)


def with_a_weight(policy: LossPolicy, sample: list[list[Piece]]) -> list[list[Piece]]:
    """`customized` refuses a dataset without weights: add a row that gives one."""
    weighted = chat((Role.USER, 1), (Role.ASSISTANT, 1), weights={1: 0.5})
    return [*sample, weighted] if policy is LossPolicy.CUSTOMIZED else sample


@pytest.mark.parametrize("policy", LossPolicy)
@settings(max_examples=60, deadline=None)
@given(
    overlong=st.sampled_from(SINGLE), sample=st.lists(rows(), max_size=6), shard_rows=st.integers(1, 4), limit=LIMITS
)
def test_a_view_serves_what_the_reference_serves(
    policy: LossPolicy, overlong: str, sample: list[list[Piece]], shard_rows: int, limit: int | None
) -> None:
    sample = with_a_weight(policy, sample)
    dataset = MemoryDataset.of(sample, shard_rows=shard_rows)
    view = dataset.view(train_on=policy, overlong=overlong, max_length=limit, regions_unknown="drop")
    expected = reference.serve(sample, policy, overlong, limit)
    assert_equal_ledger(view.ledger, expected, len(sample))
    assert view.ledger.examples == len(view) == len(expected.served)
    for index, (row, start, [tokens]) in enumerate(expected.served):
        example = view.example(index)
        assert_equal_example(example, tokens)
        assert (example.row.row, example.start, len(example)) == (row, start, view.lengths[index])


@pytest.mark.parametrize("policy", LossPolicy)
@settings(max_examples=60, deadline=None)
@given(
    overlong=st.sampled_from(PAIRED), sample=st.lists(pairs(), max_size=5), shard_rows=st.integers(1, 3), limit=LIMITS
)
def test_a_view_of_pairs_serves_what_the_reference_serves(
    policy: LossPolicy, overlong: str, sample: list[list[list[Piece]]], shard_rows: int, limit: int | None
) -> None:
    if policy is LossPolicy.CUSTOMIZED:
        sample = [*sample, [with_a_weight(policy, [])[0], with_a_weight(policy, [])[0]]]
    flat = [side for pair in sample for side in pair]
    dataset = MemoryDataset.of(flat, shard_rows=2 * shard_rows, pairs=True)
    view = dataset.view(train_on=policy, overlong=overlong, max_length=limit, regions_unknown="drop")
    expected = reference.serve_pairs(sample, policy, overlong, limit)
    assert_equal_ledger(view.ledger, expected, len(sample))
    assert len(view) == len(expected.served)
    for index, (row, start, [chosen, rejected]) in enumerate(expected.served):
        pair = view[index]
        assert isinstance(pair, Pair)
        assert_equal_example(pair.chosen, chosen)
        assert_equal_example(pair.rejected, rejected)
        assert pair.row.row == row
        assert pair.chosen.start == pair.rejected.start == start
        assert view.lengths[index].tolist() == [len(chosen), len(rejected)]
        prompt = pair.prompt_length
        assert np.array_equal(pair.chosen.input_ids[:prompt], pair.rejected.input_ids[:prompt])
        assert not pair.chosen.loss_mask[:prompt].any()
        assert not pair.rejected.loss_mask[:prompt].any()


@settings(max_examples=60, deadline=None)
@given(sample=st.lists(rows(), max_size=8), limit=st.integers(1, 6))
def test_chunks_of_a_split_row_partition_it(sample: list[list[Piece]], limit: int) -> None:
    dataset = MemoryDataset.of(sample, shard_rows=3)
    view = dataset.view(train_on="all_tokens", overlong="split", max_length=limit)
    joined: dict[int, list[int]] = {}
    for index in range(len(view)):
        example = view.example(index)
        chunk = joined.setdefault(example.row.row, [])
        if all(piece.weight is None for piece in sample[example.row.row]):
            assert example.start == len(chunk)
        chunk += example.input_ids.tolist()
        assert 1 <= len(example) <= limit
    for row, pieces in enumerate(sample):
        whole = [token for piece in pieces for token in piece.ids]
        if whole and all(piece.weight is None for piece in pieces):
            assert joined[row] == whole


@settings(max_examples=30, deadline=None)
@given(sample=st.lists(rows(unknown=False), max_size=10), limit=LIMITS, data=st.data())
def test_sharding_does_not_change_a_view(sample: list[list[Piece]], limit: int | None, data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([policy for policy in LossPolicy if policy is not LossPolicy.CUSTOMIZED]))
    views = [
        MemoryDataset.of(sample, shard_rows=size).view(train_on=policy, max_length=limit, regions_unknown="drop")
        for size in (1, 3, 100)
    ]
    for view in views[1:]:
        assert view.ledger == views[0].ledger
        assert np.array_equal(view.lengths, views[0].lengths)
        assert view.digest == views[0].digest
        for left, right in zip(view, views[0], strict=True):
            assert isinstance(left, Example) and isinstance(right, Example)
            assert np.array_equal(left.loss_weights, right.loss_weights)
