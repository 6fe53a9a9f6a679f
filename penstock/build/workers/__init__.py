"""Distributes slices over worker processes, ranks and hosts.

`sharing` decides which slices this process prepares, by rank and by claims in the cache; `pool` runs them here or in
worker processes, and replaces workers that die; `process` talks to one worker. Slices come in as tasks, and
a `SliceReport` goes out for each one that was committed.
"""
