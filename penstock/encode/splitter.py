"""Splits texts where that changes no token: before added tokens and, in long texts, between a letter and a space.

The reference encoder needs 100 to 250 bytes of memory per byte of input, so long texts are passed to it in pieces of
about `PIECE_BYTES`. Splitting after a letter is used only if no token of the vocabulary spans such a position and the
reference gives the same ids for probes as for their pieces. Otherwise, and in text without such a position, a piece may
be as long as the text. Both checks run when the first long text arrives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from penstock.encode.vocabulary import Vocabulary
from penstock.literals import Literals

PIECE_BYTES = 1 << 18

# Latin, Cyrillic, Devanagari and Thai consonants, Hangul, CJK ideographs.
_LETTER = (
    rb"[A-Za-z]|[\xd0\xd1][\x80-\xbf]|\xe0\xa4[\x95-\xb9]|\xe0\xb8[\x81-\xae]"
    rb"|[\xeb\xec][\x80-\xbf]{2}|[\xe5-\xe9][\x80-\xbf]{2}"
)
_COMMA = rb"\xef\xbc\x8c"  # the fullwidth comma
_CUT = re.compile(rb"(?:" + _LETTER + rb")(?= |" + _COMMA + rb")")
_ACROSS = re.compile(rb"(?:" + _LETTER + rb"|^[\x80-\xbf]{1,2})(?= |\xef(?:\xbc(?:\x8c|$)|$))")

Ids = npt.NDArray[np.uint32]


class TextSplitter:
    """Splits texts for one tokenizer. `encode` is its reference encoder, returning the ids of all texts joined."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[list[bytes]], Ids]) -> None:
        self._vocabulary, self._encode = vocabulary, encode

    def pieces(self, text: bytes) -> list[bytes]:
        """The pieces of a text, in order."""
        cuts = {0, len(text)}
        if self._added is not None:
            cuts.update(start for start, _ in self._added.spans(text))
        pieces = [text[start:end] for start, end in pairwise(sorted(cuts))] or [text]
        if len(text) <= PIECE_BYTES or not self._cuts_after_letters:
            return pieces
        return [part for piece in pieces for part in _parts(piece)]

    @cached_property
    def _added(self) -> Literals[bytes] | None:
        """Matches added tokens as `tokenizers` does; None if texts can't be split before each of them."""
        tokens = [token for token in self._vocabulary.added if token.content and not token.normalized]
        if not tokens or any(token.context_sensitive for token in tokens):
            return None
        added = Literals(token.content.encode() for token in tokens)
        probes = [probe.encode() for probe in probe_texts(self._vocabulary)]
        return added if self._is_safe(probes, lambda probe: (start for start, _ in added.spans(probe))) else None

    @cached_property
    def _cuts_after_letters(self) -> bool:
        if any(_ACROSS.search(token) for token in self._vocabulary.token_bytes):
            return False
        after = (" ", "  ", " \n", " \n\n", "，", " ，", "，\n", " . ", " 1", " '", " \t")
        follow = ("cd", "Word", "1", "...", "", "'s", "中", "и", "é")
        before = ("ab", "The", "don't", "x1y", "中文", "привет", "한국어", "क", "ก")
        probes = ["".join(parts).encode() for parts in product(before, after, follow)]
        return self._is_safe(probes, lambda probe: (match.end() for match in _CUT.finditer(probe)))

    def _is_safe(self, probes: list[bytes], cuts: Callable[[bytes], Iterable[int]]) -> bool:
        """Whether the reference gives the same ids for probes and for their pieces."""
        probes = [*probes, b"".join(probes)]
        pieces: list[bytes] = []
        for probe in probes:
            found = sorted({0, len(probe), *cuts(probe)})
            pieces += [probe[start:end] for start, end in pairwise(found)] or [probe]
        return np.array_equal(self._encode(probes), self._encode(pieces))


def _parts(piece: bytes) -> list[bytes]:
    """Split a piece after letters, into parts of slightly more than `PIECE_BYTES`."""
    cuts = [0]
    while len(piece) - cuts[-1] > PIECE_BYTES and (match := _CUT.search(piece, cuts[-1] + PIECE_BYTES)):
        cuts.append(match.end())
    return [piece[start:end] for start, end in pairwise([*cuts, len(piece)])]


def probe_texts(vocabulary: Vocabulary) -> list[str]:
    """Texts on which engines must agree before a fast one is used, and pieces before texts are split."""
    added = [t.content for t in vocabulary.added]
    shown = added[:40] + added[-40:] if len(added) > 80 else added
    around = ["a{}b", " {} x", "\n{}\n", "{}{}", "1{}.", "x  {}  y", "é{}日本"]
    texts = [pattern.replace("{}", token) for token in shown for pattern in around]
    return [
        *texts,
        *added[40:-40],
        "Hello, world! It's 12345.67 — “quoted” (don't)…\n\n\n  indented\t\ttabs  \r\nCRLF \u00a0nbsp ",
        "def f(x):\n    return {'a': [1, 2, 3], \"b\": x**2}  # 100%\n\n\n",
        "Grüße, señor; café naïve. Привет, мир! Γειά σου. שלום עולם. مرحبا بالعالم ١٢٣. नमस्ते दुनिया. สวัสดี",
        "你好，世界！日本語のテキスト、한국어 문장입니다。繁體中文 ㍿ ﬁ ½ ² ① Ⅻ",
        "😀👩‍👩‍👧‍👦🏳️‍🌈 zero\u200bwidth\u200djoin\ufeff soft\u00adhyphen \u0000\u0001\u001f\u007f\u0085\u2028\u2029",
        "<|im_start|> </s> [INST] <think> <tool_call> {{ x }} {% y %} <0x0A> ▁ Ġ Ċ",
        " leading", "trailing ", "   ", "\n", "\t\n \n", "", "'S 'll 'RE I'M we'Ve", "A" * 300, "ab" * 200, "0" * 50,
    ]  # fmt: skip
