"""Slices in, shards and a manifest out: workers, resume, ledger, spot check."""
