"""NFC ahead of the encoder, for tokenizers that normalise to it: then byte sums hold for decomposed text too.

tokenizers matches added tokens in the text as it stands and normalises what lies between them; so does this. A text
is changed only if its segments, normalised one by one, give the same result (no mark composes across a boundary) and
nothing is left to compose; any other text stays as it was and is served by the reference encoder and its offsets.
Costs nothing but for the few texts that are not in NFC already.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import replace

from tokenizers.normalizers import NFC

from penstock.encode.code_points import Findings, is_composed, may_compose
from penstock.encode.vocabulary import NormalizerKind, Vocabulary
from penstock.regions.segments import Segments


class NfcNormalizer:
    """Brings texts to the form in which the tokenizer will look at them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        contents = sorted((t.content for t in vocabulary.added if t.content), key=len, reverse=True)
        self._active = vocabulary.normalizer is NormalizerKind.NFC and is_composed("".join(contents))
        self._normalise: Callable[[str], str] = NFC().normalize_str
        self._added = re.compile("(" + "|".join(map(re.escape, contents)) + ")") if contents else None

    def __call__(
        self, texts: list[bytes], segments: Segments, findings: Findings
    ) -> tuple[list[bytes], Segments, Findings]:
        """The texts to encode, with segments and findings that fit them."""
        if not self._active or not findings.decomposed:
            return texts, segments, findings
        changed: dict[int, bytes] = {}
        ends = segments.ends
        for row in findings.decomposed:
            first, last = int(segments.offsets[row]), int(segments.offsets[row + 1])
            parts = self._parts(texts[row], ends[first:last].tolist())
            if parts is None:
                continue
            if not changed:
                ends = ends.copy()
            changed[row] = b"".join(parts)
            total = 0
            for k, part in enumerate(parts):
                total += len(part)
                ends[first + k] = total
        if not changed:
            return texts, segments, findings
        left = findings._replace(decomposed=[row for row in findings.decomposed if row not in changed])
        texts = texts.copy()
        for row, text in changed.items():
            texts[row] = text
        return texts, replace(segments, ends=ends), left

    def _parts(self, text: bytes, ends: list[int]) -> list[bytes] | None:
        """The normalised segments of one text, or None where they are not independent of each other."""
        parts: list[bytes] = []
        start = 0
        for end in ends:
            part = text[start:end]
            if not part.isascii():
                piece = part.decode()
                if start and may_compose(piece[0]):
                    return None
                if not unicodedata.is_normalized("NFC", piece):
                    part = self._nfc(piece).encode()
            parts.append(part)
            start = end
        return parts if is_composed(b"".join(parts).decode()) else None

    def _nfc(self, text: str) -> str:
        """By the reference's own tables: Python's know marks that are newer, and reorder them."""
        if self._added is None:
            return self._normalise(text)
        pieces = self._added.split(text)
        pieces[::2] = [self._normalise(piece) for piece in pieces[::2]]
        return "".join(pieces)
