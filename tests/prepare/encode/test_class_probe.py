"""The comparison of engines on single characters sees every difference between classes that a pre-tokenizer makes."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from itertools import permutations
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from penstock.prepare.encode.engines import _CONTEXTS, ClassProbe, _pairs_of_bytes
from penstock.prepare.encode.unicode_checks import unassigned

CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SYMBOLS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"": "", "plain": PLAIN, "cased": CASED, "symbols": SYMBOLS}
CATEGORIES = sorted({unicodedata.category(chr(c)) for c in range(0x80, sys.maxunicode)} - {"Cs", "Cn", "Zl", "Zp"})


def pre_tokenizer(pattern: str) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pattern}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]} if pattern else byte_level


def splits(tokenizer: Tokenizer, contexts: list[str], character: str) -> list[list[tuple[int, int]]]:
    """Where texts with a character are split into words."""
    assert tokenizer.pre_tokenizer is not None
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    return [[place for _, place in split(context.replace("{}", character))] for context in contexts]


@pytest.mark.parametrize("name", PATTERNS)
def test_classes_are_told_apart(name: str) -> None:
    """Characters that are split differently in any of 400 random texts are so in the probe, and its ids differ."""
    choose = random.Random(name)
    rest = [chr(c) for c in (*range(0x20, 0x7F), 0x0A, 0x0D, 0xE9, 0x301, 0x4E2D, 0xB2, 0x1F600, 0xA0, 0x2B0, 0x1C5)]
    texts = ["".join(choose.choices([*rest, "{}", "{}"], k=6)) for _ in range(400)]
    tokenizer = Tokenizer.from_str(json.dumps(_pairs_of_bytes(pre_tokenizer(PATTERNS[name]))))
    words = Tokenizer.from_str(json.dumps(_pairs_of_bytes(pre_tokenizer(""))))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    character = {category: member(category) for category in CATEGORIES}
    in_texts = {c: splits(tokenizer, texts, character[c]) for c in CATEGORIES}
    in_probe = {c: splits(tokenizer, list(_CONTEXTS), character[c]) for c in CATEGORIES}

    def ids(category: str, treated_as: str) -> list[list[int]]:
        """The ids of the probe of one character, split as if it were of another category."""
        probes = [context.replace("{}", character[category]) for context in _CONTEXTS]
        return [
            [i for a, b in places for i in words.encode(probe[a:b]).ids]
            for probe, places in zip(probes, in_probe[treated_as], strict=True)
        ]

    own = {category: ids(category, category) for category in CATEGORIES}
    for one, other in permutations(CATEGORIES, 2):
        if in_texts[one] != in_texts[other]:
            assert in_probe[one] != in_probe[other], (one, other)
        if in_probe[one] != in_probe[other]:
            assert own[one] != ids(one, other), (one, other)


def member(category: str) -> str:
    """The last assigned character of a category beyond Latin."""
    found = (c for c in range(0x2FFFF, 0x7F, -1) if not unassigned()[c] and unicodedata.category(chr(c)) == category)
    return chr(next(found, 0xAD))


@pytest.mark.parametrize("engine", ["gigatoken", "splintr"])
def test_engines_agree_on_old_characters_and_on_new_emoji(engine: str) -> None:
    pytest.importorskip(engine)
    probe = ClassProbe(engine, pre_tokenizer(CASED))
    assert all(probe.agreed([ord(member(category)) for category in CATEGORIES]))
    assert all(probe.agreed([0x1FAE8, 0x1FADA, 0x1FAE9]))


def test_differences_are_seen() -> None:
    """Gigatoken's tables are of Unicode 17 and the reference's are older: this letter is not one yet."""
    assert ClassProbe("gigatoken", pre_tokenizer(PLAIN)).agreed([0x16EA0, 0x1FAE8]) == [False, True]
