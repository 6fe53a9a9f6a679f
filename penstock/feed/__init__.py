"""Turns views into batches: gathers, collates and prefetches them, resumes at any step, and adapts them to torch.

`Loader` (behind `view.loader(...)`) is the entry point. `assemble` computes one batch, `collate` and `tree` lay out its
tensors, `prefetch` runs in a background thread, and `torch_datasets` serves trainers that do their own sampling.
"""
