"""Option names of other tools: accepted where the meaning is the same, otherwise refused with a hint.

Sources: TRL and transformers' TrainingArguments, `datasets`, Axolotl, LLaMA-Factory, SkyRL, open-instruct, Tinker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import UsageError

log = logging.getLogger("penstock")

_LENGTH = ("max_length", "max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "model_max_length")
_VIEW = "is decided when loading, and encodes nothing again: ds.view({}) or {} in a training configuration"

PREPARE: Mapping[str, str] = {
    **dict.fromkeys(("num_proc", "num_workers", "dataset_num_proc", "preprocessing_num_workers"), "workers"),
    **dict.fromkeys(("dataset_text_field", "text_field", "text_column"), "text_key"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path", "processing_class"), "tokenizer"),
    **dict.fromkeys(("chat_template", "chat_template_path"), "template"),
    **dict.fromkeys(("max_samples", "max_examples", "num_samples"), "limit"),
    **dict.fromkeys(("field_messages", "messages_field"), "messages_key"),
    **dict.fromkeys(("cache_dir", "dataset_local_cache_dir"), "cache"),
    **dict.fromkeys(("overwrite_cache", "force_recache"), "force"),
    **dict.fromkeys(("disable_cache", "dataset_skip_cache"), "no_cache"),
    "chat_template_kwargs": "template_vars",
    "engine": "runner",
}
PREPARE_HINTS: Mapping[str, str] = {
    **dict.fromkeys(_LENGTH, _VIEW.format("max_length=…", "view.max_length")),
    **dict.fromkeys(
        (
            "assistant_only_loss",
            "completion_only_loss",
            "train_on_inputs",
            "train_on_prompt",
            "train_on",
            "train_on_what",
        ),
        _VIEW.format("train_on=…", "view.train_on"),
    ),
    **dict.fromkeys(("packing", "sample_packing"), "is the loader's: collate='packed', or loader.collate: packed"),
    **dict.fromkeys(("seed", "shuffle"), "belongs to the loader: view.loader(seed=…), which shuffles every epoch"),
    **dict.fromkeys(
        ("use_cache", "use_tokenized_cache", "load_from_cache_file"),
        "is not needed: the cache is always used. no_cache builds in a temporary folder instead, force rebuilds",
    ),
    "streaming": "is not needed: datasets are memory-mapped, and building them takes bounded memory",
}
# Names for one of our options, wherever that is unknown: consulted before names that only look alike.
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(_LENGTH[1:], "max_length"),
    **dict.fromkeys(("train_on_what", "loss_on", "loss_policy", "assistant_only_loss", "train_on_inputs"), "train_on"),
    **dict.fromkeys(("truncation", "truncation_mode", "truncation_strategy", "excess_length_strategy"), "overlong"),
    **dict.fromkeys(("val_set_size", "val_size", "test_size", "validation_split", "eval_fraction"), "holdout"),
    **dict.fromkeys(
        ("ahead", "prefetch_factor", "dataloader_prefetch_factor", "lookahead", "num_prefetch"), "prefetch"
    ),
    **dict.fromkeys(("train_batch_size", "global_batch_size", "total_batch_size"), "batch_size"),
    **dict.fromkeys(("micro_batch_size", "micro_train_batch_size", "per_device_train_batch_size"), "micro_batch"),
    **dict.fromkeys(("packing", "sample_packing", "packed", "collator", "collate_fn", "data_collator"), "collate"),
    **dict.fromkeys(("pack_length", "packing_length", "packed_length", "max_tokens", "batch_tokens"), "capacity"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "num_train_steps"), "steps"),
    **dict.fromkeys(("data_seed", "random_seed", "random_state"), "seed"),
    **dict.fromkeys(("tail", "drop_last", "dataloader_drop_last"), "incomplete_step"),
    **dict.fromkeys(("dp_rank", "data_parallel_rank", "process_index", "shard_index"), "rank"),
    **dict.fromkeys(("dp_size", "dp_world_size", "num_processes", "num_replicas", "num_shards"), "world_size"),
    **dict.fromkeys(("pad_token", "pad_token_id"), "pad_id"),
    **dict.fromkeys(("return_tensors", "with_format", "tensor_type"), "framework"),
    **dict.fromkeys(("num_proc", "num_workers", "dataset_num_proc"), "workers"),
    "loss_scale": "part_weights",
    "side": "padding_side",
    "part": "holdout_side",
}
# Values of our options as other tools, or a first guess, spell them: consulted before values that only look alike.
VALUES: Mapping[str, Mapping[str, str]] = {
    "train_on": {
        **dict.fromkeys(("assistant", "assistants", "assistant_only", "assistant_messages"), "all_assistant_messages"),
        **dict.fromkeys(("completion", "completions", "completion_only", "completions_only"), "all_assistant_messages"),
        **dict.fromkeys(("response", "responses", "responses_only", "answer", "answers"), "all_assistant_messages"),
        **dict.fromkeys(("all_assistant", "output", "outputs", "model", "gpt"), "all_assistant_messages"),
        **dict.fromkeys(("last", "final", "last_message", "last_assistant", "last_answer"), "last_assistant_message"),
        **dict.fromkeys(("last_turn", "turn", "mask_history"), "last_assistant_turn"),
        **dict.fromkeys(("messages", "conversation", "turns", "all_turns"), "all_messages"),
        **dict.fromkeys(("all", "everything", "full", "tokens", "text", "none"), "all_tokens"),
        **dict.fromkeys(("user", "users", "prompt", "prompts", "input", "inputs"), "all_user_and_system_messages"),
        **dict.fromkeys(("custom", "weights", "mask", "loss_mask"), "customized"),
    },
    "overlong": {
        **dict.fromkeys(("right", "keep_start", "truncate_right"), "truncate"),
        **dict.fromkeys(("left", "keep_end"), "truncate_left"),
        **dict.fromkeys(("skip", "filter", "remove"), "drop"),
        **dict.fromkeys(("chunk", "wrapped", "wrap"), "split"),
    },
    "collate": {
        **dict.fromkeys(("pack", "packing", "bfd", "varlen", "padding_free"), "packed"),
        **dict.fromkeys(("pad", "padding"), "padded"),
        **dict.fromkeys(("pair", "preference", "dpo"), "pairs"),
    },
}
RENAMED: Mapping[str, str] = {"--part": "--holdout-side"}  # flags
FLAGS: Mapping[str, str] = {"template_vars": "template-var"}  # flags whose name differs from their option
TRAIN: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "lr"), "optim.lr"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epochs"), "loader.epochs"),
    **dict.fromkeys(("max_steps", "steps"), "loader.steps"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "optim.warmup"),
    **dict.fromkeys(_LENGTH, "view.max_length"),
    **dict.fromkeys(("model_name_or_path", "base_model"), "model.path"),
    **dict.fromkeys(("output_dir",), "output"),
    **dict.fromkeys(("lora_r", "lora_rank"), "lora.rank"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val"), "optim.clip"),
    "lr_scheduler_type": "optim.schedule",
    "weight_decay": "optim.weight_decay",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "eval_steps": "eval.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "attn_implementation": "model.attention",
    "report_to": "log.trackers",
    "run_name": "log.run_name",
    "pref_beta": "dpo.beta",
}
# Keys of a training configuration, or whole sections, that have another place now. Checkpoints hold the earlier one.
MOVED: Mapping[str, str] = {
    "feed": "loader",
    "feed.ahead": "loader.prefetch",
    "feed.tail": "loader.incomplete_step",
    "loader.tail": "loader.incomplete_step",
    **{f"data.{key}": f"view.{key}" for key in ("train_on", "max_length", "overlong", "regions_unknown")},
    **{f"data.{key}": f"view.{key}" for key in ("parts", "part_weights")},
    **{f"eval.{key}": f"view.{key}" for key in ("holdout", "holdout_seed")},
}
TRAIN_HINTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps", "batch_size"),
        "use loader.batch_size (rows of a step over all devices) and loader.micro_batch (rows at a time on one)",
    ),
    **dict.fromkeys(("packing", "sample_packing"), "use loader.collate: packed"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype"), "use model.precision: auto, fp32, bf16-mixed or bf16"),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "train_file", "data_path"), "use data.sources"),
    **dict.fromkeys(("assistant_only_loss", "train_on_inputs", "completion_only_loss"), "use view.train_on"),
    **dict.fromkeys(("use_peft", "finetuning_type", "adapter"), "use lora.rank: above 0 trains adapters"),
    **dict.fromkeys(("val_set_size", "test_size"), "use view.holdout"),
    "beta": "use dpo.beta or kto.beta",
    "dataset_text_field": "use data.prepare.text_key",
    "num_proc": "use data.prepare.workers",
    "use_liger_kernel": "use liger.enabled",
    "resume_from_checkpoint": "nothing to set: the same command goes on from the last checkpoint (checkpoint.resume)",
}


def prepare_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translates options of `prepare` to our names."""
    _refuse([f"{name!r} {PREPARE_HINTS[name]}." for name in values if name in PREPARE_HINTS])
    found: dict[str, Any] = {}
    for name, value in values.items():
        ours = PREPARE.get(name, name)
        if ours in found or (ours != name and ours in values):
            raise UsageError(f"{name!r} means {ours!r}, which is given too. Give one of them.")
        found[ours] = value
    return found


def prepare_flags(arguments: Iterable[str]) -> list[str]:
    """Translates the arguments of `penstock prepare` to our flags."""
    found: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        if name in PREPARE_HINTS:
            raise UsageError(f"{flag} {PREPARE_HINTS[name]}.")
        ours = PREPARE.get(name)
        found.append(argument if ours is None else f"--{FLAGS.get(ours, ours).replace('_', '-')}{equals}{value}")
    return found


def check_flags(arguments: Iterable[str]) -> None:
    """Refuses flags that have another name now."""
    for flag in (argument.partition("=")[0] for argument in arguments):
        if flag in RENAMED:
            raise UsageError(f"{flag} is called {RENAMED[flag]}.")


def train_values(values: Mapping[str, Any], say: Callable[..., None] = log.info) -> dict[str, Any]:
    """Moves keys of other tools, and those with an earlier place, to their place in our training configuration."""
    _refuse([f"{name!r}: {TRAIN_HINTS[name]}." for name in values if name in TRAIN_HINTS])
    found: dict[str, Any] = {}
    moved: list[tuple[str, str, Any]] = []
    for name, value in values.items():
        if name in TRAIN:
            moved.append((name, TRAIN[name], value))
        elif isinstance(value, Mapping):
            places = {key: _moved(name, key) for key in value}
            moved += [(f"{name}.{key}", place, value[key]) for key, place in places.items() if place]
            kept = {key: entry for key, entry in value.items() if not places[key]}
            found |= {name: kept} if kept or name not in MOVED else {}
        else:
            found[name] = value
    for name, ours, value in moved:
        *sections, key = ours.split(".")
        place = found
        for section in sections:
            place[section] = dict(place.get(section) or {})
            place = place[section]
        if key in place:
            raise UsageError(f"{name!r} means {ours!r}, which is given too. Give one of them.")
        place[key] = value
        say("%s is read as %s", name, ours)
    return found


def _moved(section: str, key: str) -> str:
    """The place of a key that had another one; '' if it never moved."""
    return MOVED.get(f"{section}.{key}") or (f"{MOVED[section]}.{key}" if section in MOVED else "")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("\n  ".join(problems))
