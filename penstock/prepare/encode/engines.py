"""The fast engines of others: gigatoken, and optionally splintr for tokenizers that gigatoken does not support.

Both are young libraries. `why_untrusted` rules out some tokenizers by their configuration; for all others, `Encoder`
compares an engine with the reference before it uses it, and `ClassProbe` compares them on characters newer than
Unicode 14. Both cache every word they see until `clear_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise, product
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import orjson

from penstock.arrays import Int64, UInt32
from penstock.prepare.encode.process_memory import release_free_memory
from penstock.prepare.tokenizer.reference import ReferenceEncoder
from penstock.prepare.tokenizer.vocabulary import NormalizerKind, Vocabulary, byte_alphabet


class EngineOutput(NamedTuple):
    """What an engine makes of texts: the ids of all, and the offsets of the texts in them, including the end."""

    ids: UInt32
    offsets: Int64
    ends: UInt32 | None = None  # where each token ends in its text, in bytes; None if the engine doesn't know
    left: Mapping[int, str] = {}  # texts without ids, which the reference must encode, and the reason for each


class FastEngine(Protocol):
    """Encodes texts like `tokenizers` with `add_special_tokens=False`."""

    name: str

    @property
    def checks_texts(self) -> bool:
        """Whether it finds the texts itself that it must not encode."""

    def encode(self, texts: list[bytes]) -> EngineOutput:
        """Encode UTF-8 texts."""

    def clear_cache(self) -> None:
        """Free the memory of cached words."""


class Gigatoken:
    """Supports byte-level BPE, and SentencePiece-style BPE with byte fallback."""

    checks_texts: Final = False

    def __init__(self, tokenizer_json: bytes) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._json = tokenizer_json
        self._backend: Any = None
        self.clear_cache()

    def encode(self, texts: list[bytes]) -> EngineOutput:
        """Encode one by one: the batch method imports awkward, and on SentencePiece-style BPE it caches no words."""
        return _joined([self._backend.encode(text) for text in texts])

    def clear_cache(self) -> None:
        """Rebuild the engine, which has no other way to free its cache; takes 0.1 to 1.2 s."""
        from gigatoken import Tokenizer

        self._backend = None
        release_free_memory()  # or the new engine would grow on top of the old one's memory
        self._backend = Tokenizer.from_json(self._json).backend
        self._backend.encode(b"warm")


class Splintr:
    """Supports all kinds of BPE, and Unigram for configurations that our own engine refuses."""

    checks_texts: Final = False

    def __init__(self, tokenizer_json: bytes) -> None:
        from splintr import from_json_bytes

        self.name = f"splintr {version('splintr-rs')}"
        self._backend: Any = from_json_bytes(tokenizer_json)

    def encode(self, texts: list[bytes]) -> EngineOutput:
        """Encode one by one: its batch method uses threads."""
        return _joined([np.array(self._backend.encode_raw(text.decode()), np.uint32) for text in texts])

    def clear_cache(self) -> None:
        """Clear the engine's own cache."""
        self._backend.clear_cache()


def _joined(rows: list[UInt32]) -> EngineOutput:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return EngineOutput(np.concatenate([np.zeros(0, np.uint32), *rows]), offsets)


EngineFactory = Callable[[bytes], FastEngine]
ENGINES: Final[dict[str, EngineFactory]] = {"gigatoken": Gigatoken, "splintr": Splintr}


def why_untrusted(engine: str, vocabulary: Vocabulary) -> str:
    """Why an engine must not be used with a tokenizer at all, or ''.

    Other normalizers were tested: with NFKC, splintr produced different ids for 3 of 41,830 texts.
    """
    charsmap = [step.get("type") for step in vocabulary.normalizer_steps] == ["Precompiled"]
    if vocabulary.normalizer is NormalizerKind.OTHER and (engine == "gigatoken" or not charsmap):
        return f"the tokenizer normalizes text in a way that {engine} is not trusted with"
    # Command-R has such tokens, for emoji. No merges lead to them, and only 1.x gives them to text.
    written = vocabulary.byte_lengths[list(vocabulary.tokens.values())] if vocabulary.byte_level else np.ones(1)
    if engine.startswith("tokenizers") and not written.all():
        return f"the vocabulary has tokens that are not written in the byte alphabet, which {engine} finds in texts"
    return ""


# ---- characters ------------------------------------------------------------------------------------------------------
#
# A byte-level engine looks at a character only to split texts into words. Whether two engines put it into the same
# class (letter, mark, number, symbol …) shows in where they split texts that have it beside characters of each class.
# A vocabulary of single bytes and of pairs of bytes that meet there makes every such place visible in the ids.


_NEIGHBOURS: Final = b"aZ1 \n\r'.\t_/s"
_CONTEXTS: Final = (
    "{}", "a{}", "{}a", "a{}a", "Z{}", "{}Z", "Z{}a", "a{}Z", "1{}", "{}1", "1{}1", " {}", "{} ", "  {}", "{}  a",
    "\n{}", "{}\n", "{}\n\n", "\r{}", "{}\r\n", "'{}", "{}'s", "'s{}", ".{}", "{}.", ".{}a", "\t{}", "{}\t", "_{}a",
    "/{}", "{}/", "{}{}", "a{}{}1", " {}a", " {}1", " {}.", "é{}", "{}é", "é{}é", "中{}中", "１{}１", "\u0301{}",
    "{}\u0301", "a{}\u0301a", "，{}，", "№{}№", "\u00a0{}", "\u00a0\u00a0{}", "ა{}ა", "ʰ{}ʰ", "ǅ{}ǅ", "É{}É", "😀{}😀",
    "²{}²", "{}Za", "Z{}Za", "a{}Za", "{}{}Za", "Z{}aZ", "..{}", "..{}a", "..{}..", "..{}1",
)  # fmt: skip


class ClassProbe:
    """Compares a fast engine with the reference on how they split texts at single characters."""

    def __init__(self, engine: str, pre_tokenizer: Any) -> None:
        tokenizer_json = orjson.dumps(_pairs_of_bytes(pre_tokenizer))
        self._engines = ReferenceEncoder(tokenizer_json), ENGINES[engine](tokenizer_json)

    def agreed(self, points: Sequence[int]) -> list[bool]:
        """Whether both engines treat a code point in the same way."""
        texts = ["\n\n".join(_CONTEXTS).replace("{}", chr(point)).encode() for point in points]
        (ids, ends), (others, other_ends) = (engine.encode(texts)[:2] for engine in self._engines)
        places = zip(pairwise(ends.tolist()), pairwise(other_ends.tolist()), strict=True)
        return [np.array_equal(ids[slice(*own)], others[slice(*other)]) for own, other in places]


def _pairs_of_bytes(pre_tokenizer: Any) -> dict[str, Any]:
    """A tokenizer.json with this pre-tokenizer, and a token for every pair of bytes that a probe may join."""
    written = {byte: char for char, byte in byte_alphabet().items()}
    first, later = range(0xC2, 0xF5), range(0x80, 0xC0)  # bytes of a UTF-8 character
    joined = ((later, _NEIGHBOURS), (_NEIGHBOURS, first), (_NEIGHBOURS, _NEIGHBOURS), (later, first))
    pairs = [(written[one], written[other]) for sides in joined for one, other in product(*sides)]
    tokens = [*(written[byte] for byte in range(256)), *map("".join, pairs)]
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "merges": pairs,
        "vocab": {token: number for number, token in enumerate(tokens)},
    }  # fmt: skip
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    parts = {"pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return {"version": "1.0", **nothing, "added_tokens": [], **parts}
