"""Distributes slices over worker processes, ranks and hosts.

`sharing` decides which slices this process prepares, by rank and by claims in the cache. An `engine` runs them: `pool`
here or in worker processes, `ray_engine` in actors of a Ray cluster (`ray_cluster` connects to it, `ray_slot` is the
actor); both replace workers that die. `process` talks to one worker process. Slices come in as tasks, and a
`SliceReport` goes out for each one that was committed.
"""
