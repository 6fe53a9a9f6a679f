"""The tokens of a `tokenizer.json`: ids, bytes, special tokens and the normalizer, as arrays indexed by token id.

The byte length of a token is the length of the text it stands for. If that is unknown for a kind of tokenizer, it is 0
and the reference encoder's offsets are used. Takes about 0.15 s for 150,000 tokens, once per process.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag, StrEnum
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from penstock.errors import TokenizerError
from penstock.literals import Literals
from penstock.prepare.tokenizer.limits import check_content, check_ids, growth

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


class NormalizerKind(StrEnum):
    """How the tokenizer normalizes text."""

    NONE = "none"
    NFC = "nfc"
    SPACES = "spaces"  # ▁ for every space, as SentencePiece writes it
    SPACES_PREPENDED = "spaces, prepended"  # and one prepended to the text
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in the text before pre-tokenization."""

    id: int
    content: str
    special: bool
    normalized: bool  # matched after normalization
    context_sensitive: bool  # `lstrip` or `single_word`: matching depends on the text before it
    rstrip: bool  # absorbs the white space after it


@cache
def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers use for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class Vocabulary:
    """The tokens of a `tokenizer.json`."""

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._read(parse_tokenizer(tokenizer_json))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise TokenizerError(f"not a valid tokenizer.json: {error!r:.200}") from error

    def _read(self, config: dict[str, Any]) -> None:
        model = config["model"]
        vocab = model["vocab"]
        # Only these parts are needed later; the merges of a large tokenizer would take 30 MB.
        self._config: dict[str, Any] = {key: config.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")}
        added = config.get("added_tokens") or []
        self.added = tuple(
            AddedToken(
                id=t["id"],
                content=str(t["content"]),
                special=bool(t.get("special")),
                normalized=bool(t.get("normalized")),
                context_sensitive=bool(t.get("lstrip") or t.get("single_word")),
                rstrip=bool(t.get("rstrip")),
            )
            for t in added
        )
        self.byte_fallback = bool(model.get("byte_fallback"))
        self.unigram = model.get("type") == "Unigram"
        self.unk_id: int | None = model.get("unk_id") if self.unigram and not self.byte_fallback else None
        self.ignores_merges = bool(model.get("ignore_merges"))
        self._tokens: dict[str, int] = (
            vocab if isinstance(vocab, dict) else {str(entry[0]): i for i, entry in enumerate(vocab)}
        )
        numbers = [*self._tokens.values(), *(t.id for t in self.added)]
        check_ids([*self._tokens, *(t.content for t in self.added)], numbers)
        for token in self.added:
            check_content(token.content, "the added token")
        self.size = 1 + max(numbers, default=-1)
        # The smallest unsigned type that holds every id, added tokens included.
        self.dtype: type[np.uint16] | type[np.uint32] = np.uint16 if self.size <= 1 << 16 else np.uint32
        self.growth = growth(self.normalizer_steps)  # characters that the normalizer may write for one

    def id_of(self, content: str) -> int | None:
        """The id of a token, by its content."""
        added = self._added_ids.get(content)
        return added if added is not None else self._tokens.get(content)

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {t.content: t.id for t in reversed(self.added)}  # the first one counts

    @cached_property
    def special_contents(self) -> frozenset[str]:
        """The contents of the special tokens."""
        return frozenset(t.content for t in self.added if t.special)

    @cached_property
    def cuts(self) -> tuple[str, ...]:
        """Tokens before which a text can be cut without changing any id: matched as they stand, wherever they are."""
        plain = [t.content for t in self.added if t.special and not (t.normalized or t.context_sensitive or t.rstrip)]
        inside = Literals(plain).within("\0".join(t.content[1:] for t in self.added))
        return tuple(p for p in plain if p and p not in inside)

    @cached_property
    def special(self) -> npt.NDArray[np.bool_]:
        """For each id, whether it is a special token."""
        table = np.zeros(self.size, np.bool_)
        table[[t.id for t in self.added if t.special]] = True
        return table

    @cached_property
    def normalizer(self) -> NormalizerKind:
        """The kind of the tokenizer's normalizer."""
        steps = self.normalizer_steps
        if not steps:
            return NormalizerKind.NONE
        if steps == [{"type": "NFC"}]:
            return NormalizerKind.NFC
        if steps == [_SPACES] and not self.ignores_merges:
            return NormalizerKind.SPACES
        if steps == [{"type": "Prepend", "prepend": "▁"}, _SPACES] and not self.ignores_merges:
            return NormalizerKind.SPACES_PREPENDED
        return NormalizerKind.OTHER

    @cached_property
    def normalizer_steps(self) -> list[dict[str, Any]]:
        """The steps of the normalizer, in order."""
        return _steps(self._config.get("normalizer"), "normalizers")

    @property
    def pre_tokenizer(self) -> Any:
        """The configuration of the pre-tokenizer."""
        return self._config["pre_tokenizer"]

    @cached_property
    def pre_tokenizer_steps(self) -> list[dict[str, Any]]:
        """The steps of the pre-tokenizer, in order."""
        return _steps(self._config.get("pre_tokenizer"), "pretokenizers")

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens are written in the byte alphabet."""
        decoding = _steps(self._config.get("decoder"), "decoders")
        return any(step.get("type") == "ByteLevel" for step in (*decoding, *self.pre_tokenizer_steps))

    @cached_property
    def byte_lengths(self) -> npt.NDArray[np.unsignedinteger]:
        """For each id, the length in bytes of the text it stands for (0: unknown), in the smallest dtype that fits."""
        lengths = np.zeros(self.size, np.int32)
        if self.byte_level and self.normalizer is not NormalizerKind.OTHER:  # others may preserve the length by chance
            foreign = bytes(char not in byte_alphabet() for char in map(chr, range(512)))
            text = "".join(self._tokens)
            characters = np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), len(foreign) - 1)
            strange = np.concatenate(([0], np.cumsum(np.frombuffer(foreign, np.uint8)[characters], dtype=np.int32)))
            sizes = np.fromiter(map(len, self._tokens), np.int32, len(self._tokens))
            ends = np.cumsum(sizes)
            pure = strange[ends] == strange[ends - sizes]
            numbers = np.fromiter(self._tokens.values(), np.int64, len(self._tokens))
            lengths[numbers] = np.where(pure, sizes, 0)
            for token in self.added:
                lengths[token.id] = len(token.content.encode())
        lengths[lengths >= 1 << 16] = 0
        return lengths.astype(np.uint8 if lengths.max(initial=0) < 256 else np.uint16)

    @property
    def tokens(self) -> Mapping[str, int]:
        """The model's tokens and their ids."""
        return self._tokens

    @cached_property
    def pieces(self) -> TokenPieces:
        """The pieces of a SentencePiece-style tokenizer."""

        return token_pieces(self)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """For each id, the bytes it stands for; for display."""
        table = [b""] * self.size
        alphabet = byte_alphabet()
        if self.byte_level and alphabet.keys() >= set(joined := "".join(self._tokens)):
            # A character is a byte: all tokens are translated at once, ten times as fast as one by one.
            data, at = joined.translate({ord(char): byte for char, byte in alphabet.items()}), 0
            written = data.encode("latin-1")
            for text, i in self._tokens.items():
                table[i] = written[at : at + len(text)]
                at += len(text)
            return self._with_added(table)
        for text, i in self._tokens.items():
            if self.byte_level and alphabet.keys() >= set(text):
                table[i] = bytes(alphabet[c] for c in text)
            elif match := BYTE_TOKEN.fullmatch(text):
                table[i] = bytes([int(match[1], 16)])
            else:
                table[i] = text.replace("▁", " ").encode()
        return self._with_added(table)

    def _with_added(self, table: list[bytes]) -> list[bytes]:
        for token in self.added:
            table[token.id] = token.content.encode()
        return table


def parse_tokenizer(tokenizer_json: bytes) -> dict[str, Any]:
    """The file's JSON. Garbage collection is off meanwhile: half a million merges, each a list, would trigger it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        config: dict[str, Any] = orjson.loads(tokenizer_json)
    finally:
        if was_on:
            gc.enable()
    return config


def _steps(node: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    found: list[dict[str, Any]] = []
    todo = [node]
    while todo:  # iteratively, because sequences may be nested deeply
        step = todo.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence":
            todo += reversed(step.get(key) or [])
        elif isinstance(step, dict):
            found.append(step)
    return found


# ---- spm pieces ------------------------------------------------------------------------------------------------------
# The pieces of SentencePiece-style tokenizers, in the form that `native.count_tokens` matches against a text.
#
# In a piece, ▁ stands for a space or for itself. Some ▁ are not in the text: those that the tokenizer prepends to a
# text or to each section between added tokens and, if it drops white space, those before each word. Which ones follows
# from the tokenizer's configuration; for configurations not known here the rule is 0, and the reference's offsets are
# used. An added token may also be a piece (Gemma's runs of ▁); it then counts as the spaces it stands for. The unknown
# token of a Unigram model stands for a run of characters without pieces; only for ASCII is it known which these are.


class Rule(IntFlag):
    """Which ▁ are not in the text. Shared with `native/align.c`."""

    BY_PIECES = 1  # if not set, tokens are aligned by their byte lengths
    PREPENDS = 2  # a ▁ before each section
    PREPENDS_UNLESS_SPACE = 4  # a ▁ before each section that does not start with one
    ONLY_FIRST = 8  # with the rule above: only before the first section
    DROPS_SPACE = 16  # a ▁ before each word; white space around words is dropped


class PieceKind(IntEnum):
    """How a token relates to the text; shared with `native/align.c`."""

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
        kinds[number] = PieceKind.BYTE if byte else PieceKind.PIECE
    for token in vocabulary.added:
        contents[token.id] = token.content.encode()
        kinds[token.id] = _added_kind(token, sections=rule != Rule.BY_PIECES)
    if vocabulary.unk_id is not None:
        kinds[vocabulary.unk_id] = PieceKind.UNK
    foreign = [0x20 < point < 0x7F and chr(point) not in vocabulary.tokens for point in range(128)]
    starts = np.zeros(vocabulary.size + 1, np.uint32)
    np.cumsum([len(content) for content in contents], out=starts[1:])
    return TokenPieces(b"".join(contents), starts, kinds, np.array(foreign), rule)


def _added_kind(token: AddedToken, *, sections: bool) -> PieceKind:
    """The kind of an added token. With `sections`, it must be certain that the token ends a section."""
    unclear = token.normalized or "▁" in token.content
    if not token.content or token.context_sensitive or token.rstrip or (sections and unclear):
        return PieceKind.UNKNOWN
    return PieceKind.ADDED_OR_PIECE if "▁" in token.content else PieceKind.ADDED


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
