"""`tokenizers` 1.x has the ids of 0.23, or refuses. The second half runs where 1.x is installed: `make tokenizers1`."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TokenizerError
from penstock.prepare import recipe
from penstock.prepare.encode.encoder import Encoder, probe_texts
from penstock.prepare.encode.engines import Gigatoken
from penstock.prepare.encode.example_batch import encode_texts
from penstock.prepare.tokenizer import reference
from penstock.prepare.tokenizer.vocabulary import Vocabulary
from tests.prepare.encode.test_align import segments

predecessor = pytest.mark.skipif(reference.IS_SUCCESSOR, reason="compares with tokenizers 0.23")
successor = pytest.mark.skipif(not reference.IS_SUCCESSOR, reason="tokenizers 1.x is not installed")

KINDS = reference._newer_characters()
MARKS = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)).startswith("M") and not KINDS[c]]


@predecessor
def test_refused_characters_are_unassigned_in_the_tables_of_0_23() -> None:
    from tokenizers import Regex, pre_tokenizers

    newer = "".join(map(chr, np.flatnonzero(KINDS & reference._CLASSIFIED).tolist()))
    assert len(newer) == 4803  # what Unicode 17 added
    assert pre_tokenizers.Split(Regex(r"\p{Cn}+"), "removed").pre_tokenize_str(newer) == []


@predecessor
@given(st.text(st.one_of(st.sampled_from("eAn か가ᄀ한<\u09c7"), st.sampled_from(MARKS)), max_size=12))
def test_other_text_is_normalized_alike(text: str) -> None:
    assert reference.nfc(text) == unicodedata.normalize("NFC", text)


@predecessor
@pytest.mark.parametrize("name", ["tokenizer", "deepseek"])
def test_added_tokens_are_written_as_0_23_writes_them(name: str, request: pytest.FixtureRequest) -> None:
    data = (request.getfixturevalue(name) / "tokenizer.json").read_bytes()
    tokens: list[dict[str, Any]] = [{"content": "<x>", "special": True}, {"content": "<y>", "lstrip": True}]
    tokens += [{"content": "a", "special": False, "normalized": False}]
    assert reference._with_added_tokens(data, tokens) == reference.with_added_tokens(data, tokens)
    config = orjson.loads(data)
    config["model"] = {key: config["model"][key] for key in ("vocab", "merges")}
    if name == "tokenizer":  # older files have merges in this form, unless tokens have spaces
        config["model"]["merges"] = [" ".join(pair) for pair in config["model"]["merges"]]
    old = orjson.dumps(config)
    assert reference._with_added_tokens(old, tokens) == reference.with_added_tokens(old, tokens)


def test_releases_of_1_x_that_passed_share_keys_with_0_23(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for given_version in ("0.23.3", *recipe.EQUAL_TOKENIZERS, "1.1.0"):
        monkeypatch.setattr(recipe, "version", lambda name, v=given_version: v if name == "tokenizers" else "3.1.6")
        found[given_version] = recipe._references(with_templates=False)["tokenizers"]
    assert found == {"0.23.3": "0.23", **dict.fromkeys(recipe.EQUAL_TOKENIZERS, "0.23"), "1.1.0": "1.1"}


# -- with 1.x -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(deepseek: Path) -> Encoder:
    data = (deepseek / "tokenizer.json").read_bytes()
    return Encoder(data, Vocabulary(data))


@pytest.fixture(scope="module")
def nfc(tokenizer: Path) -> Encoder:
    config = orjson.loads((tokenizer / "tokenizer.json").read_bytes())
    data = orjson.dumps({**config, "normalizer": {"type": "NFC"}})
    return Encoder(data, Vocabulary(data))


@successor
def test_it_is_the_engine(large: Encoder) -> None:
    texts = [probe.encode() for probe in probe_texts(large.vocabulary)]
    large.start_fast()
    encoded = large.encode(texts)
    assert large._fast is None and large.engine == f"tokenizers {reference.VERSION}"
    assert not encoded.fallbacks and not large.not_served and not large.why_reference
    expected = Gigatoken(large._json).encode(texts)
    assert encoded.ids.tolist() == expected.ids.tolist() and encoded.offsets.tolist() == expected.offsets.tolist()


@successor
def test_text_that_0_23_may_encode_differently_is_refused(large: Encoder, nfc: Encoder) -> None:
    with pytest.raises(TokenizerError, match=r"^U\+1FAEA in 'a .*': tokenizers 1\..* may encode .*tokenizers<1"):
        large.encode([b"plain", "a \U0001faea".encode()])
    mark = "e\u0301\u08d3".encode()
    assert len(large.encode([mark]).ids)
    with pytest.raises(TokenizerError, match=r"^U\+08D3 "):
        nfc.encode([mark])


@successor
def test_masks_that_need_offsets_are_refused(nfc: Encoder) -> None:
    text = "cafe\u0301".encode()
    found = encode_texts([text], segments([[len(text)]], [[False]]), nfc)
    assert found.ends.tolist() == [len(found.ids)]
    with pytest.raises(TokenizerError, match=r"masks of this text need the offsets .* lacks"):
        encode_texts([text], segments([[4, len(text)]], [[False, False]]), nfc)  # between the letter and its mark


@successor
def test_tokenizers_that_it_is_known_to_encode_differently_are_refused(tokenizer: Path) -> None:
    config = orjson.loads((tokenizer / "tokenizer.json").read_bytes())
    data = orjson.dumps({**config, "normalizer": {"type": "NFKC"}})
    with pytest.raises(TokenizerError, match="is not trusted with"):
        Encoder(data, Vocabulary(data))
    config["model"]["vocab"]["‼"] = len(config["model"]["vocab"]) + len(config["added_tokens"])
    data = orjson.dumps(config)
    with pytest.raises(TokenizerError, match="tokens that are not written in the byte alphabet, which tokenizers 1"):
        Encoder(data, Vocabulary(data))
