"""Encodes rendered texts to token ids and aligns their segments with the tokens.

In: UTF-8 texts and their segments in bytes (from `template` and `regions`), and a `tokenizer.json`. Out: token ids, and
for each segment the number of tokens up to its end.

`Encoder` uses a fast engine wherever it is known to match the reference (`tokenizers`), and the reference elsewhere, so
the ids never depend on the engine. `Vocabulary` describes the tokens, `inspect_texts` finds texts that need the
reference, `NfcNormalizer` normalizes ahead of the encoder, `segment_token_ends` aligns. `memory` measures and trims the
heap; import it by its full name.
"""

from penstock.encode.align import segment_counts, segment_token_ends
from penstock.encode.code_points import Findings, inspect_texts, is_composed
from penstock.encode.encoder import MAX_PIECE_BYTES, Encoded, Encoder
from penstock.encode.nfc import NfcNormalizer
from penstock.encode.vocabulary import AddedToken, NormalizerKind, Vocabulary

__all__ = [
    "MAX_PIECE_BYTES",
    "AddedToken",
    "Encoded",
    "Encoder",
    "Findings",
    "NfcNormalizer",
    "NormalizerKind",
    "Vocabulary",
    "inspect_texts",
    "is_composed",
    "segment_counts",
    "segment_token_ends",
]
