"""Imports data that is already tokenized (`penstock adopt`).

In: `save_to_disk` folders, Parquet, JSON lines (`tables`), OLMo-core numpy parts or Megatron indexed datasets (`raw`),
and the tokenizer they were made with. Out: a dataset in the cache, like one from `prepare`.

Readers yield `chunk.Chunk`s, each of which becomes a shard; `adopt.adopt` checks the tokenizer and commits shards and
manifest. Only the loss mask is known, not who wrote what, so views use `train_on="customized"` or `"all_tokens"`.
`options` is importable without numpy.
"""

from penstock.adoption.options import AdoptOptions, adopt_options

__all__ = ["AdoptOptions", "adopt_options"]
