"""Segment ends in tokens: the same by byte sums, where they hold, and by offsets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.prepare.encode.encoder import AlignmentTables
from penstock.prepare.encode.example_batch import _counted, aligned
from penstock.prepare.regions.segments import Crossing, Segments
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


def segments(ends: list[list[int]], crossing: list[list[int]]) -> Segments:
    counts = [len(e) for e in ends]
    total = sum(counts)
    return Segments(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ends=np.array([x for e in ends for x in e], np.int64),
        roles=np.zeros(total, np.uint8),
        parts=np.zeros(total, np.uint8),
        messages=np.zeros(total, np.int32),
        crossing=np.array([x for row in crossing for x in row], np.uint8),
        known=np.ones(len(ends), bool),
    )


CROSSINGS = [Crossing.LATER, Crossing.OWN, Crossing.NEXT, *(rule | Crossing.ON_SPAN for rule in range(3))]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    rows = draw(st.lists(st.lists(st.integers(1, 5), max_size=8), min_size=1, max_size=5))
    ends, crossing = [], []
    for tokens in rows:
        length = sum(tokens)
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=4)) - {length, 0}) + ([length] if length else [])
        ends.append(cuts)
        crossing.append([int(draw(st.sampled_from(CROSSINGS))) for _ in cuts])
    return rows, ends, crossing


def expected(tokens: list[int], cuts: list[int], crossing: list[int]) -> tuple[list[int], list[int]]:
    """Token ends and crossings by assigning one token at a time to a segment."""
    ends = np.cumsum(tokens).tolist()
    starts = [0, *ends[:-1]]
    counts: list[int] = []
    crossed: list[int] = []
    for number, (cut, rule) in enumerate(zip(cuts, crossing, strict=True)):
        following = cuts[min(number + 1, len(cuts) - 1)]
        crosses = [s < cut < e for s, e in zip(starts, ends, strict=True)]
        takes = {Crossing.LATER: 0, Crossing.OWN: 1 << 30, Crossing.NEXT: following}[Crossing(rule & 3)]
        own = [e <= cut or (c and e <= takes) for e, c in zip(ends, crosses, strict=True)]
        counts.append(max([sum(own), *counts]))
        crossed.append((1 | rule & Crossing.ON_SPAN) * any(crosses))
    if counts:
        counts[-1], crossed[-1] = len(tokens), 0
    return counts, crossed


@settings(max_examples=300, deadline=None)
@given(batches())
def test_every_token_is_in_exactly_one_segment(
    batch: tuple[list[list[int]], list[list[int]], list[list[int]]],
) -> None:
    rows, cuts, crossing = batch
    texts = [b"a" * sum(row) for row in rows]
    ids = np.array([t for r in rows for t in r], np.uint32)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    found = [expected(*row) for row in zip(rows, cuts, crossing, strict=True)]
    want = [x for counts, _ in found for x in counts], [x for _, crossed in found for x in crossed]
    parts = segments(cuts, crossing)
    for known in (BYTE_LEVEL, LONG):
        exact = aligned(texts, ids, offsets, parts, tables(known), lambda r: np.array([]))
        assert (exact.ends.tolist(), exact.crossed.tolist()) == want
        assert exact.inexact == 0
        ends, crossed, _ = _counted(texts, ids, offsets, parts, known.byte_lengths)  # without the compiled core
        assert (ends.tolist(), crossed.tolist()) == want
    # with unknown lengths, offsets give the same result
    by_offsets = aligned(texts, ids, offsets, parts, tables(OTHER), lambda r: np.cumsum(rows[r]))
    assert (by_offsets.ends.tolist(), by_offsets.crossed.tolist()) == want
    assert by_offsets.inexact == sum(1 for r in rows if r)


def test_only_rows_whose_lengths_do_not_add_up_use_offsets() -> None:
    """A row that is one byte short does not shift the rows after it."""
    texts, rows = [b"aaa", b"aaaa", b"aaa"], [[1, 2], [1, 2], [2, 1]]
    ids, offsets = np.array([t for r in rows for t in r], np.uint32), np.array([0, 2, 4, 6])
    parts = segments([[1, 3], [2, 4], [2, 3]], [[0] * 2] * 3)
    asked: list[int] = []

    def token_ends(row: int) -> Any:
        asked.append(row)
        return np.array([2, 4])

    found = aligned(texts, ids, offsets, parts, tables(BYTE_LEVEL), token_ends)
    assert (asked, found.inexact) == ([1], 1)
    assert found.ends.tolist() == [1, 2, 1, 2, 1, 2]


def test_tokens_that_share_a_character_end_with_it() -> None:
    """The reference's offsets assign a whole character to each of its byte tokens; its segment has all."""
    parts = segments([[3, 6]], [[Crossing.OWN, Crossing.LATER]])
    found = aligned(
        [b"\xe6\x97\xa5\xe6\x97\xa5"],
        np.array([1, 1, 1, 3], np.uint32),
        np.array([0, 4]),
        parts,
        tables(OTHER),
        lambda _: np.array([3, 3, 3, 6]),
    )
    assert found.ends.tolist() == [3, 4]
