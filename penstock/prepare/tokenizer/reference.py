"""The reference encoder: everything that Penstock needs of `tokenizers`, except the objects that transformers wraps.

Whatever the encoder raises when it panics becomes EncoderPanic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import orjson

from penstock.arrays import Int64, UInt32
from penstock.errors import EncoderPanic, TokenizerError

PROBES: Final = ("a", "Hello there", "")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")


class ReferenceEncoder:
    """A tokenizer of `tokenizers`. No special tokens are added: templates write their own."""

    def __init__(self, tokenizer_json: bytes) -> None:
        # Worker processes provide the parallelism; a thread pool in each would only compete for cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import processors

        self.name = f"tokenizers {version('tokenizers')}"
        try:
            with convert_panics("tokenizers"):
                self._backend = backend(tokenizer_json)
        except Exception as error:
            raise TokenizerError(f"tokenizers can't load this tokenizer.json: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        with convert_panics("tokenizers"):
            # The ids of each probe, and those with the special tokens that the post-processor adds around it.
            self.probes = [self._probed(probe) for probe in PROBES]
        self._backend.post_processor = processors.Sequence([])  # it may trim offsets

    def _probed(self, text: str) -> tuple[list[int], list[int]]:
        plain, full = (self._backend.encode(text, add_special_tokens=around).ids for around in (False, True))
        return plain, full

    def encode(self, texts: list[bytes]) -> tuple[UInt32, Int64]:
        """The ids of all texts, and the offsets of the texts in them, including the end."""
        with convert_panics("tokenizers"):
            encodings = self._backend.encode_batch_fast(list(map(bytes.decode, texts)), add_special_tokens=False)
        rows = list(map(attrgetter("ids"), encodings))
        return np.fromiter(chain.from_iterable(rows), np.uint32), np.cumsum([0, *map(len, rows)])

    def token_ends(self, text: bytes) -> Int64:
        """Where each token of a text ends, in bytes."""
        return self.encode_with_ends(text)[1]

    def encode_with_ends(self, text: bytes) -> tuple[list[int], Int64]:
        """The ids of a text, and where each token ends, in bytes."""
        with convert_panics("tokenizers"):
            encoding = self._backend.encode(text.decode(), add_special_tokens=False)
        ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(encoding))
        characters = np.flatnonzero(np.frombuffer(text, np.uint8) & 0xC0 != 0x80)  # where each starts
        return encoding.ids, np.append(characters, len(text))[np.maximum.accumulate(ends)]

    def model(self) -> Any:
        """The model, as the encoder understood it: it parses some numbers to the neighbours of what the file says."""
        return orjson.loads(self._backend.model.__getstate__())

    def added_tokens(self) -> dict[int, Any]:
        """The added tokens by id; each has `content` and the flags of tokenizer.json."""
        found: dict[int, Any] = self._backend.get_added_tokens_decoder()
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text that ids stand for, special tokens included."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def backend(tokenizer_json: bytes) -> Any:
    """The object of `tokenizers` itself, which transformers can wrap."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json.decode())


def normalizer(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], str]:
    """What the normalizers of a tokenizer.json make of a text."""
    config = {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": list(steps)},
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    }
    found = backend(orjson.dumps(config)).normalizer
    return lambda text: str(found.normalize_str(text))


def nfc(text: str) -> str:
    """A text in NFC by the reference's own tables, which differ from Python's for characters new to either."""
    from tokenizers.normalizers import NFC

    return NFC().normalize_str(text)


def with_added_tokens(tokenizer_json: bytes, tokens: Sequence[Mapping[str, Any]]) -> bytes:
    """A tokenizer.json with further added tokens, described as in `tokenizer_config.json`."""
    from tokenizers import AddedToken

    tokenizer = backend(tokenizer_json)
    tokenizer.add_tokens([
        AddedToken(t["content"], special=bool(t.get("special")), **{k: bool(t[k]) for k in _FLAGS if k in t})
        for t in tokens
    ])  # fmt: skip
    written: str = tokenizer.to_str()
    return written.encode()


@contextmanager
def convert_panics(engine: str) -> Iterator[None]:
    """Raise EncoderPanic when a Rust engine panics. pyo3 raises a BaseException, which ordinary handlers miss."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's exception can't be imported
            raise
        message = f"{engine} panics: {str(error).splitlines()[0] if str(error) else 'without a reason'}"
    else:
        return
    raise EncoderPanic(message)  # outside the handler, so that it does not reference the panic's frames
