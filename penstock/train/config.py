"""Everything a training run can be told, declared once: YAML keys, overrides and documentation come from here.

Frozen records of plain values, one per section. `reading` makes them from YAML and `section.key=value`; what a
configuration can't promise is refused in `promises`, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.feed.settings import Collate
from penstock.options import option
from penstock.pack.settings import Tail
from penstock.view.policy import LossPolicy
from penstock.view.settings import Overlong, UnknownRegions


class Precision(StrEnum):
    """In which numbers the model computes, and in which its weights are kept."""

    AUTO = "auto"  # bf16-mixed where the device has it, else fp32
    FP32 = "fp32"
    BF16_MIXED = "bf16-mixed"  # computes in bf16, keeps weights and optimiser in fp32
    BF16 = "bf16"  # weights, optimiser and computation in bf16


class Schedule(StrEnum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Mean(StrEnum):
    """What the loss is a mean of, over the whole global batch."""

    TOKEN = "token"  # every trained token counts by its weight
    EXAMPLE = "example"  # every example counts the same


class Reference(StrEnum):
    """Where DPO's reference log-probabilities come from."""

    CACHED = "cached"  # computed once, kept beside the dataset
    LIVE = "live"  # computed at every step: by a frozen copy, or by the model with its adapter off


class Resume(StrEnum):
    """What a run does where its output holds checkpoints."""

    AUTO = "auto"  # go on from the last one; refuse if the settings changed
    ANYWAY = "anyway"  # go on, also with changed settings
    NEVER = "never"  # refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model."""

    path: str | None = option("Model: a folder or a hub name")
    init: Path | None = option(
        "A config.json (or its folder) to make a model with random weights from, instead of path"
    )
    revision: str | None = option("Revision of a model from the hub")
    tokenizer: str | None = option("Tokenizer: a folder or a hub name; default: that of the model")
    attention: str = option("Attention implementation of transformers: auto, eager, sdpa, flash_attention_2, …", "auto")
    precision: Precision = option("Numbers: auto, fp32, bf16-mixed, bf16", Precision.AUTO)
    gradient_checkpointing: bool = option("Compute activations again in the backward pass, to save memory", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One source of a mixture: what to read, and how much of it in an epoch."""

    path: tuple[str, ...] = option("Files, globs, folders, hub datasets, or the folder of a prepared dataset", ())
    name: str | None = option("Name in the mixture; default: the file's")
    weight: float | None = option("Passes per epoch; 0.3 is a fresh 30% each epoch [default: 1]")
    examples: int | None = option("Examples per epoch, instead of a weight")
    prepare: Mapping[str, Any] = option("Options of `penstock prepare` for this source (format, split, roles, …)", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    sources: tuple[SourceConfig, ...] = option("The sources; one, or several as a mixture", ())
    prepare: Mapping[str, Any] = option(
        "Options of `penstock prepare` for all sources (template, cache, workers, …)", {}
    )
    train_on: LossPolicy = option("Loss policy: " + ", ".join(LossPolicy), LossPolicy.ALL_ASSISTANT_MESSAGES)
    max_length: int | None = option("Longest sequence, in tokens")
    overlong: Overlong = option("Longer rows: " + ", ".join(Overlong), Overlong.TRUNCATE)
    regions_unknown: UnknownRegions = option("Rows whose regions are not certain: error, drop", UnknownRegions.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """How batches are made."""

    batch_size: int = option("Rows of a step over all ranks: sequences, pairs, or packed rows", 32)
    micro_batch: int | None = option(
        "Rows at a time on a rank, the rest is accumulated; default: all, of packed rows one "
        "(several are joined, which pays with flash attention only)"
    )
    collate: Collate | None = option("padded, packed or pairs; default: pairs for DPO, else padded")
    capacity: int | None = option("Tokens of a packed row; default: data.max_length")
    epochs: int | None = option("Passes over the data [default: 1, unless steps is given]")
    steps: int | None = option("Steps, instead of epochs")
    tail: Tail = option("Where an epoch does not fill its last step: fill, drop, wrap", Tail.FILL)
    ahead: int = option("Batches collated ahead of the step in the background; 0: collate in the loop", 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = option("Highest learning rate", 1e-5)
    schedule: Schedule = option("After the warm-up: constant, linear, cosine", Schedule.COSINE)
    warmup: float = option("Warm-up: a part of the run below 1, else a number of steps", 0.03)
    final: float = option("Learning rate at the end, as a part of the highest", 0.0)
    weight_decay: float = option("Weight decay, of matrices only", 0.0)
    betas: tuple[float, float] = option("AdamW's betas", (0.9, 0.999))
    eps: float = option("AdamW's epsilon", 1e-8)
    clip: float | None = option("Largest norm of the gradient; none: not clipped", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft)."""

    rank: int = option("Rank of the adapters; 0: train all weights", 0)
    alpha: float | None = option("Scale of the adapters [default: twice the rank]")
    dropout: float = option("Dropout in front of the adapters", 0.0)
    targets: tuple[str, ...] = option("Names of the modules that get one, or all-linear", ("all-linear",))
    merge: bool = option("Save the final model with the adapters merged in, instead of the adapters alone", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LigerConfig:
    """Liger's kernels."""

    enabled: bool = option("Use Liger's kernels; those below can be turned off one by one", False)
    rms_norm: bool = option("RMSNorm", True)
    rope: bool = option("Rotary embeddings", True)
    mlp: bool = option("SwiGLU or GeGLU", True)
    fused_loss: bool = option("Loss fused with the last layer: logits are never stored", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The loss of supervised fine-tuning."""

    mean: Mean = option(
        "Mean over the trained tokens of the global batch (token), or over its examples (example)", Mean.TOKEN
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoConfig:
    """Direct preference optimisation."""

    beta: float = option("How strongly to hold to the reference", 0.1)
    label_smoothing: float = option("Share of the preferences that may be wrong", 0.0)
    reference: Reference = option("Reference log-probabilities: cached (computed once, kept), live", Reference.CACHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoConfig:
    """Answers that are labelled as good or bad (KTO)."""

    beta: float = option("How strongly to hold to the reference", 0.1)
    desirable_weight: float = option("What a good answer counts in the loss", 1.0)
    undesirable_weight: float = option("What a bad answer counts in the loss", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation while training."""

    every: int | None = option("Evaluate every so many steps, and at the end")
    holdout: float | int | None = option("Rows to hold out of the sources: a fraction, or how many")
    holdout_seed: int = option("Which rows these are", 0)
    sources: tuple[SourceConfig, ...] = option("Sources to evaluate on, instead of a hold-out", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    every: int | None = option("Save every so many steps; signals and the end save too")
    keep: int = option("How many to keep", 2)
    resume: Resume = option("Where the output holds checkpoints: auto (go on), anyway, never (refuse)", Resume.AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written while training; metrics.jsonl and loss.svg always are."""

    tensorboard: bool = option("Write TensorBoard events too", False)
    trackers: tuple[str, ...] = option("Trackers of accelerate: wandb, mlflow, tensorboard, …", ())
    project: str = option("Project (or experiment) of the trackers", "penstock")
    run_name: str | None = option("Name of the run there; default: that of the output folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run."""

    output: Path = option("Folder for checkpoints, metrics and the final model", Path("run"))
    seed: int = option("Seed of the order, of random weights and of dropout", 0)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    feed: FeedConfig = field(default_factory=FeedConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    kto: KtoConfig = field(default_factory=KtoConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    liger: LigerConfig = field(default_factory=LigerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
