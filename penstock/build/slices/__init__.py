"""One slice from its rows to its committed shard."""
