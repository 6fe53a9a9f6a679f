"""Committed shards and manifests, and the dataset that reads them through mmap."""
