"""Exchanges data with other trainers: `export` writes their formats, `adopt` imports data that is already tokenized.

`export.export` runs an export: `rows` reads the tokens in blocks, a format in `formats/` writes them part by part, and
`folder` records finished parts and commits by a single rename, so that a killed export resumes and ends in the same
bytes. To add a format, add a module to `formats/`. `tables.lazy_dataset` wraps a view as a `datasets.Dataset`.

`adopt.adopt` checks the tokenizer and commits shards and a manifest, like `prepare`. Tables are read by `adopt_tables`,
numpy and Megatron files by `adopt_raw`. Only the loss mask is known, not who wrote what, so views use
`train_on="customized"` or `"all_tokens"`.
"""
