"""Encodes rendered texts to token ids and aligns their segments with the tokens.

In: UTF-8 texts and their segments in bytes (from `template` and `regions`), and a `tokenizer.json`. Out: token ids, and
for each segment the number of tokens up to its end (`example_batch`), as the columns of a shard (`columns`).

`encoder.Encoder` uses a fast engine wherever it is known to match the reference (`tokenizers`), and the reference
elsewhere, so the ids never depend on the engine. `unicode_checks` finds texts that need the reference.
"""
