"""The pieces of SentencePiece-style tokenizers, in the form that `native.count_tokens` matches against a text.

In a piece, ▁ stands for a space or for itself. Some ▁ are not in the text: those that the tokenizer prepends to a text
or to each section between added tokens and, if it drops white space, those before each word. Which ones follows from
the tokenizer's configuration; for configurations not known here the rule is 0, and the reference's offsets are used.
An added token may also be a piece (Gemma's runs of ▁); it then counts as the spaces it stands for. The unknown token of
a Unigram model stands for a run of characters without pieces; only for ASCII is it known which these are.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.encode.vocabulary import BYTE_TOKEN, AddedToken, NormalizerKind, Vocabulary


class Rule(IntFlag):
    """Which ▁ are not in the text. The values are shared with `native/align.c`."""

    BY_PIECES = 1  # if not set, tokens are aligned by their byte lengths
    PREPENDS = 2  # a ▁ before each section
    PREPENDS_UNLESS_SPACE = 4  # a ▁ before each section that does not start with one
    ONLY_FIRST = 8  # with the rule above: only before the first section
    DROPS_SPACE = 16  # a ▁ before each word; white space around words is dropped


class _PieceKind(IntEnum):
    UNKNOWN = 0  # texts with such a token use the reference's offsets
    PIECE = 1
    BYTE = 2
    ADDED = 3
    ADDED_OR_PIECE = 4
    UNK = 5  # stands for a run of characters without pieces


class TokenPieces(NamedTuple):
    """The pieces of all tokens: token i is bytes[starts[i]:starts[i+1]]."""

    bytes: bytes
    starts: npt.NDArray[np.uint32]
    kinds: npt.NDArray[np.uint8]
    foreign: npt.NDArray[np.bool_]  # for each ASCII character, whether it has no piece of its own
    rule: int


def token_pieces(vocabulary: Vocabulary) -> TokenPieces:
    """Compute the pieces of a tokenizer; use `Vocabulary.pieces`, which caches them."""
    rule = _rule(vocabulary)
    if not rule:
        return TokenPieces(b"", np.zeros(1, np.uint32), np.zeros(0, np.uint8), np.zeros(128, np.bool_), 0)
    contents, kinds = [b""] * vocabulary.size, np.zeros(vocabulary.size, np.uint8)
    for text, number in vocabulary.tokens.items():
        byte = BYTE_TOKEN.fullmatch(text) if vocabulary.byte_fallback else None
        contents[number] = bytes([int(byte[1], 16)]) if byte else text.encode()
        kinds[number] = _PieceKind.BYTE if byte else _PieceKind.PIECE
    for token in vocabulary.added:
        contents[token.id] = token.content.encode()
        kinds[token.id] = _added_kind(token, sections=rule != Rule.BY_PIECES)
    if vocabulary.unk_id is not None:
        kinds[vocabulary.unk_id] = _PieceKind.UNK
    foreign = [0x20 < point < 0x7F and chr(point) not in vocabulary.tokens for point in range(128)]
    starts = np.zeros(vocabulary.size + 1, np.uint32)
    np.cumsum([len(content) for content in contents], out=starts[1:])
    return TokenPieces(b"".join(contents), starts, kinds, np.array(foreign), rule)


def _added_kind(token: AddedToken, *, sections: bool) -> _PieceKind:
    """The kind of an added token. With `sections`, it must be certain that the token ends a section."""
    unclear = token.normalized or "▁" in token.content
    if not token.content or token.context_sensitive or token.rstrip or (sections and unclear):
        return _PieceKind.UNKNOWN
    return _PieceKind.ADDED_OR_PIECE if "▁" in token.content else _PieceKind.ADDED


def _rule(vocabulary: Vocabulary) -> int:
    """How pieces relate to the text; 0 if unknown."""
    if vocabulary.byte_level:
        return 0
    types = [step.get("type") for step in vocabulary.pre_tokenizer_steps]
    prepending = vocabulary.normalizer is NormalizerKind.SPACES_PREPENDED
    if any(step.get("type") == "Prepend" for step in vocabulary.normalizer_steps) and not prepending:
        return 0
    rule = Rule.BY_PIECES | (Rule.PREPENDS if prepending else 0)
    if "Metaspace" in types:
        found = _metaspace_rule(vocabulary.pre_tokenizer_steps[types.index("Metaspace")])
        if found is None or prepending or types[-1] != "Metaspace":
            return 0
        rule |= found
    if "WhitespaceSplit" in types:
        if types != ["WhitespaceSplit", "Metaspace"] or not rule & Rule.PREPENDS_UNLESS_SPACE or rule & Rule.ONLY_FIRST:
            return 0
        rule |= Rule.DROPS_SPACE
    return int(rule)


def _metaspace_rule(step: dict[str, Any]) -> Rule | None:
    if step.get("replacement") != "▁":
        return None
    match step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never"):
        case "always":
            return Rule.PREPENDS_UNLESS_SPACE
        case "first":
            return Rule.PREPENDS_UNLESS_SPACE | Rule.ONLY_FIRST
        case "never":
            return Rule(0)
    return None
