"""Our own Unigram engine gives the reference's ids and offsets, or leaves the text to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.native import native
from penstock.prepare.encode.encoder import UNKNOWN_END, Encoder
from penstock.prepare.encode.unigram import UnigramEngine
from penstock.prepare.tokenizer.reference import ReferenceEncoder
from penstock.prepare.tokenizer.vocabulary import Vocabulary
from tests.support.unigram_tokenizers import CORPUS, SHAPES, TABLE, unigram

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native is None, reason="installed without a compiler")]

PARTS = [
    *TABLE, *" \n", "  ", "   ", "\r\n", "\x00", "\x1b", "▁▁", "hello", "Hello there", "I'm", "x", "ab", "1234", ".",
    "<unk>", "<s>", "</s>", "<|x|>", "<mask>", "<0x0A>", "é", "e\u0301", "\u0301", "\u0308", "ñ", "ﬁ\x01", "世界", "{}",
    "नमस्ते", "\u093c", "한국", "\u1100\u1161", "\u1161", "ㄱㅏ", "\uff9e", "สวัสดี", "ำ", "مرحبا", "\u0600", "\u064e", "İ",
    "👩\u200d👩", "❤\ufe0f", "👍🏽", "🇩🇪", "\U0001f1e9", "\U0001fae8", "\u200d", "\u200e", "\ufeff", "\u2060", "，",
    "Σ", "\u3000", "\u2028", "\u0378", "\U000323b0",
]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.text(max_size=12))


class Subject:
    """An engine, and its reference."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.reference = ReferenceEncoder(tokenizer_json)
        self.engine = UnigramEngine(self.reference, Vocabulary(tokenizer_json))

    def differing(self, texts: list[str]) -> tuple[list[str], int]:
        """The texts that are encoded differently, and the number of those left to the reference."""
        found = self.engine.encode([text.encode() for text in texts])
        assert found.ends is not None
        wrong = []
        for k, text in enumerate(texts):
            own = slice(*found.offsets[k : k + 2].tolist())
            ids, ends = self.reference.encode_with_ends(text.encode())
            if k not in found.left and (found.ids[own].tolist(), found.ends[own].tolist()) != (ids, ends.tolist()):
                wrong.append(text)
        return wrong, len(found.left)


@pytest.fixture(scope="module")
def subjects() -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def subject(name: str) -> Subject:
        if name not in made:
            made[name] = Subject(unigram(name))
        return made[name]

    return subject


@pytest.mark.parametrize("name", SHAPES)
def test_ids_and_ends_are_those_of_the_reference(name: str, subjects: Callable[[str], Subject]) -> None:
    subject = subjects(name)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(TEXTS, max_size=5))
    def law(texts: list[str]) -> None:
        assert subject.differing(texts)[0] == []

    law()
    wrong, left = subject.differing(CORPUS)
    assert not wrong and left < len(CORPUS) / 2  # texts in which marks end words, or words have no ▁ to ask for


def test_words_are_forgotten_and_encoded_again(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("t5")
    many = [" ".join(f"{n:x}{n * 7919:x}{n * 104729:x}" for n in range(start, start + 5000)) for start in (0, 5000)]
    long = ["word" * 16, "word" * 16 + "s", "世" * 2000]
    assert subject.differing([*many, *long, *many]) == ([], 0)
    subject.engine.clear_cache()
    assert subject.differing([*long, *many]) == ([], 0)


def test_the_encoder_uses_it() -> None:
    data = unigram("t5")
    encoder = Encoder(data, Vocabulary(data))
    texts = [text.encode() for text in (*CORPUS, "a \u0301b", "", "x <mask>")]
    found = encoder.encode(texts)
    assert encoder.engine.startswith("penstock ") and encoder.why_reference == ""
    assert found.ids.tolist() == encoder.reference(texts).ids.tolist()
    assert found.fallbacks == {
        "text with a joining or invisible character beside a space": 1,
        "text with an added token that depends on its surroundings": 1,
    }
    assert found.ends is not None
    for k, text in enumerate(texts[:-3]):
        assert found.ends[slice(*found.offsets[k : k + 2])].tolist() == encoder.token_ends(text, found.ids).tolist()
    assert set(found.ends[found.offsets[-2] :].tolist()) == {UNKNOWN_END}


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}, "it normalizes with Strip"),
        ("normalizer", {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}, "it normalizes with Replace"),
        ("pre_tokenizer", {"type": "Punctuation", "behavior": "Isolated"}, "it splits text with Punctuation"),
        ("pre_tokenizer", {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}, "another character"),
    ],
)
def test_other_configurations_are_refused(part: str, value: Any, reason: str) -> None:
    config = json.loads(unigram("t5"))
    config[part] = value
    with pytest.raises(ValueError, match=reason):
        Subject(json.dumps(config).encode())


def test_normalized_added_tokens_are_refused() -> None:
    config = json.loads(unigram("t5"))
    config["added_tokens"][-1]["normalized"] = True
    with pytest.raises(ValueError, match="matched in normalized text"):
        Subject(json.dumps(config).encode())
