"""Builds datasets: turns slices of the sources into shards, and commits a manifest that lists them.

`run.Builder` takes sources and `PrepareOptions`, and returns an `Outcome` with the stored dataset. It reuses the
shards that are in the cache, prepares the missing slices in this process or in worker processes, and commits the
manifest last, so a killed build resumes where it stopped. `workers` distributes slices over processes, `explain` tells
why a slice is rebuilt, and `estimate` predicts the cost without building.
"""
