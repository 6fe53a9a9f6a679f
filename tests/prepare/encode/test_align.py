"""Segment ends in tokens: the same by byte sums, where they hold, and by offsets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prepare.encode.encoder import AlignmentTables
from penstock.prepare.encode.example_batch import segment_token_ends
from penstock.prepare.regions.segments import Segments
from penstock.prepare.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("inner_loops")


def vocabulary(**parts: Any) -> Vocabulary:
    """A vocabulary in which token n is n times the letter a."""
    tokens = {"a" * n: n for n in range(1, 6)}
    return Vocabulary(json.dumps({"model": {"type": "BPE", "vocab": tokens, "merges": []}, **parts}).encode())


BYTE_LEVEL = vocabulary(decoder={"type": "ByteLevel"})
LONG = Vocabulary(
    json.dumps(
        {
            "model": {"vocab": {"a" * n: n for n in range(1, 6)} | {"b" * 300: 6}, "merges": []},
            "decoder": {"type": "ByteLevel"},
        }
    ).encode()
)
OTHER = vocabulary(normalizer={"type": "Prepend", "prepend": "x"})  # of unknown configuration


def tables(of: Vocabulary) -> AlignmentTables:
    return of.byte_lengths, of.pieces


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
    """One token at a time: it belongs to the segment in which it ends, or to an inclusive one in which it begins."""
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
    texts = [b"a" * sum(row) for row in rows]
    ids = np.array([t for r in rows for t in r], np.uint32)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    want = [x for r, c, i in zip(rows, cuts, inclusive, strict=True) for x in expected(r, c, i)]
    parts = segments(cuts, inclusive)
    for known in (BYTE_LEVEL, LONG):
        exact, without = segment_token_ends(texts, ids, offsets, parts, tables(known), lambda r: np.array([]))
        assert exact.tolist() == want
        assert without == 0
    # with unknown lengths, offsets give the same result
    by_offsets, needed = segment_token_ends(texts, ids, offsets, parts, tables(OTHER), lambda r: np.cumsum(rows[r]))
    assert by_offsets.tolist() == want
    assert needed == sum(1 for r in rows if r)


def test_only_rows_whose_lengths_do_not_add_up_use_offsets() -> None:
    """A row that is one byte short does not shift the rows after it."""
    texts, rows = [b"aaa", b"aaaa", b"aaa"], [[1, 2], [1, 2], [2, 1]]
    ids, offsets = np.array([t for r in rows for t in r], np.uint32), np.array([0, 2, 4, 6])
    parts = segments([[1, 3], [2, 4], [2, 3]], [[False] * 2] * 3)
    asked: list[int] = []

    def token_ends(row: int) -> Any:
        asked.append(row)
        return np.array([2, 4])

    counts, inexact = segment_token_ends(texts, ids, offsets, parts, tables(BYTE_LEVEL), token_ends)
    assert (asked, inexact) == ([1], 1)
    assert counts.tolist() == [1, 2, 1, 2, 1, 2]


def test_tokens_that_share_a_character_end_with_it() -> None:
    """The reference's offsets assign a whole character to each of its byte tokens; an inclusive segment has all."""
    parts = segments([[3, 6]], [[True, False]])
    counts, _ = segment_token_ends(
        [b"\xe6\x97\xa5\xe6\x97\xa5"],
        np.array([1, 1, 1, 3], np.uint32),
        np.array([0, 4]),
        parts,
        tables(OTHER),
        lambda _: np.array([3, 3, 3, 6]),
    )
    assert counts.tolist() == [3, 4]
