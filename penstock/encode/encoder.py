"""Texts in, token ids out: a fast engine where it is known to be equal to tokenizers, tokenizers everywhere else.

`tokenizers` is the reference. A fast engine (`engines`) serves a text only when (1) it agreed with the reference on
probes made from this tokenizer's own added tokens, (2) all code points of the text are old enough for both engines'
Unicode tables, (3) the text is in NFC where the tokenizer normalises to it. The result never depends on which one
served. Of a long text only the turns that need it go to the reference: tokenizers takes what lies between added tokens
by itself. Costs per core: gigatoken 70 to 160 MB/s on byte-level tokenizers and 15 to 80 on SentencePiece-style ones,
warm; reference 1 to 6 MB/s. A fast engine takes up to a second to start, so small input does without it; it keeps every
word that it has seen, so it has to forget them whenever they have taken `GROWTH_LIMIT`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from importlib.metadata import version
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.encode.code_points import Findings, code_points, inspect_texts, is_composed, utf8_widths
from penstock.encode.engines import ENGINES, Engine, not_trusted
from penstock.encode.memory import GrowthWatch
from penstock.encode.vocabulary import Normalizer, Vocabulary
from penstock.errors import TokenizerError

SMALL_INPUT = 1_500_000  # bytes that the reference encodes in the time that the fast engine takes to start
GROWTH_LIMIT = 64_000_000  # bytes that it keeps; on ordinary text reached after 0.8 GB, before a table of it doubles

Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]


class Encoded(NamedTuple):
    """Ids of a batch: text i owns ids[offsets[i]:offsets[i+1]]. `reference`: why the slow engine served, by reason."""

    ids: UInt32
    offsets: Int64
    reference: Counter[str]


class Encoder:
    """One tokenizer with both engines."""

    def __init__(self, tokenizer_json: bytes, vocabulary: Vocabulary, *, fast: bool = True) -> None:
        # Parallelism belongs to our worker processes; a thread pool in each would only fight over the cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer, processors

        self._json = tokenizer_json
        self._vocabulary = vocabulary
        try:
            self._reference = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:
            raise TokenizerError(f"tokenizers can't load this tokenizer.json: {error}") from error
        self._reference.no_truncation()
        self._reference.no_padding()
        self.prefix, self.suffix = self._added_around()
        # Templates write their own special tokens; and a post-processor may trim offsets.
        self._reference.post_processor = processors.Sequence([])
        self._added = _cutting(vocabulary)
        if self._added is not None and not self._cuts_are_safe():
            self._added = None
        self._fast: Engine | None = None
        self._watch: GrowthWatch | None = None
        self._seen = 0  # bytes encoded before the fast engine was started
        self.not_served = ""  # why a faster engine than the one that serves does not
        self.why_reference = "" if fast else "the fast encoder is switched off"

    def _added_around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself adds before and after a plain text (its BOS and EOS rule)."""
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for probe in ("a", "Hello there", ""):
            plain = self._reference.encode(probe, add_special_tokens=False).ids
            full = self._reference.encode(probe, add_special_tokens=True).ids
            extra = len(full) - len(plain)
            at = next((k for k in range(extra + 1) if full[k : k + len(plain)] == plain), None)
            if at is None:
                raise TokenizerError("the tokenizer's post-processor changes the text's own tokens; it is not served")
            if plain:
                found.add((tuple(full[:at]), tuple(full[at + len(plain) :])))
        if len(found) > 1:
            raise TokenizerError("the tokenizer's post-processor adds tokens that depend on the text; it is not served")
        prefix, suffix = found.pop() if found else ((), ())
        return list(prefix), list(suffix)

    def _cuts_are_safe(self) -> bool:
        """Whether the reference gives the same for texts and for their pieces."""
        probes = [probe.encode() for probe in _probes(self._vocabulary)]
        pieces = [piece for probe in probes for piece in self._pieces(probe)]
        return np.array_equal(self.reference(probes).ids, self.reference(pieces).ids)

    # -- the fast engine ------------------------------------------------------------------------------------------

    def _start_fast(self) -> str:
        """Make a fast engine and try it; the reasons why none can serve, or ''."""
        reasons: list[str] = []
        for name in ENGINES:
            engine, reason = self._tried(name)
            if engine is not None:
                self._fast, self._watch = engine, GrowthWatch(GROWTH_LIMIT)
                self.not_served = "; ".join(reasons)
                return ""
            reasons.append(reason)
        return "; ".join(reasons)

    def _tried(self, name: str) -> tuple[Engine | None, str]:
        """An engine that has passed its trial, or why there is none."""
        if reason := not_trusted(name, self._vocabulary):
            return None, reason
        try:
            engine = ENGINES[name](self._json)
        except ImportError as error:
            return None, f"{name} is not available ({error})"
        except Exception as error:  # a refusal of a young engine, in whatever form, is not ours to judge
            return None, f"{name} refuses this tokenizer: {str(error).splitlines()[0]}"
        probes = _probes(self._vocabulary)
        expected = [e.ids for e in self._reference.encode_batch_fast(probes, add_special_tokens=False)]
        ids, offsets = engine.encode([p.encode() for p in probes])
        for k, probe in enumerate(probes):
            if ids[offsets[k] : offsets[k + 1]].tolist() != expected[k]:
                return None, f"{name} differs from tokenizers on {probe!r}"
        return engine, ""

    @property
    def engine(self) -> str:
        """The engine that serves, with its version."""
        if self._fast is not None:
            return self._fast.name
        return f"tokenizers {version('tokenizers')}"

    def new_engine(self) -> Engine:
        """Another engine of the kind that serves, which has seen no text (for benchmarks)."""
        assert self._fast is not None, self.why_reference
        return ENGINES[self._fast.name.split()[0]](self._json)

    # -- encoding -------------------------------------------------------------------------------------------------

    def encode(self, texts: list[bytes], findings: Findings | None = None) -> Encoded:
        """Ids of UTF-8 texts, without anything added around them. `findings` are those of the texts, where known."""
        if self._fast is None and not self.why_reference:
            self._seen += sum(map(len, texts))
            if self._seen < SMALL_INPUT:
                return self.reference(texts, Counter({"the input is too small to start the fast engine": len(texts)}))
            self.why_reference = self._start_fast()
        if self.why_reference:
            return self.reference(texts, Counter({self.why_reference: len(texts)}))
        assert self._fast is not None
        assert self._watch is not None
        if self._watch.exceeded():  # only here, so that a batch is encoded by one engine from end to end
            self._fast.forget()
            self._watch.restart()
        slow = self._guarded(inspect_texts(texts) if findings is None else findings)
        ids, offsets = self._fast.encode(texts)
        if not slow:
            return Encoded(ids, offsets, Counter())
        rows = sorted(slow)
        served, ends = self._in_pieces([self._pieces(texts[r]) for r in rows])
        served = served._replace(offsets=served.offsets[ends], reference=Counter(slow.values()))
        return _spliced(ids, offsets, rows, served)

    def _in_pieces(self, texts: list[list[bytes]]) -> tuple[Encoded, Int64]:
        """The pieces of texts, each by the fastest engine that is exact for it; and where texts end among pieces."""
        assert self._fast is not None
        pieces = list(chain.from_iterable(texts))
        ids, offsets = self._fast.encode(pieces)
        slow = sorted(self._guarded(inspect_texts(pieces)))
        served = self.reference([pieces[p] for p in slow])
        return _spliced(ids, offsets, slow, served), np.cumsum([0, *map(len, texts)])

    def _pieces(self, text: bytes) -> list[bytes]:
        """A text cut before each added token."""
        if self._added is None:
            return [text]
        cuts = sorted({0, len(text), *(match.start() for match in self._added.finditer(text))})
        return [text[start:end] for start, end in pairwise(cuts)] or [text]

    def reference(self, texts: list[bytes], why: Counter[str] | None = None) -> Encoded:
        """The same, all by the reference engine."""
        encodings = self._reference.encode_batch_fast([t.decode() for t in texts], add_special_tokens=False)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(e) for e in encodings], out=offsets[1:])
        ids = np.empty(int(offsets[-1]), np.uint32)
        for k, encoding in enumerate(encodings):
            ids[offsets[k] : offsets[k + 1]] = encoding.ids
        return Encoded(ids, offsets, why or Counter())

    def token_ends(self, text: bytes, ids: UInt32) -> Int64:
        """Where each token of a text ends, in bytes: piece by piece, by the tokens' own lengths, if these add up, or by
        the reference's offsets."""
        if not self._vocabulary.byte_level:
            return self._reference_ends(text)
        pieces = self._pieces(text)
        encoded = self.reference(pieces) if self._fast is None else self._in_pieces([pieces])[0]
        if not np.array_equal(encoded.ids, ids):
            return self._reference_ends(text)
        nfc = self._vocabulary.normalizer is Normalizer.NFC
        ends: list[Int64] = []
        at = 0
        for piece, (start, end) in zip(pieces, pairwise(encoded.offsets.tolist()), strict=True):
            own = np.cumsum(self._vocabulary.byte_lengths[encoded.ids[start:end]], dtype=np.int64)
            adds_up = len(own) > 0 and own[-1] == len(piece) and (not nfc or is_composed(piece.decode()))
            ends.append(at + (own if adds_up else self._reference_ends(piece)))
            at += len(piece)
        return np.concatenate(ends)

    def _reference_ends(self, text: bytes) -> Int64:
        """The same, by the reference's offsets alone."""
        decoded = text.decode()
        encoding = self._reference.encode(decoded, add_special_tokens=False)
        ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(encoding))
        ends = np.maximum.accumulate(ends) if len(ends) else ends
        if decoded.isascii():
            return ends
        return np.concatenate([[0], np.cumsum(utf8_widths(code_points(decoded)), dtype=np.int64)])[ends]

    def _guarded(self, findings: Findings) -> dict[int, str]:
        """Texts the fast engine is not trusted with: number -> reason."""
        slow = dict.fromkeys(findings.newer, "text with code points newer than Unicode 14")
        if self._vocabulary.normalizer is Normalizer.NFC:
            slow = dict.fromkeys(findings.decomposed, "text that is not in NFC") | slow
        return slow


def _cutting(vocabulary: Vocabulary) -> re.Pattern[bytes] | None:
    """Finds added tokens as tokenizers does, where a text may be cut before each of them."""
    tokens = [token for token in vocabulary.added if token.content and not token.normalized]
    if not tokens or any(token.choosy for token in tokens):
        return None
    contents = sorted((token.content.encode() for token in tokens), key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, contents)))


def _spliced(ids: UInt32, offsets: Int64, rows: list[int], served: Encoded) -> Encoded:
    """The fast result with some rows replaced by the reference's."""
    pieces: list[UInt32] = []
    lengths = np.diff(offsets)
    at = 0
    for k, row in enumerate(rows):
        pieces.append(ids[at : offsets[row]])
        pieces.append(served.ids[served.offsets[k] : served.offsets[k + 1]])
        lengths[row] = served.offsets[k + 1] - served.offsets[k]
        at = offsets[row + 1]
    pieces.append(ids[at:])
    return Encoded(np.concatenate(pieces), np.concatenate([[0], np.cumsum(lengths)]), served.reference)


def _probes(vocabulary: Vocabulary) -> list[str]:
    """Texts on which the engines must agree before the fast one serves."""
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
