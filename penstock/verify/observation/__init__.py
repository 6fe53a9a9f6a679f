"""Observes a training loop from inside its process: steps, modules, Liger's kernels, the profiler, imported packages.

In: a process in which something trains. Out: `RunFacts` from `observer.Observer`, which combines the other modules.
Everything works through hooks and wrappers that are removed afterwards, so no trainer has to cooperate. `interpreter`
makes Liger's kernels run without a GPU.
"""
