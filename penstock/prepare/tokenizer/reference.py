"""The reference encoder: everything that Penstock needs of `tokenizers`, except the objects that transformers wraps.

The reference is `tokenizers` 0.23. Its successor 1.x is as fast as the fast engines, so where it is installed it is the
engine as well. Datasets of both have the same key, so both must write the same bytes. But 1.x classifies characters as
Unicode 17 does, not 16, normalizes as Unicode 17 does, not 9, and has no offsets. Texts with characters on which they
may differ, and texts whose masks need offsets, stop the build. They are not rejected as bad rows: 0.23 keeps them.
"""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.metadata import version
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from penstock.arrays import Int64, UInt32
from penstock.errors import EncoderPanic, TokenizerError
from penstock.native import native

VERSION: Final = version("tokenizers")
IS_SUCCESSOR: Final = not VERSION.startswith("0.")
PROBES: Final = ("a", "Hello there", "")
_BPE: Final[dict[str, Any]] = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {}, "merges": [],
}  # fmt: skip
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")
_INSTEAD: Final = "Install the version that encodes them: pip install 'tokenizers<1'."


# ---- encoders --------------------------------------------------------------------------------------------------------


class ReferenceEncoder:
    """A tokenizer of `tokenizers` 0.23. No special tokens are added: templates write their own."""

    is_engine = False  # whether no other engine is needed
    has_offsets = True

    def __init__(self, tokenizer_json: bytes) -> None:
        # Worker processes provide the parallelism; a thread pool in each would only compete for cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.name = f"tokenizers {VERSION}"
        try:
            with convert_panics("tokenizers"):
                self._backend = self._load(tokenizer_json)
        except Exception as error:
            raise TokenizerError(f"tokenizers can't load this tokenizer.json: {error}") from error
        with convert_panics("tokenizers"):
            # The ids of each probe, and those with the special tokens that the post-processor adds around it.
            self.probes = [self._probed(probe) for probe in PROBES]

    def _load(self, tokenizer_json: bytes) -> Any:
        loaded = backend(tokenizer_json)
        loaded.no_truncation()
        loaded.no_padding()
        return loaded

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
        from tokenizers import processors

        self._backend.post_processor = processors.Sequence([])  # it may trim offsets
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


class SuccessorEncoder(ReferenceEncoder):
    """A tokenizer of `tokenizers` 1.x."""

    is_engine = True
    has_offsets = False

    def _load(self, tokenizer_json: bytes) -> Any:
        from tokenizers import Tokenizer

        loader: Any = Tokenizer
        with tempfile.NamedTemporaryFile(suffix=".json") as file:  # it reads only files
            file.write(tokenizer_json)
            file.flush()
            loaded = loader.from_file(file.name)
        loaded.truncation = loaded.padding = None
        self._json = tokenizer_json
        return loaded

    @cached_property
    def _composes(self) -> bool:
        return b'"NFC"' in orjson.dumps(orjson.loads(self._json).get("normalizer"))

    def encode(self, texts: list[bytes]) -> tuple[UInt32, Int64]:
        """The same. Raises TokenizerError if 0.23 may encode a text differently."""
        for text, kind in zip(texts, _kinds_in(texts), strict=True):
            if kind & _CLASSIFIED or (kind & _NORMALIZED and self._composes):
                self._refuse(text.decode())
        with convert_panics("tokenizers"):
            encodings = self._backend.encode_batch(list(map(bytes.decode, texts)), add_special_tokens=False)
        rows = list(map(attrgetter("ids_array"), encodings))
        return np.concatenate([np.zeros(0, np.uint32), *rows]), np.cumsum([0, *map(len, rows)])

    def _refuse(self, text: str) -> None:
        kinds = _newer_characters()
        at = next(k for k, character in enumerate(text) if kinds[ord(character)])
        raise TokenizerError(
            f"U+{ord(text[at]):04X} in {text[max(0, at - 20) : at + 20]!r}: {self.name} may encode a character as new "
            f"as this one unlike 0.23, whose key the dataset has. {_INSTEAD}"
        )

    def encode_with_ends(self, text: bytes) -> tuple[list[int], Int64]:
        """Raises TokenizerError."""
        raise TokenizerError(
            f"{text.decode()[:80]!r}: the masks of this text need the offsets of its tokens, which {self.name} lacks: "
            f"the tokenizer changes the text before it encodes it. {_INSTEAD}"
        )


def reference_encoder(tokenizer_json: bytes) -> ReferenceEncoder:
    """The encoder of the version that is installed."""
    return (SuccessorEncoder if IS_SUCCESSOR else ReferenceEncoder)(tokenizer_json)


def backend(tokenizer_json: bytes) -> Any:
    """The object of `tokenizers` 0.23 itself, which transformers can wrap."""
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


# ---- characters ------------------------------------------------------------------------------------------------------
#
# The characters that are new in Unicode 17; and those new since Unicode 9 that Unicode 17 composes or reorders.
# 0.23 and 1.0.0rc3 were compared on every code point, and their NFC on random texts without the second kind.

_CLASSIFIED: Final = 1
_NORMALIZED: Final = 2
_RANGES: Final = {
    _CLASSIFIED: """
88f c5c cdc 1acf-1add 1ae0-1aeb 20c1 2b96 a7ce-a7cf a7d2 a7d4 a7f1 fbc3-fbd2 fd90-fd91 fdc8-fdce 10940-10959
10ec5-10ec7 10ed0-10ed8 10efa-10efb 11b60-11b67 11db0-11ddb 11de0-11de9 16ea0-16eb8 16ebb-16ed3 16ff2-16ff6 187f8-187ff
18d09-18d1e 18d80-18df2 1ccfa-1ccfc 1ceba-1ced0 1cee0-1cef0 1e6c0-1e6de 1e6e0-1e6f5 1e6fe-1e6ff 1f6d8 1f777-1f77a
1f8d0-1f8d8 1fa54-1fa57 1fa8a 1fa8e 1fac8 1facd 1faea 1faef 1fbfa 2b73a-2b73f 2cea2-2cead 323b0-33479
""",
    _NORMALIZED: """
7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1add 1ae0-1aeb 1df6-1dfa a82c 105c9 105d2 105da 105e4 10d24-10d27
10d69-10d6d 10eab-10eac 10efa-10efb 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 11382-11385 1138b 1138e 11390-11391
113b8 113bb 113c2 113c5 113c7-113c9 113ce-113d0 1145e 11839-1183a 11930 11935 11938 1193d-1193e 11943 119e0 11a34 11a47
11a99 11d42 11d44-11d45 11d97 11f41-11f42 1611e-16129 1612f 16d63 16d67-16d6a 16ff0-16ff1 1e08f 1e130-1e136 1e2ae
1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef 1e6e3 1e6e6 1e6ee-1e6ef 1e6f5
""",
}


@cache
def _newer_characters() -> npt.NDArray[np.uint8]:
    """For each code point, how it is newer than 0.23."""
    table = np.zeros(0x110000, np.uint8)
    for kind, ranges in _RANGES.items():
        for entry in ranges.split():
            first, _, last = entry.partition("-")
            table[int(first, 16) : int(last or first, 16) + 1] |= kind
    return table


def _kinds_in(texts: list[bytes]) -> bytes:
    """For each text, how its characters are newer than 0.23, or-ed."""
    table = _newer_characters()
    if native is not None:
        return bytes(native.kinds(texts, table))
    points = (np.frombuffer(text.decode().encode("utf-32-le"), np.uint32) for text in texts)
    return bytes(int(np.bitwise_or.reduce(table[own], initial=0)) for own in points)


def nfc(text: str) -> str:
    """A text in NFC by the reference's own tables, which differ from Python's."""
    if IS_SUCCESSOR:
        return unicodedata.normalize("NFC", text)  # equal for all texts that it does not refuse
    from tokenizers.normalizers import NFC

    return NFC().normalize_str(text)


# ---- added tokens ----------------------------------------------------------------------------------------------------


def with_added_tokens(tokenizer_json: bytes, tokens: Sequence[Mapping[str, Any]]) -> bytes:
    """A tokenizer.json with further added tokens, described as in `tokenizer_config.json`."""
    if IS_SUCCESSOR:
        return _with_added_tokens(tokenizer_json, tokens)
    from tokenizers import AddedToken

    tokenizer = backend(tokenizer_json)
    tokenizer.add_tokens([
        AddedToken(t["content"], special=bool(t.get("special")), **{k: bool(t[k]) for k in _FLAGS if k in t})
        for t in tokens
    ])  # fmt: skip
    written: str = tokenizer.to_str()
    return written.encode()


def _with_added_tokens(tokenizer_json: bytes, tokens: Sequence[Mapping[str, Any]]) -> bytes:
    """The same without `tokenizers`, whose 1.x has no such call. 0.23 also writes defaults that a file leaves out; only
    those of the model are added here, which is enough for nearly all files."""
    config = orjson.loads(tokenizer_json)
    model, vocab = config["model"], config["model"]["vocab"]
    if isinstance(vocab, list):
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    added = {token["content"]: token for token in config.get("added_tokens") or []}
    for token in tokens:
        content, special = token["content"], bool(token.get("special"))
        ids = [one["id"] for one in added.values()]
        free = max(len(vocab), max(ids, default=-1) + 1)
        flags = {name: bool(token.get(name, name == "normalized" and not special)) for name in _FLAGS}
        added[content] = {"id": vocab.get(content, free), "content": content, **flags, "special": special}
    config["added_tokens"] = sorted(added.values(), key=lambda token: int(token["id"]))
    if "merges" in model:
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        config["model"] = {**_BPE, **model, "merges": merges}
    return orjson.dumps(config)
