"""Trains models on the feed: supervised fine-tuning and DPO, with torch, transformers, accelerate and peft.

In: a configuration (YAML, a mapping or a `TrainConfig`). Out: an output folder with metrics, checkpoints and the final
model, and a `TrainResult`.

`run` drives a run: `config_reader` and `validation` check the configuration, `data` prepares the sources, `assembly`
loads the model and its objective (`objective`, `loss`, `reference`), and `loop` takes the steps. `checkpoint`,
`metrics` and `final_model` write the output; `lock` and `signals` guard the process. Start reading at `loop`.

Modules are not imported here: `config` must be importable without torch. Use `penstock.train.run` for `train_sft`
and `train_dpo`.
"""
