"""Finding texts that need normalization: exactly those that are not in NFC according to Python."""

from __future__ import annotations

import sys
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from penstock.prepare.encode import unicode_checks
from penstock.prepare.encode.unicode_checks import (
    CharacterKind,
    CodePoints,
    Composer,
    _second_code_points,
    unassigned,
)
from penstock.prepare.regions.segments import Segments
from penstock.prepare.tokenizer.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("inner_loops")

MARKS = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith("M")]
SECONDS = "\u0301\u0308\u093c\u09be\u0bbe\u102e\u1161\u11a8\u3099\U00011127\U0001133e"
BASES = "eAn か가ᄀ한<❤\u0928\u09c7\u0bc6\u1025\u212b\u0344\ufb1d\U00011131"
CHARACTERS = st.one_of(st.sampled_from(BASES), st.sampled_from(SECONDS), st.sampled_from(MARKS), st.characters())
TEXTS = st.text(CHARACTERS.filter(lambda c: c.isascii() or not 0xD800 <= ord(c) < 0xE000), max_size=12)


NFC = normalizers.NFC().normalize_str


def composer(*added: str) -> Composer:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(added))
    return Composer(Vocabulary(tokenizer.to_str().encode()), CodePoints())


@given(st.lists(TEXTS, max_size=6))
def test_texts_that_are_not_in_nfc_are_found(texts: list[str]) -> None:
    certain = [text for text in texts if not any(unassigned()[ord(c)] for c in text)]
    data = [text.encode() for text in certain]
    subject = composer()
    found = subject.inspect(data)
    strict = [n for n, text in enumerate(certain) if not unicodedata.is_normalized("NFC", text)]
    # The reference's tables are older: marks newer than them stay where they are.
    assert found.decomposed == [n for n in strict if NFC(certain[n]) != certain[n] or unicode_checks.native is None]
    assert not found.newer
    for text in certain:
        assert CodePoints().is_composed(text) == unicodedata.is_normalized("NFC", text)


@given(st.lists(st.text(st.one_of(CHARACTERS, st.just("\u0897")), max_size=40), max_size=6))
def test_texts_with_newer_code_points_are_found(texts: list[str]) -> None:
    valid = [text.encode(errors="ignore") for text in texts]
    newer = [n for n, text in enumerate(valid) if any(unassigned()[ord(c)] for c in text.decode())]
    assert composer().inspect(valid).newer == newer


def test_all_second_code_points_are_known() -> None:
    parts = (unicodedata.decomposition(chr(point)).split() for point in range(sys.maxunicode + 1))
    pairs = [pair for pair in parts if len(pair) == 2 and not pair[0].startswith("<")]
    seconds = {int(second, 16) for _, second in pairs}
    # Newer Pythons know newer pairs, and the parts of Hangul syllables; the guard treats both by rules of their own.
    jamo, newer = set(range(0x1100, 0x1200)), set(np.flatnonzero(unassigned()).tolist())
    assert _second_code_points() - newer == seconds - jamo - newer


def test_all_others_compose_with_nothing_in_the_reference() -> None:
    """Over all of Unicode 14, so that a run may begin wherever `CodePoints` says; newer ones are not ordinary."""
    every = np.flatnonzero(~unassigned()[:0xE0200]).astype(np.uint32)[0x80:]
    every = every[(every < 0xD800) | (every >= 0xF900)]
    kinds = CodePoints().of(every)
    decomposed = normalizers.NFD().normalize_str("\n".join(map(chr, every.tolist()))).split("\n")
    seconds = {character for form in decomposed for character in form[1:]}
    ordinary = kinds & (CharacterKind.COMPOSES | CharacterKind.REORDERS) == 0
    assert seconds.isdisjoint(decomposed[k][0] for k in np.flatnonzero(ordinary).tolist())
    inert = "\n".join(f"a\u0345{chr(c)}\u0334" for c in every[kinds == 0].tolist())
    assert NFC(inert) == inert


RUNS = st.lists(st.one_of(CHARACTERS, st.sampled_from(MARKS), st.sampled_from("ệ각ख़\u212b>|m"), TEXTS), max_size=20)


@given(RUNS, st.sets(st.integers(0, 60)))
def test_composing_equals_the_reference(parts: list[str], cuts: set[int]) -> None:
    """Its normal form, and the places in it of segments that don't end inside a changed run."""
    text = unicodedata.normalize("NFD", "".join(parts)).encode(errors="ignore").decode()
    ends = sorted({len(text[:cut].encode()) for cut in cuts} | {len(text.encode())}) if text else []
    given_ = Segments(
        np.array([0, len(ends)]), np.array(ends, np.int64), *(np.zeros(len(ends), np.uint8),) * 2,
        np.zeros(len(ends), np.int32), np.zeros(len(ends), np.bool_), np.ones(1, np.bool_),
    )  # fmt: skip
    found = composer()([text.encode()], given_)
    if unicode_checks.native is None or found.findings.decomposed:
        assert found.texts == [text.encode()] and found.segments is given_
        return
    form = found.texts[0].decode()
    assert form == NFC(text)
    pieces = [form.encode()[start:end].decode() for start, end in pairwise([0, *found.segments.ends.tolist()])]
    before = [text.encode()[start:end].decode() for start, end in pairwise([0, *ends])]
    assert pieces == list(map(NFC, before))


def test_runs_that_touch_added_tokens_are_left_to_the_reference() -> None:
    """`>` ends a token, and only outside it composes with the stroke; the Kelvin sign becomes a letter of it."""
    if unicode_checks.native is None:
        pytest.skip("they all are")
    none = Segments(*(np.zeros(2, np.int64),), *(np.zeros(0, np.int64),) * 5, np.ones(1, np.bool_))
    subject = composer("<|K|>")
    for text in ("<|K|>\u0338", "<|\u212a|>", "a>\u0338"):
        assert subject([text.encode()], none).findings.decomposed == [0]
    found = subject(["<|K|>e\u0301>\u0301".encode()], none)
    assert found.texts == ["<|K|>é>\u0301".encode()] and found.changed == 1 and not found.findings.decomposed
    assert composer("<e\u0301>")(["e\u0301".encode()], none).findings.decomposed == [0]
