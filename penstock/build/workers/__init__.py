"""Distributes slices over worker processes, ranks and hosts.

`sharing` decides which slices this process prepares, by rank and by claims in the cache. A `runner` runs them: `local`
here or in worker processes, `ray` in actors of a Ray cluster, to which `ray_cluster` connects; both replace workers
that die. `process` talks to one worker process. Slices come in as tasks, and a `SliceReport` goes out for each one that
was committed.
"""
