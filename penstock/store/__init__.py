"""The cache: committed shards, manifests, and the datasets that read them through mmap.

In: the columns of a slice, a recipe and a ledger. Out: files that are committed atomically and named by content, and
`Dataset`, which serves token ids and segments as numpy views on them.

A cache is in a local folder or in an object store. `storage` says what is needed of either, `local` and
`object_storage` provide it, and everything else is written once on top of it: `cache` (the layout, and how shards are
committed and found), `claims` (how processes and hosts share a cache), `gc`, `listing`, `verify` and `transfer`. `tier`
holds local copies of objects, `shard` and `manifest` are the formats, `dataset` reads them, and `trust` says whose
files are reused. Finding a dataset in the cache imports neither numpy nor pyarrow, so it takes milliseconds.
"""
