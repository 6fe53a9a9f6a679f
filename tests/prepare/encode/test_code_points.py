"""Finding texts that need normalization: exactly those that are not in NFC according to Python."""

from __future__ import annotations

import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.prepare.encode.unicode_checks import _second_code_points, inspect_texts, is_composed, unassigned

pytestmark = pytest.mark.usefixtures("inner_loops")

MARKS = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith("M")]
SECONDS = "\u0301\u0308\u093c\u09be\u0bbe\u102e\u1161\u11a8\u3099\U00011127\U0001133e"
BASES = "eAn か가ᄀ한<❤\u0928\u09c7\u0bc6\u1025\u212b\u0344\ufb1d\U00011131"
CHARACTERS = st.one_of(st.sampled_from(BASES), st.sampled_from(SECONDS), st.sampled_from(MARKS), st.characters())
TEXTS = st.text(CHARACTERS.filter(lambda c: c.isascii() or not 0xD800 <= ord(c) < 0xE000), max_size=12)


@given(st.lists(TEXTS, max_size=6))
def test_texts_that_are_not_in_nfc_are_found(texts: list[str]) -> None:
    certain = [text for text in texts if not any(unassigned()[ord(c)] for c in text)]
    found = inspect_texts([text.encode() for text in certain])
    assert found.decomposed == [n for n, text in enumerate(certain) if not unicodedata.is_normalized("NFC", text)]
    assert not found.newer
    for text in certain:
        assert is_composed(text) == unicodedata.is_normalized("NFC", text)


@given(st.lists(st.text(st.one_of(CHARACTERS, st.just("\u0897")), max_size=40), max_size=6))
def test_texts_with_newer_code_points_are_found(texts: list[str]) -> None:
    valid = [text.encode(errors="ignore") for text in texts]
    newer = [n for n, text in enumerate(valid) if any(unassigned()[ord(c)] for c in text.decode())]
    assert inspect_texts(valid).newer == newer


def test_all_second_code_points_are_known() -> None:
    parts = (unicodedata.decomposition(chr(point)).split() for point in range(sys.maxunicode + 1))
    pairs = [pair for pair in parts if len(pair) == 2 and not pair[0].startswith("<")]
    seconds = {int(second, 16) for _, second in pairs}
    # Newer Pythons know newer pairs, and the parts of Hangul syllables; the guard treats both by rules of their own.
    jamo, newer = set(range(0x1100, 0x1200)), set(np.flatnonzero(unassigned()).tolist())
    assert _second_code_points() - newer == seconds - jamo - newer
