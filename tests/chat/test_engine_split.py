"""Splitting: the vectorised way and the way mark by mark give the same, for any marks whatever."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.assemble import Rendered, assemble
from penstock.chat.conversation import Conversation
from penstock.chat.sentinels import CONTROL, PRIVATE, Mark
from penstock.chat.split import MARK_BYTES, split_marks, split_private
from penstock.chat.trial import rows

ROLES = ("user", "assistant", "tool", "assistant")
CHAT = Conversation([{"role": role} for role in ROLES])
TO_PRIVATE = str.maketrans(CONTROL.characters, PRIVATE.characters)

number = st.integers(-1, 4).map(lambda n: "" if n < 0 else CONTROL.number(n))
text = st.sampled_from(("", "a", "bé", "日\n"))
opened = st.builds(lambda mark, n: CONTROL.mark(mark) + n, st.sampled_from((Mark.OPEN, Mark.OUTSIDE)), number)
loose = st.sampled_from((Mark.CLOSE, Mark.GENERATION, Mark.END_GENERATION, Mark.NEXT, Mark.END)).map(CONTROL.mark)
region = st.builds(lambda a, b, c: a + b + c + CONTROL.mark(Mark.CLOSE), opened, text, text)
loop = st.lists(text, max_size=4).map(
    lambda steps: "".join(CONTROL.mark(Mark.NEXT) + step for step in steps) + CONTROL.mark(Mark.END)
)
span = text.map(lambda t: CONTROL.mark(Mark.GENERATION) + t + CONTROL.mark(Mark.END_GENERATION))
marked = st.lists(st.one_of(text, region, loop, span, region, opened, loose), max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(marked, min_size=1, max_size=5))
def test_a_batch_is_split_like_its_rows(texts: list[str]) -> None:
    regions = assemble(Rendered(list(texts)), [CHAT] * len(texts))
    assert regions.data == "".join(texts).encode().translate(None, MARK_BYTES)
    for source, (clean, known, pieces, spans, _) in zip(texts, rows(regions), strict=True):
        data, positions, codes = split_private(source.translate(TO_PRIVATE))
        split = split_marks(codes, positions, [role == "assistant" for role in ROLES])
        assert clean == data
        assert (known, pieces, spans) == (split.sound, split.pieces, split.spans)


@given(st.lists(marked, min_size=1, max_size=5), st.sets(st.integers(0, 4)))
def test_rows_split_apart_come_back_in_their_places(texts: list[str], apart: set[int]) -> None:
    whole = assemble(Rendered(list(texts)), [CHAT] * len(texts))
    rendered = Rendered(list(texts))
    for row in apart & set(range(len(texts))):
        data, positions, codes = split_private(texts[row].translate(TO_PRIVATE))
        rendered.apart[row] = (data, split_marks(codes, positions, [role == "assistant" for role in ROLES]))
        rendered.marked[row] = ""
    parts = assemble(rendered, [CHAT] * len(texts))
    assert list(rows(parts)) == list(rows(whole))
    assert np.array_equal(parts.text_ends, whole.text_ends)
