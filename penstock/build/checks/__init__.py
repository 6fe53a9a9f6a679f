"""Compares results with the reference engines (jinja2 and tokenizers).

The input is a slice's rows with the columns prepared from them, or a shard that another user wrote; the output is the
rows that differ. `spot_check` samples every slice of a build, `foreign_shards` samples shards of other users before
they are reused, `recheck` redoes a share of a finished dataset, and `auto_tokenizer` compares the tokenizer with
transformers' `AutoTokenizer`.
"""
