"""Serves prepared datasets to training: every decision that encodes nothing again.

A `view` applies a loss policy (`policy`, `parts`), a maximum length and a hold-out (`index`, `windows`); a mixture
combines views. `plan` decides which items a step holds as a pure function of (lengths, settings, step), with `packing`
for packed rows. `gather` reads many items at once, `collate` and `assemble` lay out a batch, `prefetch` runs ahead on a
thread, and `loader.Loader` ties them together. `torch_datasets` serves trainers that do their own sampling.
"""
