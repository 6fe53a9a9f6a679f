"""The fast engines of others: gigatoken, and optionally splintr for tokenizers that gigatoken does not support.

Both are young libraries. `why_untrusted` rules out some tokenizers by their configuration; for all others, `Encoder`
compares an engine with the reference before it uses it. Both cache every word they see until `clear_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from penstock.arrays import Int64, UInt32
from penstock.prepare.encode.process_memory import release_free_memory
from penstock.prepare.tokenizer.vocabulary import NormalizerKind, Vocabulary


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
