"""What `penstock verify` runs: trainers, models and steps, cut down to run in seconds.

In: a `TargetSpec` and `ProbeLimits`. Out: a `Target` that trains until the observer ends it (`target`): a transformers
or TRL trainer (`hf_trainer`), `penstock train` (`penstock_trainer`, `penstock_data`), a bare model or a step function.
`shrink` cuts models and batches; `canaries` and `isolation` test whether packed sequences attend to each other.
"""
