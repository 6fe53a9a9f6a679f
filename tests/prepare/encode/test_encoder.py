"""The fast encoder and the reference give the same ids; guards send uncertain texts to the reference."""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from penstock.prepare.encode import encoder as encoder_module
from penstock.prepare.encode import encoder as splitter
from penstock.prepare.encode.encoder import Encoded, Encoder
from penstock.prepare.encode.engines import Gigatoken
from penstock.prepare.encode.example_batch import encode_texts, segment_counts
from penstock.prepare.encode.unicode_checks import unassigned
from penstock.prepare.tokenizer.vocabulary import NormalizerKind, Vocabulary
from tests.prepare.encode.test_align import CROSSINGS, segments


def encoder_of(folder: Path) -> Encoder:
    data = (folder / "tokenizer.json").read_bytes()
    return Encoder(data, Vocabulary(data))


@pytest.fixture(scope="module")
def small(tokenizer: Path) -> Encoder:
    return encoder_of(tokenizer)


@pytest.fixture(scope="module")
def large(deepseek: Path) -> Encoder:
    return encoder_of(deepseek)


@pytest.fixture(scope="module")
def nfc() -> Encoder:
    """A byte-level tokenizer that normalizes to NFC, like Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Grüße aus Zürich, café crème, naïve façade"] * 5, trainer)
    data = tokenizer.to_str().encode()
    return Encoder(data, Vocabulary(data))


hostile = st.text(
    alphabet=st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("aé1 \n\t\r'’\u0301\u0338\u200b\ufeff\x0b\x1c\x85\u2028<|>▁Ġ"),
    )
)


@pytest.mark.parametrize("name", ["small", "large", "nfc"])
def test_fast_equals_reference(name: str, request: pytest.FixtureRequest) -> None:
    encoder: Encoder = request.getfixturevalue(name)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(hostile, min_size=1, max_size=8))
    def law(texts: list[str]) -> None:
        data = [t.encode() for t in texts]
        fast, slow = encoder.encode(data), encoder.reference(data)
        assert fast.ids.tolist() == slow.ids.tolist()
        assert fast.offsets.tolist() == slow.offsets.tolist()

    law()
    assert encoder.why_reference == ""  # or the reference was compared with itself
    assert encoder.engine.startswith("gigatoken ")


@pytest.mark.parametrize("name", ["small", "large", "nfc"])
def test_pieces_of_guarded_texts(name: str, request: pytest.FixtureRequest) -> None:
    """Tokens and their ends equal the reference's, however a text is split."""
    encoder: Encoder = request.getfixturevalue(name)
    without = Encoder(encoder._json, encoder.vocabulary, fast=False)
    added = [token.content for token in encoder.vocabulary.added]
    assert len(encoder.pieces(f"a{added[0]}{added[0]}".encode())) == 3

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(
            st.one_of(hostile, st.sampled_from(added), st.sampled_from(("\U000323b0", "e\u0301 ", " a"))), max_size=9
        )
    )
    def law(parts: list[str]) -> None:
        data = "".join(parts).encode()
        fast, slow = encoder.encode([data, b"x"]), encoder.reference([data, b"x"])
        assert fast.ids.tolist() == slow.ids.tolist() and fast.offsets.tolist() == slow.offsets.tolist()
        ids = slow.ids[: slow.offsets[1]]
        ends = encoder.token_ends(data, ids)
        assert len(ends) == len(ids) and ends.tolist() == without.token_ends(data, ids).tolist()
        assert not len(ends) or ends[-1] == len(data)

    law()


WORDS = st.sampled_from(
    ("a", "The", "中文", "привет", "한", "क", "é", "1", "don't", " ", "  ", "\n", "，", ".", "_", "\t")
)
NEWER = st.sampled_from("\U0001fae8\U0001faea\U000323b0\U00016ea0\u1acf") | st.characters(categories=["Cn"])


@pytest.mark.parametrize("name", ["small", "large", "nfc"])
def test_newer_characters_and_decomposed_text(name: str, request: pytest.FixtureRequest) -> None:
    """Tokens and masks as in a build equal the reference's, wherever such characters are and segments end."""
    encoder: Encoder = request.getfixturevalue(name)
    parts = st.one_of(hostile, WORDS, NEWER, st.sampled_from(("e\u0301", "\u0958", "\u1112\u1161\u11ab", ">\u0338")))

    @settings(max_examples=150, deadline=None)
    @given(st.lists(parts, min_size=1, max_size=9), st.sets(st.integers(1, 40), max_size=4), st.sampled_from(CROSSINGS))
    def law(parts: list[str], cuts: set[int], crossing: int) -> None:
        text = "".join(parts) + "."
        ends = sorted({len(text[:cut].encode()) for cut in cuts} | {len(text.encode())})
        own = segments([ends, [1]], [[crossing] * (len(ends) - 1) + [0], [0]])
        found, expected = (encode_texts([text.encode(), b"x"], own, encoder, reference=r) for r in (False, True))
        assert found.ids.tolist() == expected.ids.tolist() and found.offsets.tolist() == expected.offsets.tolist()
        assert found.ends.tolist() == expected.ends.tolist()
        assert found.crossed.tolist() == expected.crossed.tolist()

    law()


@pytest.mark.parametrize("name", ["small", "large", "nfc"])
def test_splitting_after_letters_changes_no_token(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    monkeypatch.setattr(splitter, "PIECE_BYTES", 8)
    assert len(encoder.pieces(b"many words of a few letters each")) > 2

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.one_of(WORDS, WORDS, hostile), max_size=30))
    def law(parts: list[str]) -> None:
        text = "".join(parts).encode()
        cut = encoder.pieces(text)
        assert b"".join(cut) == text
        assert encoder._by_reference(cut)[0].tolist() == encoder._by_reference([text])[0].tolist()

    law()


def test_only_words_with_unusual_characters_go_to_the_reference(
    large: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = large.vocabulary.added[0].content
    turns = [f"{token}plain {number}" for number in range(50)]
    turns[20] += " \U000323b0"
    text = "".join(turns).encode()
    expected = large.reference([text]).ids.tolist()
    served: list[bytes] = []
    reference = large.reference

    def watched(texts: list[bytes], *why: Any) -> Encoded:
        served.extend(texts)
        return reference(texts, *why)

    monkeypatch.setattr(large, "reference", watched)
    assert large.encode([text]).ids.tolist() == expected
    assert served == [" 20 \U000323b0".encode()]


def test_newly_assigned_code_points_go_to_the_reference(large: Encoder) -> None:
    texts = ["plain", "new \U000323b0 ideograph", "käse"]
    encoded = large.encode([t.encode() for t in texts])
    assert encoded.fallbacks == {"text with code points newer than Unicode 14": 1}
    assert encoded.ids.tolist() == large.reference([t.encode() for t in texts]).ids.tolist()


def test_the_table_of_unassigned_code_points() -> None:
    table = unassigned()
    assert not table[:0x378].any()
    assert table[0x378]
    assert table[0x323B0]
    assert not table[[ord(c) for c in "a日😀é"]].any()


def test_decomposed_text_goes_to_the_reference(nfc: Encoder) -> None:
    text = unicodedata.normalize("NFD", "café")
    assert nfc.encode([text.encode()]).fallbacks == {"text that is not in NFC": 1}


def staged(encoder: Encoder, text: str, cuts: list[int]) -> tuple[list[int], list[int]]:
    """Ids, and token counts up to each end, as in a build."""
    parts = segments([cuts], [[False] * len(cuts)])
    found = encode_texts([text.encode()], parts, encoder)
    return found.ids.tolist(), found.ends.tolist()


def test_marks_known_to_python_but_not_to_the_reference(nfc: Encoder) -> None:
    """Python's NFC would swap the marks."""
    text = "e\u0301a\u08d3\u0d3b"
    assert unicodedata.normalize("NFC", text)[-1] == "\u08d3"
    assert staged(nfc, text, [len(text.encode())])[0] == nfc.reference([text.encode()]).ids.tolist()


def test_lengths_that_add_up_by_chance(nfc: Encoder) -> None:
    """ḿ is as long as its parts; a segment that ends between them gets its tokens by offsets."""
    data = "I'm\u0301 x".encode()
    ids, found = staged(nfc, data.decode(), [3, len(data)])
    ends = nfc._reference.token_ends(data)
    assert int(nfc.vocabulary.byte_lengths[ids].sum()) == len(data)
    assert found == segment_counts(ends, np.array([3, len(data)]), np.zeros(2, np.uint8))[0].tolist()


def test_other_normalizers_use_offsets() -> None:
    tokenizer = Tokenizer(models.BPE({"Ġ": 0, "1": 1, "a": 2}, []))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    data = tokenizer.to_str().encode()
    assert not Vocabulary(data).byte_lengths.any()
    encoder = Encoder(data, Vocabulary(data))
    encoder.encode([b"a"])
    assert "not trusted" in encoder.why_reference


def test_tokenizers_refused_by_the_fast_engine_use_the_reference() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    data = tokenizer.to_str().encode()
    encoder = Encoder(data, Vocabulary(data))
    encoder.encode([b"a b"])
    assert "gigatoken refuses" in encoder.why_reference
    assert encoder.encode([b"a b c", b""]).ids.tolist() == [0, 1, 2]


@pytest.mark.skipif(importlib.util.find_spec("splintr") is None, reason="splintr is optional")
def test_the_second_engine_takes_what_the_first_refuses() -> None:
    """Digits before bytes, as in Command-R, and Unigram, as in T5."""
    digits = Tokenizer(models.BPE())
    digits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    digits.train_from_iterator(["Grüße aus Zürich 1234, café crème"] * 5, trainer)
    data = digits.to_str().encode()
    encoder = Encoder(data, Vocabulary(data))
    texts = [text.encode() for text in ("Grüße 12345", "", "new \U000323b0 one")]
    encoded = encoder.encode(texts)
    assert encoder.why_reference == "" and encoder.engine.startswith("splintr 0.")
    assert encoder.not_served.startswith("gigatoken refuses this tokenizer")
    assert encoded.ids.tolist() == encoder.reference(texts).ids.tolist()
    assert encoder._fast is not None
    encoder._fast.clear_cache()
    assert encoder.encode(texts).ids.tolist() == encoded.ids.tolist()


def test_an_engine_that_differs_is_not_used(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Gigatoken):
        def encode(self, texts: list[bytes]) -> Any:
            found = super().encode(texts)
            return found._replace(ids=np.where(found.ids == found.ids.max(initial=0), 0, found.ids))

    monkeypatch.setattr(encoder_module, "ENGINES", {"gigatoken": Wrong})
    subject = encoder_of(tokenizer)
    encoded = subject.encode([b"What is it?"])
    assert subject.why_reference.startswith("gigatoken differs from tokenizers on ")
    assert subject.engine.startswith("tokenizers ") and sum(encoded.fallbacks.values()) == 1


def test_switched_off(tokenizer: Path) -> None:
    data = (tokenizer / "tokenizer.json").read_bytes()
    encoder = Encoder(data, Vocabulary(data), fast=False)
    assert encoder.why_reference == "the fast encoder is switched off"


def test_truncation_and_padding_in_the_file_are_ignored(tokenizer: Path) -> None:
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    loaded.enable_truncation(3)
    loaded.enable_padding(length=8)
    data = loaded.to_str().encode()
    encoder = Encoder(data, Vocabulary(data))
    text = b"What is the country of Oslo and Bern?"
    assert len(encoder.encode([text]).ids) == len(encoder.reference([text]).ids) > 3


@pytest.mark.parametrize("name", ["small", "large", "nfc"])
def test_token_ends_are_byte_sums_where_these_hold(name: str, request: pytest.FixtureRequest) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    for text in ("Grüße aus Oslo: 12 + 3 = 15.\n\n  日本語 😀!", "  spaces\n"):
        data = text.encode()
        ids = encoder.encode([data]).ids
        sums = encoder.vocabulary.byte_lengths[ids].cumsum()
        assert sums[-1] == len(data)
        ends = encoder.token_ends(data, ids)
        # inside a character split over tokens, offsets cover the whole character
        boundaries = {len(text[:k].encode()) for k in range(len(text) + 1)}
        assert [e for e in ends.tolist() if e in boundaries][-1] == sums[-1]
        assert all(a >= b for a, b in zip(ends.tolist(), sums.tolist(), strict=True))


def test_vocabulary(tokenizer: Path, deepseek: Path) -> None:
    small = Vocabulary((tokenizer / "tokenizer.json").read_bytes())
    assert small.normalizer is NormalizerKind.NONE
    assert small.dtype.__name__ == "uint16"
    assert small.special_contents == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert small.token_bytes[small.id_of("<|im_end|>") or 0] == b"<|im_end|>"
    large = Vocabulary((deepseek / "tokenizer.json").read_bytes())
    assert large.dtype.__name__ == "uint32"
    assert [len(b) for b in large.token_bytes] == large.byte_lengths.tolist()


def test_small_input_is_encoded_by_the_reference(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "SMALL_INPUT", 100)
    subject = encoder_of(tokenizer)
    texts = [b"How are you?", b"Fine."]
    first = subject.encode(texts)
    assert sum(first.fallbacks.values()) == len(texts)
    later = subject.encode(texts * 10)
    assert not later.fallbacks
    assert later.ids[: len(first.ids)].tolist() == first.ids.tolist()
