"""Encodes texts to token ids: with a fast engine where it is known to match `tokenizers`, with `tokenizers` elsewhere.

`tokenizers` is the reference. A fast engine (`engines`) encodes a text only if (1) it agreed with the reference on
probes built from this tokenizer's own added tokens, (2) both treat all code points of the text alike, and (3) the text
is in NFC if the tokenizer normalizes to it. The result never depends on the engine. Of other texts, only the turns or
words that need it go to the reference.

Throughput per core, warm: gigatoken 70 to 160 MB/s on byte-level tokenizers and 15 to 80 MB/s on SentencePiece-style
ones; the reference 1 to 6 MB/s. A fast engine takes up to a second to start, so small inputs don't use one. It caches
every word it sees, so its cache is cleared whenever it has grown by `GROWTH_LIMIT`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain, pairwise, product
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from penstock.arrays import Int64, UInt32
from penstock.errors import EncoderPanic, TokenizerError
from penstock.literals import Literals
from penstock.prepare.encode.engines import ENGINES, ClassProbe, EngineOutput, FastEngine, why_untrusted
from penstock.prepare.encode.process_memory import GrowthWatch
from penstock.prepare.encode.unicode_checks import (
    CodePoints,
    Composer,
    Findings,
)
from penstock.prepare.encode.unigram import NAME as UNIGRAM
from penstock.prepare.encode.unigram import UnigramEngine
from penstock.prepare.tokenizer.reference import convert_panics, reference_encoder
from penstock.prepare.tokenizer.vocabulary import NormalizerKind, TokenPieces, Vocabulary

# ---- splitter --------------------------------------------------------------------------------------------------------
# Splits texts where that changes no token: before added tokens and, in long texts and around characters on which the
# engines differ, between a letter and a space.
#
# The reference encoder needs 100 to 250 bytes of memory per byte of input, so long texts are passed to it in pieces of
# about `PIECE_BYTES`. Splitting after a letter is used only if no token of the vocabulary spans such a position and the
# reference gives the same ids for probes as for their pieces. Otherwise, and in text without such a position, a piece
# may be as long as the text. Both checks run when the first long text arrives.


PIECE_BYTES = 1 << 18
_NEAR = 64  # bytes before a character where a place to split is sought first

# Latin, Cyrillic, Devanagari and Thai consonants, Hangul, CJK ideographs.
_LETTER = (
    rb"[A-Za-z]|[\xd0\xd1][\x80-\xbf]|\xe0\xa4[\x95-\xb9]|\xe0\xb8[\x81-\xae]"
    rb"|[\xeb\xec][\x80-\xbf]{2}|[\xe5-\xe9][\x80-\xbf]{2}"
)
_COMMA = rb"\xef\xbc\x8c"  # the fullwidth comma
_CUT = re.compile(rb"(?:" + _LETTER + rb")(?= |" + _COMMA + rb")")
_ACROSS = re.compile(rb"(?:" + _LETTER + rb"|^[\x80-\xbf]{1,2})(?= |\xef(?:\xbc(?:\x8c|$)|$))")

Ids = npt.NDArray[np.uint32]


class SafeCuts:
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

    def isolated(self, piece: bytes, spots: list[tuple[int, int]]) -> list[bytes]:
        """A piece split at the nearest possible places around some spots in it."""
        if not self._cuts_after_letters:
            return [piece]
        cuts = {0, len(piece)}
        for start, end in spots:
            width = _NEAR
            while not (before := [match.end() for match in _CUT.finditer(piece, max(0, start - width), start)]):
                if width >= start:
                    break
                width *= 8
            cuts.update(before[-1:])
            if after := _CUT.search(piece, end):
                cuts.add(after.end())
        return [piece[start:end] for start, end in pairwise(sorted(cuts))]

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


# ---- encoder ---------------------------------------------------------------------------------------------------------


SMALL_INPUT = 1_000_000  # bytes that the reference encodes while a fast engine would start
GROUP_BYTES = 1 << 20  # of texts passed to the reference at once
MAX_PIECE_BYTES = 4_000_000  # limit on text that can't be split; beyond it the reference needs gigabytes
MAX_TOKENS_ADDED = 1000  # around a text, by the tokenizer's post-processor
GROWTH_LIMIT = 64_000_000  # bytes of cache; reached after about 0.8 GB of ordinary text

UNKNOWN_END = (1 << 32) - 1

ByteLengths = npt.NDArray[np.unsignedinteger]
AlignmentTables = tuple[ByteLengths, TokenPieces]  # of all tokens, to find out where in a text they end


class Encoded(NamedTuple):
    """Ids of a batch: text i has ids[offsets[i]:offsets[i+1]]. `fallbacks` counts reference-encoded texts by reason."""

    ids: UInt32
    offsets: Int64
    fallbacks: Counter[str]
    ends: UInt32 | None = None  # where each token ends in its text, if the engine knows; `UNKNOWN_END` where it doesn't


class Encoder:
    """A tokenizer with its reference and fast engines."""

    def __init__(self, tokenizer_json: bytes, vocabulary: Vocabulary, *, fast: bool = True) -> None:
        self._json = tokenizer_json
        self.vocabulary = vocabulary
        self._points = CodePoints()
        self.compose = Composer(vocabulary, self._points)
        self.tables: AlignmentTables = vocabulary.byte_lengths, vocabulary.pieces
        self._reference = reference_encoder(tokenizer_json)
        if self._reference.is_engine and (reason := why_untrusted(self._reference.name, vocabulary)):
            raise TokenizerError(f"{reason}: pip install 'tokenizers<1'")
        self.has_offsets = self._reference.has_offsets
        self.prefix, self.suffix = self._special_tokens_added()
        self._cuts = SafeCuts(vocabulary, lambda texts: self._by_reference(texts)[0])
        self.engine = self._reference.name  # in use, with its version
        self._fast: FastEngine | None = None
        self._watch: GrowthWatch | None = None
        self._seen = 0  # bytes encoded before the fast engine starts
        self.not_served = ""  # why faster engines than the current one are not used
        self.why_reference = "" if fast else "the fast encoder is switched off"

    def _special_tokens_added(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's post-processor adds before and after a text (its BOS and EOS rule)."""
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for plain, full in self._reference.probes:
            extra = len(full) - len(plain)
            at = next((k for k in range(extra + 1) if full[k : k + len(plain)] == plain), None)
            if at is None:
                raise TokenizerError("unsupported tokenizer: its post-processor changes the text's own tokens")
            if plain:
                found.add((tuple(full[:at]), tuple(full[at + len(plain) :])))
            if extra > MAX_TOKENS_ADDED:
                raise TokenizerError(
                    f"unsupported tokenizer: its post-processor adds {extra:,} tokens to a text; at most "
                    f"{MAX_TOKENS_ADDED:,} are supported"
                )
        if len(found) > 1:
            raise TokenizerError("unsupported tokenizer: its post-processor adds tokens that depend on the text")
        prefix, suffix = found.pop() if found else ((), ())
        return list(prefix), list(suffix)

    # -- the fast engine ------------------------------------------------------------------------------------------

    def start_fast(self) -> None:
        """Start a fast engine now, rather than after `SMALL_INPUT` bytes."""
        if self._fast is None and not self.why_reference and not self._reference.is_engine:
            self.why_reference = self._start_fast()

    def _start_fast(self) -> str:
        """Start the first fast engine that passes its trial; returns why there is none, or ''."""
        reasons: list[str] = []
        for name in (UNIGRAM, *ENGINES) if self.vocabulary.unigram else ENGINES:
            engine, reason = self._try_engine(name)
            if engine is not None:
                self._fast, self._watch, self.engine = engine, GrowthWatch(GROWTH_LIMIT), engine.name
                if name in ENGINES and self.vocabulary.byte_level:  # others are not split by classes of characters
                    self._points.compare_newer(lambda points: self._class_probe.agreed(points))
                self.not_served = "; ".join(reasons)
                return ""
            reasons.append(reason)
        return "; ".join(reasons)

    @cached_property
    def _class_probe(self) -> ClassProbe:
        return ClassProbe(self.engine.split()[0], self.vocabulary.pre_tokenizer)

    def _try_engine(self, name: str) -> tuple[FastEngine | None, str]:
        """Start an engine and compare it with the reference on probes; returns the engine, or why it can't be used."""
        if name in ENGINES and (reason := why_untrusted(name, self.vocabulary)):
            return None, reason
        try:
            with convert_panics(name):
                engine = self._new_engine(name)
        except ImportError as error:
            return None, f"{name} is not available ({error})"
        except Exception as error:  # any failure of an engine counts as a refusal
            return None, f"{name} refuses this tokenizer: {str(error).splitlines()[0]}"
        probes = [probe.encode() for probe in probe_texts(self.vocabulary)]
        decomposed = set(self.compose.inspect(probes).decomposed)  # such texts are never passed to it
        probes = [probe for k, probe in enumerate(probes) if k not in decomposed]
        expected, ends = self._by_reference(probes)
        try:
            with convert_panics(name):
                found = engine.encode(probes)
        except EncoderPanic as error:
            return None, str(error)
        for k, probe in enumerate(probes):
            own = slice(*found.offsets[k : k + 2])
            same = k in found.left or np.array_equal(found.ids[own], expected[ends[k] : ends[k + 1]])
            if not same or (
                found.ends is not None
                and k not in found.left
                and not np.array_equal(found.ends[own], self._reference.token_ends(probe))
            ):
                return None, f"{name} differs from tokenizers on {probe.decode()!r}"
        return engine, ""

    def new_engine(self) -> FastEngine:
        """A fresh instance of the engine in use, with an empty cache; for benchmarks."""
        assert self._fast is not None, self.why_reference
        return self._new_engine(self._fast.name.split()[0])

    def _new_engine(self, name: str) -> FastEngine:
        if name == UNIGRAM:
            return UnigramEngine(self._reference, self.vocabulary)
        return ENGINES[name](_without_nfc(self._json, self.vocabulary))

    def _run_fast(self, texts: list[bytes]) -> EngineOutput:
        assert self._fast is not None
        try:
            with convert_panics(self._fast.name):
                return self._fast.encode(texts)
        except EncoderPanic as panic:
            self._fast, self.engine = None, self._reference.name  # its tables may be inconsistent
            self.why_reference = str(panic)
            raise

    # -- encoding -------------------------------------------------------------------------------------------------

    def encode(self, texts: list[bytes], findings: Findings | None = None) -> Encoded:
        """Encode UTF-8 texts without adding special tokens. `findings` are those of the texts, if known."""
        if self._reference.is_engine:
            return self.reference(texts)
        if self._fast is None and not self.why_reference:
            self._seen += sum(map(len, texts))
            if self._seen < SMALL_INPUT:
                return self.reference(texts, Counter({"the input is too small to start the fast engine": len(texts)}))
            self.start_fast()
        if self.why_reference:
            return self.reference(texts, Counter({self.why_reference: len(texts)}))
        assert self._fast is not None
        assert self._watch is not None
        if self._watch.exceeded():  # only between batches, so that one engine encodes each batch
            self._fast.clear_cache()
            self._watch.restart()
        try:
            return self._encode_fast(
                texts, self._guarded(self.compose.inspect(texts) if findings is None else findings)
            )
        except EncoderPanic:
            if self._uses_fast_engine():  # the reference panicked
                raise
            return self.reference(texts, Counter({self.why_reference: len(texts)}))

    def _uses_fast_engine(self) -> bool:
        return self._fast is not None

    def _encode_fast(self, texts: list[bytes], slow: dict[int, str]) -> Encoded:
        """Encode with the fast engine, except for the texts in `slow` and those that it leaves."""
        found = self._run_fast(
            [b"" if number in slow else text for number, text in enumerate(texts)] if slow else texts
        )
        slow = slow | dict(found.left)
        if not slow:
            return Encoded(found.ids, found.offsets, Counter(), found.ends)
        rows = sorted(slow)
        served, ends = self._in_pieces([self._split(texts[r]) for r in rows])
        served = served._replace(offsets=served.offsets[ends], fallbacks=Counter(slow.values()))
        return _spliced(found, rows, served)

    def _in_pieces(self, texts: list[list[bytes]]) -> tuple[Encoded, Int64]:
        """Encode the pieces of texts, each with the fastest exact engine; and where texts end among pieces."""
        pieces = list(chain.from_iterable(texts))
        guarded = self._guarded(self.compose.inspect(pieces))
        found = self._run_fast([b"" if number in guarded else piece for number, piece in enumerate(pieces)])
        slow = sorted({*found.left, *guarded})
        served = self.reference([pieces[p] for p in slow])
        return _spliced(found, slow, served), np.cumsum([0, *map(len, texts)])

    def _split(self, text: bytes) -> list[bytes]:
        """The pieces of a text, and characters on which the engines differ apart from the rest."""
        spots = ((piece, self._points.newer_in(piece)) for piece in self.pieces(text))
        return [part for piece, own in spots for part in (self._cuts.isolated(piece, own) if own else [piece])]

    def pieces(self, text: bytes) -> list[bytes]:
        """Split a text where that does not change its ids: at added tokens, and if it is long, after words."""
        return self._cuts.pieces(text)

    def oversized_texts(self, texts: list[bytes]) -> dict[int, int]:
        """The texts with a piece over `MAX_PIECE_BYTES`, and the size of their longest piece."""
        limit = MAX_PIECE_BYTES // self.vocabulary.growth
        if max(map(len, texts), default=0) <= limit:
            return {}
        long = (k for k, text in enumerate(texts) if len(text) > limit)
        sizes = {k: max(map(len, self.pieces(texts[k]))) for k in long}
        return {k: size for k, size in sizes.items() if size > limit}

    def reference(self, texts: list[bytes], why: Counter[str] | None = None) -> Encoded:
        """Encode with the reference engine only, long texts in pieces. Raises EncoderPanic."""
        cut = [self.pieces(text) if len(text) > PIECE_BYTES else [text] for text in texts]
        ids, offsets = self._by_reference(list(chain.from_iterable(cut)))
        return Encoded(ids, offsets[np.cumsum([0, *map(len, cut)])], why or Counter())

    def _by_reference(self, texts: list[bytes]) -> tuple[UInt32, Int64]:
        """Ids and offsets, in small groups: an encoding takes a hundred times the memory of its text."""
        found: list[UInt32] = []
        lengths: list[int] = []
        groups = np.cumsum([len(text) for text in texts]) // (GROUP_BYTES // self.vocabulary.growth)
        for start, end in pairwise([0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(texts)]):
            ids, offsets = self._reference.encode(texts[start:end])
            found.append(ids)
            lengths += np.diff(offsets).tolist()
        return np.concatenate([np.zeros(0, np.uint32), *found]), np.cumsum([0, *lengths])

    def token_ends(self, text: bytes, ids: UInt32) -> Int64:
        """Where each token of a text ends, in bytes. Each piece uses the tokens' byte lengths if they add up, else the
        reference's offsets."""
        if not self.vocabulary.byte_level:
            return self._reference.token_ends(text)
        pieces = self.pieces(text)
        encoded = self._pieces_encoded(pieces)
        if not np.array_equal(encoded.ids, ids):
            return self._reference.token_ends(text)
        nfc = self.vocabulary.normalizer is NormalizerKind.NFC
        ends: list[Int64] = []
        at = 0
        for piece, (start, end) in zip(pieces, pairwise(encoded.offsets.tolist()), strict=True):
            own = np.cumsum(self.vocabulary.byte_lengths[encoded.ids[start:end]], dtype=np.int64)
            adds_up = len(own) > 0 and own[-1] == len(piece) and (not nfc or self._points.is_composed(piece.decode()))
            ends.append(at + (own if adds_up else self._reference.token_ends(piece)))
            at += len(piece)
        return np.concatenate(ends)

    def _pieces_encoded(self, pieces: list[bytes]) -> Encoded:
        if self._fast is not None:
            try:
                return self._in_pieces([pieces])[0]
            except EncoderPanic:
                if self._fast is not None:  # the reference panicked
                    raise
        return self.reference(pieces)

    def _guarded(self, findings: Findings) -> dict[int, str]:
        """The texts that the fast engine must not encode, with the reason for each."""
        if self._fast is not None and self._fast.checks_texts:
            return {}
        newer = dict.fromkeys(findings.newer, "text with code points newer than Unicode 14")
        return dict.fromkeys(findings.decomposed, "text that is not in NFC") | newer


_NFC: Final = re.compile(rb'"normalizer"\s*:\s*\{\s*"type"\s*:\s*"NFC"\s*\}')


def _without_nfc(tokenizer_json: bytes, vocabulary: Vocabulary) -> bytes:
    """The same tokenizer for an engine that is only given text in NFC."""
    if vocabulary.normalizer is not NormalizerKind.NFC:
        return tokenizer_json
    changed, count = _NFC.subn(b'"normalizer":null', tokenizer_json)
    return changed if count == 1 else orjson.dumps({**orjson.loads(tokenizer_json), "normalizer": None})


def _spliced(found: EngineOutput, rows: list[int], served: Encoded) -> Encoded:
    """Replace some rows of a result by those of `served`."""
    lengths = np.diff(found.offsets)
    lengths[rows] = np.diff(served.offsets)
    ids = _replaced(found.ids, found.offsets, rows, served.ids, served.offsets)
    ends = found.ends
    if ends is not None:
        unknown = np.full(len(served.ids), UNKNOWN_END, np.uint32)
        ends = _replaced(ends, found.offsets, rows, unknown, served.offsets)
    return Encoded(ids, np.concatenate([[0], np.cumsum(lengths)]), served.fallbacks, ends)


def _replaced(values: UInt32, offsets: Int64, rows: list[int], new: UInt32, new_offsets: Int64) -> UInt32:
    pieces: list[UInt32] = []
    at = 0
    for k, row in enumerate(rows):
        pieces += (values[at : offsets[row]], new[new_offsets[k] : new_offsets[k + 1]])
        at = offsets[row + 1]
    return np.concatenate([*pieces, values[at:]])
