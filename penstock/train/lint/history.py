"""Keys that TRL, transformers and open-instruct used to accept, and what replaced them.

One entry per removed key, found by comparing the fields of released wheels, or of open-instruct's commits; the remarks
come from the projects' release notes. `last` is the newest release examined that still had the key, or the day before
the commit that removed it.
"""

from __future__ import annotations

from typing import NamedTuple


class RemovedKey(NamedTuple):
    """A key that a class used to accept: up to which release, and what to use instead."""

    owner: str  # package.Class
    key: str
    last: str
    instead: str | None  # the key that replaced it
    remark: str = ""


SFT, DPO, ARGS = "trl.SFTConfig", "trl.DPOConfig", "transformers.TrainingArguments"
OPEN, OPEN_DPO = "open_instruct.FlatArguments", "open_instruct.ModelConfig"
_TOKENIZER = (
    "a key of TokenizerConfig since 2025-03-21: add --for …/open_instruct/dataset_transformation.py:TokenizerConfig"
)

REMOVED_KEYS = (
    RemovedKey(SFT, "max_seq_length", "0.19", "max_length"),
    RemovedKey(SFT, "use_liger", "0.17", "use_liger_kernel"),
    RemovedKey(SFT, "chars_per_token", "0.17", None, "packing works on tokens, no estimate is needed"),
    RemovedKey(SFT, "num_of_sequences", "0.17", None, "packing works on tokens, no buffer is needed"),
    RemovedKey(SFT, "dataset_batch_size", "0.17", None, "datasets are mapped with the default batch size"),
    RemovedKey(DPO, "max_target_length", "0.13", "max_length", "max_completion_length replaced it until 0.28"),
    RemovedKey(
        DPO, "max_prompt_length", "0.28", "max_length", "prompts are no longer truncated separately; filter long ones"
    ),
    RemovedKey(DPO, "max_completion_length", "0.28", "max_length", "prompt and completion share one limit"),
    RemovedKey(DPO, "use_num_logits_to_keep", "0.16", None, "use_logits_to_keep replaced it until 0.28"),
    RemovedKey(DPO, "use_logits_to_keep", "0.28", None, "logits are computed where needed without a flag"),
    RemovedKey(DPO, "padding_value", "0.25", "pad_token"),
    RemovedKey(DPO, "label_pad_token_id", "0.28", None, "it is always -100"),
    RemovedKey(DPO, "is_encoder_decoder", "0.14", None, "it is read from the model"),
    RemovedKey(
        DPO,
        "use_liger_loss",
        "0.27",
        None,
        "use_liger_kernel switched the fused loss on from 0.28 to 1.12; from 1.13 on TRL has no Liger DPO loss",
    ),
    RemovedKey(DPO, "base_model_attribute_name", "0.28", None, "it served use_liger_loss"),
    RemovedKey(DPO, "generate_during_eval", "0.28", None, "log completions with a callback"),
    RemovedKey(DPO, "model_adapter_name", "0.28", None, "adapters are chosen on the model"),
    RemovedKey(DPO, "ref_adapter_name", "0.28", None, "adapters are chosen on the model"),
    RemovedKey(
        DPO, "ref_model_init_kwargs", "0.28", None, "load the reference yourself and pass ref_model to the trainer"
    ),
    RemovedKey(DPO, "force_use_ref_model", "0.28", None, "pass ref_model to the trainer"),
    RemovedKey(DPO, "reference_free", "0.28", None, "CPOTrainer trains without a reference"),
    RemovedKey(DPO, "rpo_alpha", "0.28", "loss_type", "loss_type: [sigmoid, sft] with loss_weights: [1.0, alpha]"),
    RemovedKey(DPO, "tools", "0.28", None, "tools are a column of the dataset"),
    RemovedKey(ARGS, "evaluation_strategy", "4.49", "eval_strategy"),
    RemovedKey(ARGS, "dispatch_batches", "4.49", "accelerator_config", "a key of accelerator_config"),
    RemovedKey(ARGS, "split_batches", "4.49", "accelerator_config", "a key of accelerator_config"),
    RemovedKey(ARGS, "tp_size", "4.51", "parallelism_config"),
    RemovedKey(ARGS, "sharded_ddp", "4.31", "fsdp"),
    RemovedKey(ARGS, "xpu_backend", "4.31", "ddp_backend"),
    RemovedKey(ARGS, "use_ipex", "4.55", None, "PyTorch has it built in"),
    RemovedKey(ARGS, "adafactor", "4.57", "optim", "optim: adafactor"),
    RemovedKey(ARGS, "fp16_backend", "4.57", None, "PyTorch's own is used"),
    RemovedKey(ARGS, "half_precision_backend", "4.57", None, "PyTorch's own is used"),
    RemovedKey(ARGS, "fp16_opt_level", "4.57", None, "it was apex's"),
    RemovedKey(ARGS, "fsdp_min_num_params", "4.57", "fsdp_config", "min_num_params of fsdp_config"),
    RemovedKey(
        ARGS,
        "fsdp_transformer_layer_cls_to_wrap",
        "4.57",
        "fsdp_config",
        "transformer_layer_cls_to_wrap of fsdp_config",
    ),
    RemovedKey(ARGS, "include_inputs_for_metrics", "4.57", "include_for_metrics", "include_for_metrics: [inputs]"),
    RemovedKey(ARGS, "include_tokens_per_second", "4.57", "include_num_input_tokens_seen"),
    RemovedKey(ARGS, "jit_mode_eval", "4.57", None),
    RemovedKey(ARGS, "no_cuda", "4.57", "use_cpu"),
    RemovedKey(ARGS, "use_mps_device", "4.57", None, "MPS is used if available"),
    RemovedKey(
        ARGS,
        "overwrite_output_dir",
        "4.57",
        None,
        "outputs are overwritten; resume_from_checkpoint decides on resuming",
    ),
    RemovedKey(ARGS, "per_gpu_train_batch_size", "4.57", "per_device_train_batch_size"),
    RemovedKey(ARGS, "per_gpu_eval_batch_size", "4.57", "per_device_eval_batch_size"),
    RemovedKey(ARGS, "push_to_hub_model_id", "4.57", "hub_model_id"),
    RemovedKey(ARGS, "push_to_hub_organization", "4.57", "hub_model_id"),
    RemovedKey(ARGS, "push_to_hub_token", "4.57", "hub_token"),
    RemovedKey(ARGS, "save_safetensors", "4.57", None, "safetensors is the only format"),
    RemovedKey(ARGS, "torchdynamo", "4.57", "torch_compile_backend"),
    RemovedKey(ARGS, "past_index", "4.57", None),
    RemovedKey(ARGS, "mp_parameters", "4.57", None, "it was SageMaker's"),
    RemovedKey(ARGS, "ray_scope", "4.57", None),
    RemovedKey(ARGS, "tpu_num_cores", "4.57", None, "the launcher decides"),
    RemovedKey(ARGS, "tpu_metrics_debug", "4.57", "debug"),
    RemovedKey(ARGS, "use_legacy_prediction_loop", "4.57", None),
    RemovedKey(ARGS, "group_by_length", "5.0", "train_sampling_strategy", "train_sampling_strategy: group_by_length"),
    RemovedKey(ARGS, "logging_dir", "5.10", None, "set the environment variable TENSORBOARD_LOGGING_DIR"),
    RemovedKey(ARGS, "warmup_ratio", "5.10", "warmup_steps", "a warmup_steps below 1 is a ratio"),
    RemovedKey(OPEN, "use_flash_attn", "0.2", None, "since 2026-03-30 the attention is detected, without a key"),
    RemovedKey(OPEN_DPO, "use_flash_attn", "0.2", "attn_implementation", "detected if it is not set"),
    RemovedKey(OPEN_DPO, "attn_backend", "0.2", "attn_implementation", "detected if it is not set"),
    RemovedKey(OPEN_DPO, "torch_dtype", "2025-12-16", "dtype"),
    *(
        RemovedKey(OPEN, key, "2025-03-20", None, _TOKENIZER)
        for key in ("chat_template_name", "tokenizer_name", "tokenizer_revision", "use_slow_tokenizer", "add_bos")
    ),
    RemovedKey(OPEN, "trust_remote_code", "2025-03-20", None, _TOKENIZER),
    RemovedKey(OPEN, "train_file", "2025-04-07", "dataset_mixer_list"),
    RemovedKey(OPEN, "overwrite_output_dir", "2025-03-18", None),
    RemovedKey(OPEN, "run_name", "2025-07-01", "exp_name"),
    RemovedKey(OPEN, "reduce_loss", "2025-09-18", None, "the loss is the mean over tokens"),
    RemovedKey(OPEN, "add_seed_and_date_to_exp_name", "0.1", None),
)

# Names that a package uses for the same thing in other classes, or that its older scripts used.
ELSEWHERE = {
    ("open_instruct", "chat_template"): (
        "the older reward and online DPO scripts' name (DatasetConfig of dataset_processor.py); finetune, DPO and GRPO "
        "have chat_template_name, a key of TokenizerConfig in dataset_transformation.py"
    ),
    ("open_instruct", "attn_implementation"): "a key of ModelConfig (DPO, GRPO); finetune detects the attention",
}

# Arguments of trainers that are often written into configurations by mistake.
TRAINER_ARGUMENTS = {
    "tokenizer": "now processing_class, an argument of the trainer (TRL 0.12, transformers 4.46), not a setting",
    "processing_class": "an argument of the trainer, not a setting",
    "model": "an argument of the trainer, not a setting; in a TRL script it is model_name_or_path of ModelConfig",
    "peft_config": "an argument of the trainer, not a setting",
    "train_dataset": "an argument of the trainer, not a setting",
    "eval_dataset": "an argument of the trainer, not a setting",
    "data_collator": "an argument of the trainer, not a setting",
    "ref_model": "an argument of DPOTrainer, not a setting",
    "formatting_func": "an argument of SFTTrainer, not a setting",
    "compute_metrics": "an argument of the trainer, not a setting",
    "completion_mask": "a column of the dataset, not a setting; TRL reads it with completion_only_loss=True",
    "assistant_masks": "a column of the dataset, not a setting; TRL reads it with assistant_only_loss=True",
}


def replacement(key: str, owners: set[str], accepted: set[str]) -> str | None:
    """Says what replaced an unaccepted key of the classes in `owners` (`package.Class`), or of their package."""
    packages = {owner.partition(".")[0] for owner in owners}
    own = [past for past in REMOVED_KEYS if past.key == key and past.owner in owners]
    others = [past for past in REMOVED_KEYS if past.key == key and past.owner.partition(".")[0] in packages]
    for past in (*own, *others):
        package, _, name = past.owner.partition(".")
        parts = [f"last seen in {package} {past.last} ({name})"]
        if past.instead is not None:
            gone = "" if past.instead in accepted else " (which this version does not have either)"
            parts.append(f"now {past.instead}{gone}")
        if past.remark:
            parts.append(past.remark)
        return "; ".join(parts)
    elsewhere = next((ELSEWHERE[package, key] for package in packages if (package, key) in ELSEWHERE), None)
    return elsewhere or TRAINER_ARGUMENTS.get(key)
