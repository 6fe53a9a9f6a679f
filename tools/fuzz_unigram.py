"""Fuzzes the Unigram engine: with random texts and vocabularies of many equal scores, it must equal the reference."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from penstock.prepare.encode.unigram import UnigramEngine
from penstock.prepare.tokenizer.reference import ReferenceEncoder
from penstock.prepare.tokenizer.vocabulary import Vocabulary
from tests.support.unigram_tokenizers import SHAPES, TABLE, unigram

TEXTS = 200
_PARTS = [
    *"abc \n\t\r.", "  ", "\r\n", "▁", "▁▁", "Abc", "<unk>", "</s>", "<|x|>", "<mask>", "<0x41>", "é", "e\u0301",
    "\u0301", "世界", "한국", "\u1161", "नमस्ते", "ำ", "\u064e", "👩\u200d👩", "👍🏽", "🇩🇪", "\U0001fae8", "\u200e",
    "\ufeff", "\x00", "\x1b", *TABLE,
]  # fmt: skip


def _text(choose: random.Random) -> str:
    if not choose.randrange(20):  # longer than the words that are kept
        return choose.choice(_PARTS) * choose.randrange(10, 100) + choose.choice(_PARTS)
    characters = [chr(choose.randrange(0xD7FF)) for _ in range(choose.randrange(3))]
    return "".join(choose.choice([*_PARTS, *characters]) for _ in range(choose.randrange(12)))


def _tokenizer(choose: random.Random) -> bytes:
    """A tokenizer of one of the usual shapes, with random pieces and scores."""
    config = json.loads(unigram(choose.choice(list(SHAPES))))
    model = config["model"]
    special = {token["content"] for token in config["added_tokens"]}
    pieces = {"".join(choose.choice(_PARTS) for _ in range(choose.randrange(1, 4))) for _ in range(300)} - special
    scores = choose.choice(([-1, -2], [-1.5, -3, -4.25], [0.1, 5, -7], [-3.0577287673950195, -3.1, -9.9]))
    known = {piece for piece, _ in model["vocab"]}
    model["vocab"] = [[piece, choose.choice(scores)] for piece, _ in model["vocab"]]
    new = [[piece, choose.choice(scores)] for piece in sorted(pieces - known)]
    first = next(k for k, token in enumerate(config["added_tokens"]) if token["content"] == "<mask>")
    config["added_tokens"][first]["id"] = len(model["vocab"]) + len(new)
    model["vocab"] += new
    return json.dumps(config).encode()


def rounds(choose: random.Random) -> Iterator[dict[str, Any]]:
    """Yields cases without end: a tokenizer and texts."""
    while True:
        tokenizer = _tokenizer(choose).decode()
        yield {"part": "unigram", "tokenizer": tokenizer, "texts": [_text(choose) for _ in range(TEXTS)]}


def differences(case: dict[str, Any], counts: Counter[str]) -> list[str]:
    """The texts of a case that the engine encodes differently."""
    data = case["tokenizer"].encode()
    reference = ReferenceEncoder(data)
    engine = UnigramEngine(reference, Vocabulary(data))
    texts = [text.encode() for text in case["texts"]]
    found = engine.encode(texts)
    assert found.ends is not None
    wrong: list[str] = []
    for k, text in enumerate(texts):
        own = slice(*found.offsets[k : k + 2].tolist())
        if k in found.left:
            counts["unigram texts left to the reference"] += 1
            continue
        counts["unigram texts"] += 1
        ids, ends = reference.encode_with_ends(text)
        if (found.ids[own].tolist(), found.ends[own].tolist()) != (ids, ends.tolist()):
            wrong.append(text.decode())
    return wrong
