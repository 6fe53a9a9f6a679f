"""Normalizes texts to NFC before encoding, for tokenizers that do so themselves: byte sums then hold for them too.

`tokenizers` matches added tokens in the unnormalized text and normalizes the text between them; so does this module. A
text is changed only if normalizing its segments one by one gives the same result (no mark composes across a boundary)
and leaves nothing to compose. Any other text stays as it is and goes to the reference encoder and its offsets.
Texts already in NFC, nearly all of them, cost nothing.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import replace

from tokenizers.normalizers import NFC

from penstock.encode.code_points import Findings, is_composed, may_compose
from penstock.encode.vocabulary import NormalizerKind, Vocabulary
from penstock.literals import Literals
from penstock.regions.segments import Segments


class NfcNormalizer:
    """Normalizes texts as the tokenizer will."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        contents = [t.content for t in vocabulary.added]
        self._active = vocabulary.normalizer is NormalizerKind.NFC and is_composed("".join(contents))
        self._normalize: Callable[[str], str] = NFC().normalize_str
        self._added = Literals(contents)

    def __call__(
        self, texts: list[bytes], segments: Segments, findings: Findings
    ) -> tuple[list[bytes], Segments, Findings]:
        """The texts to encode, with segments and findings adjusted to them."""
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
        """The normalized segments of a text, or None if they are not independent of each other."""
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
        """Normalize with the reference's tables: Python's are newer, and reorder marks that the reference does not."""
        pieces: list[str] = []
        end = 0
        for start, stop in self._added.spans(text):
            pieces += (self._normalize(text[end:start]), text[start:stop])
            end = stop
        return "".join((*pieces, self._normalize(text[end:])))
