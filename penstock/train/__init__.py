"""Trains models on the feed: supervised fine-tuning and DPO, with torch, transformers, accelerate and peft.

In: a configuration (YAML, a mapping or a `TrainConfig`). Out: an output folder with metrics, checkpoints and the final
model, and a `TrainResult`.

`run` drives a run: `config` and `validation` check the configuration, `data` prepares the sources, and `loop` loads the
model and its objective (`objective`, `kto`, `reference`) and takes the steps. `checkpoint` and `metrics` write the
output; `run_process` guards the process. Start reading at `loop`. `verify` checks that what a configuration promises
happens, and `lint` checks configurations of other trainers.

Modules are not imported here: `config` must be importable without torch. The entry is `ps.train`.
"""
