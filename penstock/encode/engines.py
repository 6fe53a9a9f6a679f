"""The fast engines: gigatoken, and splintr (optional) for tokenizers that gigatoken does not serve.

Both are young. Which tokenizers they are tried on is decided by shape (`engines_for`); whether they serve one is
decided by trial, in `Encoder`. Both keep every word that they have seen until told to `clear_cache` them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.encode.memory import release_free_memory
from penstock.encode.vocabulary import NormalizerKind, Vocabulary
from penstock.errors import EncoderPanic

UInt32 = npt.NDArray[np.uint32]


class FastEngine(Protocol):
    """Encodes texts as tokenizers does with `add_special_tokens=False`."""

    name: str

    def encode(self, texts: list[bytes]) -> tuple[UInt32, Int64]:
        """Ids of all texts, and where each text's begin, with the end of the last one behind."""

    def clear_cache(self) -> None:
        """Give back the memory of the words seen so far."""


class Gigatoken:
    """Byte-level BPE, and SentencePiece-style BPE with byte fallback."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.name = f"gigatoken {version('gigatoken')}"
        self._json = tokenizer_json
        self._backend: Any = None
        self.clear_cache()

    def encode(self, texts: list[bytes]) -> tuple[UInt32, Int64]:
        """On the calling thread: parallelism belongs to our worker processes."""
        layout = self._backend.encode_batch(texts, parallel=False).layout
        # Copied, because the engine's own array has room for half as many ids again.
        return np.array(layout.content.data), np.array(layout.offsets.data, dtype=np.int64)

    def clear_cache(self) -> None:
        """It has no way to clear_cache: it is built anew, in 0.1 to 1.2 s."""
        from gigatoken import Tokenizer

        self._backend = None
        release_free_memory()  # or the new one would grow on top of the old one's memory
        self._backend = Tokenizer.from_json(self._json).backend
        self._backend.encode_batch([b"warm"], parallel=False)


class Splintr:
    """Every kind of BPE, and Unigram."""

    def __init__(self, tokenizer_json: bytes) -> None:
        from splintr import from_json_bytes

        self.name = f"splintr {version('splintr-rs')}"
        self._backend: Any = from_json_bytes(tokenizer_json)

    def encode(self, texts: list[bytes]) -> tuple[UInt32, Int64]:
        """One by one: its batches use threads."""
        encode = self._backend.encode_raw
        rows = [encode(text.decode()) for text in texts]
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return np.concatenate([np.zeros(0, np.uint32), *(np.array(row, np.uint32) for row in rows)]), offsets

    def clear_cache(self) -> None:
        """Empty its cache."""
        self._backend.clear_cache()


EngineFactory = Callable[[bytes], FastEngine]
ENGINES: Final[dict[str, EngineFactory]] = {"gigatoken": Gigatoken, "splintr": Splintr}


def why_untrusted(engine: str, vocabulary: Vocabulary) -> str:
    """Why an engine is not even tried on a tokenizer, or ''.

    Other normalisers were tried: with NFKC, 3 of 41,830 texts had other ids by splintr.
    """
    charsmap = [step.get("type") for step in vocabulary.normalizer_steps] == ["Precompiled"]
    if vocabulary.normalizer is NormalizerKind.OTHER and not (engine == "splintr" and charsmap):
        return f"the tokenizer normalises text in a way that {engine} is not trusted with"
    return ""


@contextmanager
def convert_panics(engine: str) -> Iterator[None]:
    """Raises EncoderPanic where the engine panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which has no importable name
            raise
        words = f"{engine} panics: {str(error).splitlines()[0] if str(error) else 'without a reason'}"
    else:
        return
    raise EncoderPanic(words)  # here, so that it does not hold the panic's frames
