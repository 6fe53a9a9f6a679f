"""Segments in tokens: by byte sums where they hold, by offsets elsewhere, with the same result."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.encode.align import segment_token_ends
from penstock.regions.segments import Segments


def segments(ends: list[list[int]], inclusive: list[list[bool]]) -> Segments:
    counts = [len(e) for e in ends]
    total = sum(counts)
    return Segments(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ends=np.array([x for e in ends for x in e], np.int64),
        roles=np.zeros(total, np.uint8),
        parts=np.zeros(total, np.uint8),
        messages=np.zeros(total, np.int32),
        inclusive=np.array([x for i in inclusive for x in i], bool),
        known=np.ones(len(ends), bool),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
    rows = draw(st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=1, max_size=5))
    ends, inclusive = [], []
    for tokens in rows:
        length = sum(tokens)
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=4)) - {length, 0}) + ([length] if length else [])
        ends.append(cuts)
        inclusive.append([draw(st.booleans()) for _ in cuts])
    return rows, ends, inclusive


def expected(tokens: list[int], cuts: list[int], inclusive: list[bool]) -> list[int]:
    """One token at a time: it belongs to the segment in which it ends, or to an inclusive one that it begins in."""
    ends = np.cumsum(tokens).tolist()
    starts = [0, *ends[:-1]]
    result: list[int] = []
    for cut, grabs in zip(cuts, inclusive, strict=True):
        count = sum(1 for s, e in zip(starts, ends, strict=True) if e <= cut or (grabs and s < cut))
        result.append(max([count, *result]))
    if result:
        result[-1] = len(tokens)
    return result


@settings(max_examples=300, deadline=None)
@given(batches())
def test_every_token_is_in_exactly_one_segment(
    batch: tuple[list[list[int]], list[list[int]], list[list[bool]]],
) -> None:
    rows, cuts, inclusive = batch
    lengths = np.array([sum(r) for r in rows], np.int64)
    ids = np.array([t for r in rows for t in r], np.uint32)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    want = [x for r, c, i in zip(rows, cuts, inclusive, strict=True) for x in expected(r, c, i)]
    true_lengths = np.arange(6, dtype=np.int32)
    exact, without = segment_token_ends(
        ids, offsets, lengths, segments(cuts, inclusive), true_lengths, lambda r: np.array([])
    )
    assert exact.tolist() == want
    assert without == 0
    # with byte lengths that are not known, the same comes out of offsets
    by_offsets, needed = segment_token_ends(
        ids, offsets, lengths, segments(cuts, inclusive), np.zeros(6, np.int32), lambda r: np.cumsum(rows[r])
    )
    assert by_offsets.tolist() == want
    assert needed == sum(1 for r in rows if r)
